"""Formats the CUDA and C++ sources with clang-format, or with --check says which are not formatted."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "cupaged", "tests", "examples")
SUFFIXES = {".cu", ".cuh", ".h", ".cpp"}


def sources() -> list[str]:
    """Every CUDA and C++ file of the project."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(str(path) for path in found if path.suffix in SUFFIXES)


def main() -> int:
    """Exit status of clang-format."""
    mode = ["--dry-run", "--Werror"] if "--check" in sys.argv[1:] else ["-i"]
    tool = Path(sys.executable).parent / "clang-format"
    command = [str(tool) if tool.exists() else "clang-format", *mode, *sources()]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
