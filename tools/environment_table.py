"""Writes docs/environment.md from `cupaged.environment`: `python -m tools.environment_table`.

With --check it only says whether the page is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cupaged.environment import read_by

PAGE = Path(__file__).resolve().parent.parent / "docs" / "environment.md"
TITLES = {
    "package": "The package",
    "command line": "The command line",
    "CUDA": "CUDA and CuPy",
    "repository": "Tests, benchmarks and notebooks",
}
HEAD = """# Environment variables

Everything that the project reads from its environment. `cupaged doctor` shows what is set here. The table is
made from `cupaged/environment.py` by `python -m tools.environment_table`; a test compares them.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for reader, title in TITLES.items():
        rows = [f"| `{v.name}` | {v.default} | {v.meaning} |" for v in read_by(reader)]
        parts.append(
            "\n".join((f"## {title}\n", "| variable | default | means |", "|---|---|---|", *rows)) + "\n"
        )
    return "\n".join(parts)


def main() -> int:
    """Exit status 1 where --check finds the page out of date."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    stale = not PAGE.exists() or PAGE.read_text() != page()
    if stale:
        print("docs/environment.md is out of date: run python -m tools.environment_table")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
