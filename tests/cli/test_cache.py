"""``cupaged cache``: where compiled kernels are, how many, and clearing them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupaged import cache, cli
from cupaged.cli.status import DONE, FAILED, MISSING


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", "4096")
    for name in ("cubin/a.bin", "cubin/b.bin", "emulator/c.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1024))
    return tmp_path


def test_cache_is_shown(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache"]) == DONE
    assert capsys.readouterr().out.splitlines() == [
        f"folder    {filled}",
        "cubin     2 entries, 2.0 KiB",
        "emulator  1 entries, 1.0 KiB",
        "size      3.0 KiB of 4.0 KiB",
    ]


def test_cache_is_cleared(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--clear"]) == DONE
    assert capsys.readouterr().out == f"{filled}: removed 3 entries, 3.0 KiB\n"
    assert cache.entries(filled) == []


def test_cache_that_cannot_be_cleared(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stays = filled / "cubin" / "a.bin"
    monkeypatch.setattr(cache, "clear", lambda folder: cache.Cleared(2, 2048, (stays,)))
    assert cli.main(["cache", "--clear"]) == FAILED
    assert capsys.readouterr().err == f"cannot remove {stays}\n"


def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPAGED_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cli.main(["cache"]) == MISSING
    assert "set CUPAGED_CACHE_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["clear"], ["--clear"]])
def test_clearing_by_word_and_by_option(filled: Path, arguments: list[str]) -> None:
    assert cli.main(["cache", *arguments]) == DONE
    assert cache.entries(filled) == []


def test_one_thing_for_scripts(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "where"]) == DONE
    assert capsys.readouterr().out == f"{filled}\n"
    assert cli.main(["cache", "size"]) == DONE
    assert capsys.readouterr().out == "3072\n"


def test_every_entry_is_listed(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "list"]) == DONE
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["last", "used", "size", "entry"]
    assert sorted(row.split()[-1] for row in rows) == ["cubin/a.bin", "cubin/b.bin", "emulator/c.so"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d +1\.0 KiB ", row) for row in rows)
