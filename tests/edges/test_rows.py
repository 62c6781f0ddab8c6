"""Every row has tests, and README.md says which."""

from __future__ import annotations

import ast

import pytest

from tests.edges.rows import ELSEWHERE, ROOT, ROWS, marked, table


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test(row: str) -> None:
    assert marked().get(row) or ELSEWHERE.get(row)


def test_every_mark_is_a_row() -> None:
    assert set(marked()) <= set(ROWS)
    assert set(ELSEWHERE) <= set(ROWS)


@pytest.mark.parametrize("name", sorted({name for names in ELSEWHERE.values() for name in names}))
def test_tests_named_elsewhere_exist(name: str) -> None:
    file, function = name.split("::")
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_the_readme_shows_the_table() -> None:
    readme = (ROOT / "tests" / "edges" / "README.md").read_text()
    assert table() in readme, "run: python -m tests.edges.rows, and put the table into README.md"
