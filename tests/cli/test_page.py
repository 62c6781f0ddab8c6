"""docs/command_line.md says what the commands do."""

from __future__ import annotations

import re
import shlex

import pytest

from cupaged import cli
from cupaged.cli.status import DONE, EXIT_CODES
from tools.import_graph import ROOT

PAGE = (ROOT / "docs" / "command_line.md").read_text()
SHOWN = re.findall(r"^\$ cupaged (.+)$", PAGE, re.MULTILINE)


def test_every_exit_status_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == {str(code): meaning for code, meaning in EXIT_CODES.items()}


def test_every_command_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+) +\w", capsys.readouterr().out, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == commands


@pytest.mark.parametrize("line", SHOWN)
def test_the_commands_shown_are_allowed(line: str) -> None:
    assert cli.parser("cupaged").parse_args(shlex.split(line)).command == line.split()[0]


def test_the_output_shown_is_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(line for line in SHOWN if line.startswith("inspect"))
    assert cli.main(shlex.split(line)) == DONE
    shown = PAGE.split(f"$ cupaged {line}\n")[1].split("```")[0]
    assert capsys.readouterr().out == shown
