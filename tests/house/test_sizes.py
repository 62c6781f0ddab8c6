"""Files that can be read at one sitting."""

from __future__ import annotations

from tools.import_graph import ROOT

MOST_LINES = 400
FOLDERS = ("cupaged", "kernels", "examples", "benchmarks", "tools", "tests")
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".sh")


def test_no_file_is_longer() -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
    }
    assert len(lines) > 200
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
