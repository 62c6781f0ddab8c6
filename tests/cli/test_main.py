"""The command line as a whole: help, exit statuses, colour and output streams."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged import __main__, __version__, cli
from cupaged.backends import cupy as cupy_backend
from cupaged.cli import cache, terminal
from cupaged.cli.status import EXIT_CODES, FAILED, INTERRUPTED, MISSING, USAGE
from cupaged.errors import BackendUnavailableError, CompileError
from tests.surroundings import command, environment

COMMANDS = ("doctor", "inspect", "bench", "demo", "compile", "cache")
ESCAPE = "\x1b["


def helped(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_commands_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys=capsys)
    for name in COMMANDS:
        assert re.search(rf"^    {name} +\w", text, re.MULTILINE), name
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^  {code} +{re.escape(meaning)}$", text, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(name, capsys=capsys)
    examples = re.findall(rf"^ .*?cupaged {name}(.*)$", text.split("examples:")[1], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        words = re.split(r" {3,}| > ", example)[0]
        arguments = [a or b for a, b in re.findall(r"'([^']*)'|(\S+)", words)]
        options = cli.parser("cupaged").parse_args([name, *arguments])
        assert options.command == name


@pytest.mark.parametrize("arguments", [(), ("docter",), ("doctor", "--xml"), ("bench", "--seqs", "0")])
def test_a_wrong_command_shows_how(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main(arguments)
    assert caught.value.code == USAGE
    assert "usage: python -m cupaged" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"cupaged {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CompileError("x.cu does not compile", log="", command=""), FAILED),
        (BackendUnavailableError("no GPU"), MISSING),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_an_error_is_a_status_and_a_line(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setitem(cache._ACTIONS, "show", fail)
    assert cli.main(["cache"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == str(error).strip()


def test_no_gpu_is_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(*_: object) -> None:
        raise BackendUnavailableError("no NVIDIA driver found")

    monkeypatch.setattr(cupy_backend.CupyBackend, "__init__", none)
    assert cli.main(["bench"]) == MISSING
    assert "no NVIDIA driver found" in capsys.readouterr().err


# ---- colour


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "coloured"),
    [
        (io.StringIO(), {}, False),
        (Screen(), {}, True),
        (Screen(), {"NO_COLOR": "1"}, False),
        (Screen(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (Screen(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals(
    stream: io.StringIO, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal.wants_colour(stream) is coloured


def test_nothing_is_coloured_in_a_pipe(tmp_path: Path) -> None:
    env = environment(tmp_path, NO_COLOR=None, FORCE_COLOR=None)
    for arguments in (("inspect", "--format", "nvfp4"), ("cache", "list"), ("bench", "--compare", "a", "b")):
        done = command(*arguments, env=env)
        assert ESCAPE not in done.stdout + done.stderr, arguments


def on_a_terminal(*arguments: str, env: dict[str, str]) -> str:
    """What ``python -m cupaged`` shows on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cupaged", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            shown += read
        process.wait(timeout=60)
    os.close(ours)
    return shown.decode()


def test_a_terminal_has_colour_unless_told_not_to(tmp_path: Path) -> None:
    env = environment(tmp_path, TERM="xterm", NO_COLOR=None, FORCE_COLOR=None)
    wrong = ("bench", "--compare", "missing.json", "missing.json")
    assert f"{ESCAPE}31m" in on_a_terminal(*wrong, env=env)
    assert ESCAPE not in on_a_terminal(*wrong, env={**env, "NO_COLOR": "1"})


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        [sys.executable, "-m", "cupaged", "inspect"],
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, PYTHONUNBUFFERED="1"),
        text=True,
    ) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == FAILED


# ---- tables and progress without rich


def test_a_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.Terminal().table(["name", "us"], [["a", "1.5"], ["long name", "1,200"]], "Title")
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "name          us",
        "a            1.5",
        "long name  1,200",
    ]


@pytest.mark.parametrize("with_rich", [True, False])
def test_progress_is_shown_on_a_terminal_alone(with_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_rich:
        monkeypatch.setattr(terminal, "_rich", lambda module: None)
    for stream_class, shown in ((Screen, True), (io.StringIO, False)):
        out, err = stream_class(), stream_class()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        with terminal.Terminal().progress() as progress:
            progress.reach(1, 2, "something")
        assert out.getvalue() == ""
        assert ("something" in err.getvalue()) is shown
