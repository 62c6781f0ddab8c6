"""Which module imports which, which kernel file includes which, and the rooms of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "cupaged"
KERNELS = "kernels"

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Room:
    """A row of the table.

    Attributes:
        patterns: paths from the root, with ``*``; a folder ends in ``/``.
        holds: what the table says of it.
    """

    patterns: tuple[str, ...]
    holds: str

    @property
    def name(self) -> str:
        """The paths, without what they have in common."""
        first, *others = self.patterns
        folder = first.split("/", 1)[0] + "/"
        return ", ".join((first, *(other.removeprefix(folder) for other in others)))

    def fit(self, path: str) -> int:
        """How closely a path fits: the length of the longest pattern that it has, or 0."""
        return max((len(p) for p in self.patterns if _fits(path, p)), default=0)


def _fits(path: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        return path.startswith(pattern)
    folder, _, name = pattern.rpartition("/")
    inside = path.removeprefix(f"{folder}/").split("/")
    return path.startswith(f"{folder}/") and fnmatch.fnmatchcase(inside[0], name)


def rooms(under: str, text: str | None = None) -> list[Room]:
    """Rows of the table whose first path is under a folder, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text() if text is None else text
    found = []
    for row in re.finditer(r"^\| (`[^|]+`) \| ([^|]+) \|$", text, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row[1])
        if first.startswith(f"{under}/"):
            patterns = (
                first,
                *(other if other.startswith(f"{under}/") else f"{under}/{other}" for other in others),
            )
            found.append(Room(patterns, row[2].strip()))
    return found


def room_of(path: str, among: list[Room]) -> Room:
    """The room of a file, by the pattern that fits it most closely.

    Raises:
        LookupError: it is in none, or two rooms claim it alike.
    """
    fits = [(room.fit(path), room) for room in among]
    best = max((fit for fit, _ in fits), default=0)
    found = [room for fit, room in fits if fit == best]
    if not best or len(found) > 1:
        raise LookupError(f"{path} is in {len(found) if best else 0} rooms of CONTRIBUTING.md's table")
    return found[0]


def imports() -> Graph:
    """Module file -> files of the package that it imports, imports for type checking alone left out."""
    files = {_module_name(path): _relative(path) for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    return {
        file: {files[target] for target in _imported(ROOT / file, files) if files[target] != file}
        for file in files.values()
    }


def includes() -> Graph:
    """Kernel file -> kernel files that it includes."""
    files = [path for path in sorted((ROOT / KERNELS).rglob("*")) if path.suffix in (".cu", ".cuh")]
    graph: Graph = {}
    for path in files:
        named = re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE)
        found = (
            next((f for f in (path.parent / name, ROOT / KERNELS / name) if f.exists()), None)
            for name in named
        )
        graph[_relative(path)] = {_relative(file) for file in found if file is not None}
    return graph


def between_rooms(graph: Mapping[str, set[str]], among: list[Room]) -> dict[tuple[Room, Room], list[str]]:
    """(room, room it knows) -> the lines of the graph behind that, without rooms that know themselves."""
    found: dict[tuple[Room, Room], list[str]] = {}
    for file, targets in graph.items():
        for target in sorted(targets):
            pair = (room_of(file, among), room_of(target, among))
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{file} -> {target}")
    return found


def _relative(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, known: Mapping[str, str]) -> Iterator[str]:
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else str(node.module)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run, imports inside functions among them; not the branch for type checkers."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from _running(child)
