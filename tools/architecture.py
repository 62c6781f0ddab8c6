"""Draws the rooms of the package in docs/architecture.md: `python -m tools.architecture`.

An arrow goes from a room to one that it imports from; an arrow that follows from others is left out. With
--check it only says whether the page is up to date.
"""

from __future__ import annotations

import re
import sys

from tools.import_graph import KERNELS, PACKAGE, ROOT, Graph, between_rooms, imports, includes, rooms

PAGE = ROOT / "docs" / "architecture.md"


def reduced(edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The edges without those that follow from others; an edge to a later room stays."""
    downward = {(room, known) for room, known in edges if known < room}

    def reaches(begin: int, end: int) -> bool:
        return begin == end or any(reaches(known, end) for room, known in downward if room == begin)

    follows = {
        (room, end)
        for room, end in downward
        if any(reaches(known, end) for at, known in downward if at == room and known != end)
    }
    return edges - follows


def drawing(folder: str, graph: Graph) -> str:
    """A Mermaid flowchart of a folder's rooms."""
    among = rooms(folder)
    edges = reduced({(among.index(a), among.index(b)) for a, b in between_rooms(graph, among)})
    lines = ["```mermaid", "flowchart BT"]
    for number, room in enumerate(among):
        label = "<br>".join(pattern.removeprefix(f"{folder}/") for pattern in room.patterns)
        lines.append(f'  {folder[0]}{number}["{label}"]')
    lines += [f"  {folder[0]}{a} --> {folder[0]}{b}" for a, b in sorted(edges)]
    return "\n".join((*lines, "```"))


def page(text: str) -> str:
    """The page with its drawings made anew."""
    for folder, graph in ((PACKAGE, imports()), (KERNELS, includes())):
        pattern = re.compile(f"(<!-- {folder} -->\n).*?(<!-- end {folder} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"docs/architecture.md has no section {folder}")
        body = drawing(folder, graph)
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    """Exit status 1 where --check finds the page out of date."""
    old = PAGE.read_text()
    new = page(old)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
        return 0
    if new != old:
        print("docs/architecture.md is out of date: run python -m tools.architecture")
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main())
