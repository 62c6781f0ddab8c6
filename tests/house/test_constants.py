"""A table of the package is written once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tools.import_graph import ROOT

LEAST = 4  # entries: shorter ones are alike by chance


def tables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, value) of each tuple, list, set or dict of literals that a module defines."""
    for statement in tree.body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        try:
            value = ast.literal_eval(statement.value)
        except ValueError:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if (
            isinstance(value, (tuple, list, set, dict))
            and len(value) >= LEAST
            and ast.unparse(target)[:2] != "__"
        ):
            yield ast.unparse(target), repr(value)


def repeated(sources: Iterable[tuple[str, str]]) -> list[list[str]]:
    """``file: name`` of tables that are equal."""
    places = defaultdict(list)
    for file, text in sources:
        for name, value in tables(ast.parse(text)):
            places[value].append(f"{file}: {name}")
    return [found for found in places.values() if len(found) > 1]


def test_no_table_stands_twice() -> None:
    files = sorted((ROOT / "cupaged").rglob("*.py"))
    assert len(files) > 100
    assert repeated((path.relative_to(ROOT).as_posix(), path.read_text()) for path in files) == []


def test_a_copied_table_is_found() -> None:
    sizes = '{"a": 1, "b": 2, "c": 3, "d": 4}'
    assert repeated([("x.py", f"SIZES = {sizes}"), ("y.py", f"_BYTES: dict[str, int] = {sizes}")]) == [
        ["x.py: SIZES", "y.py: _BYTES"]
    ]
    assert repeated([("x.py", "A = (1, 2, 3, 4)"), ("y.py", "A = (1, 2, 3, 5)\n__all__ = [*A]")]) == []
