"""Every environment variable is in the one table, and the table is what the pages show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from cupaged import environment
from cupaged.doctor import facts
from cupaged.environment import VARIABLES, Variable
from tools import environment_table
from tools.import_graph import ROOT

KNOWN = {variable.name for variable in VARIABLES}
# Read to find out how a program was started, or handed on to another; neither changes what the project does.
FOREIGN = {"TERM", "PATH"}
_READS = ("os.environ.get", "os.environ.pop", "os.environ.setdefault", "os.getenv")


def read_names(text: str) -> Iterator[str]:
    """Names in ``os.environ["X"]``, ``os.environ.get("X")``, ``"X" in os.environ`` and ``os.getenv("X")``."""
    for node in ast.walk(ast.parse(text)):
        source = ast.unparse(node)
        if isinstance(node, ast.Subscript) and source.startswith("os.environ["):
            yield from _literal(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _READS:
            yield from _literal(node.args[0])
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            yield from _literal(node.left)


def _literal(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


@pytest.mark.parametrize("folder", ["cupaged", "benchmarks", "examples", "tools", "tests"])
def test_no_variable_is_read_that_is_not_in_the_table(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in read_names(path.read_text())
        if name not in KNOWN | FOREIGN
    }
    assert found == set()


def test_reads_are_found() -> None:
    text = 'import os\nos.environ.get("A"), os.environ["B"], "C" in os.environ, os.getenv("D", "")\n'
    assert sorted(read_names(text)) == ["A", "B", "C", "D"]


def test_every_variable_is_read_somewhere() -> None:
    by_name, by_object = set(), set()
    objects = {id(value): name for name, value in vars(environment).items() if isinstance(value, Variable)}
    for folder in ("cupaged", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "environment.py":
                text = path.read_text()
                by_name.update(name for name in KNOWN if re.search(rf"[\"']{name}[\"']", text))
                by_object.update(re.findall(r"environment\.([A-Z_]+)", text))
    unread = {v.name for v in VARIABLES if v.name not in by_name and objects[id(v)] not in by_object}
    assert unread - {"HOME"} == set()  # HOME by pathlib


def test_the_page_is_up_to_date() -> None:
    assert environment_table.PAGE.read_text() == environment_table.page(), "python -m tools.environment_table"


def test_the_readme_names_no_other_variable() -> None:
    named = set(re.findall(r"`(CUPAGED_[A-Z_]+)`", (ROOT / "README.md").read_text()))
    assert named
    assert named <= KNOWN


def test_the_doctor_shows_them() -> None:
    shown = set(facts.collect().environment)
    assert shown == {variable.name for variable in VARIABLES if variable.reader in ("package", "CUDA")}


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = Variable("CUPAGED_NOTHING", "off", "A switch.")
    for text, value, is_on in (
        (None, None, False),
        (" ", None, False),
        ("0", "0", False),
        (" 1 ", "1", True),
    ):
        monkeypatch.delenv(variable.name, raising=False)
        if text is not None:
            monkeypatch.setenv(variable.name, text)
        assert (variable.get(), variable.is_on()) == (value, is_on)
