"""``cupaged doctor``: what was found on this machine, and whether each backend works."""

from __future__ import annotations

import argparse

from cupaged.cli.parsing import Commands, command
from cupaged.cli.status import DONE, FAILED
from cupaged.cli.terminal import Terminal
from cupaged.doctor import examine


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "doctor",
        summary="show what was found on this machine, and test each backend",
        description="Shows versions, GPUs, compilers, the cache and the environment variables that matter,\n"
        "and writes and decodes a small cache on each backend. What is missing comes with the command\n"
        "that mends it. Exit status 0: at least one backend works and none gives wrong results.",
        examples="  %(prog)s\n  %(prog)s --json > report.json     for a bug report",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Examine and report."""
    report = examine()
    terminal.line(report.to_json() if options.json else report.to_text())
    return DONE if report.healthy else FAILED
