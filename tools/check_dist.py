"""Whether the sdist and the wheel carry what they must: `python tools/check_dist.py FILE ...`.

`--oldest` prints the lowest versions of the dependencies instead, as arguments of pip.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".pyi", ".typed", ".cu", ".cuh", ".cpp", ".h")
# Folder of the tree -> where it is in the wheel.
CARRIED = {"cupaged": "cupaged", "kernels": "cupaged/_cuda"}
FORBIDDEN = re.compile(r"(^|/)(__pycache__|scratch|build|\.venv|tests?_results)/|\.pyc$")


def expected() -> set[str]:
    """Every source file of the package and the kernels, by its path in the tree."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in CARRIED
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES and "__pycache__" not in path.parts
    }


def in_wheel(path: str) -> str:
    """Where a file of the tree is in the wheel."""
    folder, _, rest = path.partition("/")
    return f"{CARRIED[folder]}/{rest}"


def problems(archive: Path) -> list[str]:
    """What is missing from an archive, or does not belong there."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            names = set(file.namelist())
        wanted = {in_wheel(path) for path in expected()}
    else:
        with tarfile.open(archive) as file:
            names = {name.partition("/")[2] for name in file.getnames()}
        wanted = expected() | {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"}
    return [f"{archive.name} lacks {name}" for name in sorted(wanted - names)] + [
        f"{archive.name} has {name}" for name in sorted(names) if FORBIDDEN.search(name)
    ]


def oldest(pyproject: str) -> list[str]:
    """The lowest version of each dependency, as ``numpy==1.26.*``."""
    found = re.search(r"^dependencies = \[(.*)\]$", pyproject, re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml has no dependencies")
    return [f"{name}=={version}.*" for name, version in re.findall(r'"([\w.-]+)>=([\d.]+)"', found[1])]


def main(arguments: list[str]) -> int:
    """Exit status 1 where something is missing."""
    if arguments == ["--oldest"]:
        print(" ".join(oldest((ROOT / "pyproject.toml").read_text())))
        return 0
    found = [problem for argument in arguments for problem in problems(Path(argument))]
    print("\n".join(found) or f"{len(arguments)} archives carry all {len(expected())} sources")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
