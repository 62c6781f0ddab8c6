"""Source lines of places in a kernel's code, for check mode's reports."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

TOOLS = ("addr2line", "llvm-addr2line")
_INCLUDE = Path(__file__).resolve().parent / "include"
_GENERATED = "library.cpp"
_MAX_CALLERS = 4


def describe_place(library: Path, offset: int) -> str:
    """``file:line`` of a return address in a library, followed by the lines it was inlined into.

    Args:
        library: compiled with line numbers.
        offset: of the address from where the library begins.

    Without ``addr2line`` (which comes with g++, in binutils): library and offset.
    """
    lines = source_lines(library, offset)
    if not lines:
        return f"{library.name}+{offset:#x} (install addr2line for file and line)"
    if len(lines) == 1:
        return lines[0]
    return f"{lines[0]} (called from {', '.join(lines[1 : _MAX_CALLERS + 1])})"


@functools.lru_cache(maxsize=64)
def source_lines(library: Path, offset: int) -> tuple[str, ...]:
    """Innermost first; the emulator's own headers and the generated file around the kernel left out."""
    tool = next(filter(None, map(shutil.which, TOOLS)), None)
    if tool is None:
        return ()
    # The call itself ends before the address it returns to.
    command = [tool, "-i", "-e", str(library), hex(offset - 1)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = []
    for found in done.stdout.splitlines():
        name, _, line = found.partition(" (discriminator")[0].rpartition(":")
        path = Path(name)
        own = path.is_relative_to(_INCLUDE) or path.name == _GENERATED
        if line.isdigit() and line != "0" and not own:
            lines.append(f"{path.name}:{line}")
    return tuple(lines)
