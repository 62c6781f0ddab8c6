"""The rooms of CONTRIBUTING.md: everything is in one, and none knows a room below it."""

from __future__ import annotations

import pytest

from tools import architecture
from tools.import_graph import KERNELS, PACKAGE, Graph, Room, between_rooms, imports, includes, room_of, rooms

GRAPHS = {PACKAGE: imports, KERNELS: includes}


def upward(graph: Graph, among: list[Room]) -> list[str]:
    """Lines of the graph from a room to one below it."""
    return [
        line
        for (room, known), lines in between_rooms(graph, among).items()
        if among.index(known) > among.index(room)
        for line in lines
    ]


@pytest.mark.parametrize("folder", GRAPHS)
def test_every_file_is_in_one_room(folder: str) -> None:
    among = rooms(folder)
    assert len(among) > 5
    used = {room_of(file, among) for file in GRAPHS[folder]()}
    assert [room.name for room in among if room not in used] == [], "rooms without a file"


@pytest.mark.parametrize("folder", GRAPHS)
def test_no_room_knows_a_room_below_it(folder: str) -> None:
    graph = GRAPHS[folder]()
    assert sum(map(len, graph.values())) > len(graph), "the graph is nearly empty"
    assert upward(graph, rooms(folder)) == []


@pytest.mark.parametrize("folder", GRAPHS)
def test_no_file_reaches_itself(folder: str) -> None:
    graph = GRAPHS[folder]()
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path[path.index(file) :], file))
        if file not in done:
            for target in sorted(graph[file]):
                visit(target, (*path, file))
            done.add(file)

    for file in graph:
        visit(file, ())


def test_the_contract_can_be_broken() -> None:
    among = rooms("x", "| `x/low.py`, `pair/` | first |\n| `x/high*.py` | second |\n| `y/` | not of x |\n")
    assert [room.name for room in among] == ["x/low.py, pair/", "x/high*.py"]
    assert (
        upward({"x/high_er.py": {"x/low.py"}, "x/low.py": {"x/pair/a.py"}, "x/pair/a.py": set()}, among) == []
    )
    assert upward({"x/pair/a.py": {"x/high.py"}}, among) == ["x/pair/a.py -> x/high.py"]
    with pytest.raises(LookupError, match=r"x/other\.py is in 0 rooms"):
        room_of("x/other.py", among)


def test_imports_are_seen_wherever_they_are() -> None:
    graph = imports()
    assert "cupaged/errors.py" in graph["cupaged/pointers.py"]
    assert "cupaged/backends/cupy/__init__.py" in graph["cupaged/doctor/selftest.py"]  # inside a function
    assert "cupaged/backends/base.py" not in graph["cupaged/handle.py"]  # for type checkers alone


def test_the_drawing_is_up_to_date() -> None:
    text = architecture.PAGE.read_text()
    assert architecture.page(text) == text, "run python -m tools.architecture"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    assert architecture.reduced({(3, 2), (2, 1), (3, 1), (1, 0), (3, 0)}) == {(3, 2), (2, 1), (1, 0)}
