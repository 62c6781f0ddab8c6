"""The documentation's sources: drawings as drawn, every public name in its place, links that lead somewhere.

`make docs` builds the site and looks at the rest.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import cupaged
from tools import drawings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def referenced() -> set[str]:
    return {name for page in (DOCS / "api").glob("*.md") for name in REFERENCE.findall(page.read_text())}


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_up_to_date(name: str) -> None:
    expected = drawings.DRAWINGS[name]().svg()
    assert (drawings.PICTURES / name).read_text() == expected, "run python -m tools.drawings"


def test_every_public_name_is_in_the_reference() -> None:
    pages = referenced()
    missing = []
    for name in set(cupaged.__all__) - {"__version__"}:
        home = getattr(cupaged, name).__module__
        parents = {home.rsplit(".", i)[0] for i in range(home.count(".") + 1)} - {"cupaged"}
        if not pages & {*parents, f"{home}.{name}", *(f"{parent}.{name}" for parent in parents)}:
            missing.append(f"{home}.{name}")
    assert not missing


def test_every_public_module_is_in_the_reference() -> None:
    modules = {f"cupaged.{name}" for name in cupaged._SUBMODULES}
    assert modules <= referenced()


@pytest.mark.parametrize("name", sorted(referenced()))
def test_what_the_reference_names_exists(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text())):
        assert (page.parent / target).resolve().exists(), target


def test_every_notebook_is_a_lesson() -> None:
    """Under its own title; the page says where the notebook is, for those who read plain Markdown."""
    notebooks = sorted((ROOT / "examples/notebooks").glob("*.py"))
    assert [page.stem for page in sorted((DOCS / "lessons").glob("*.md"))] == [
        path.stem for path in notebooks
    ]
    for path in notebooks:
        title, _, text = (DOCS / "lessons" / f"{path.stem}.md").read_text().partition("\n")
        assert f"# {title}\n" in path.read_text()
        assert f"](../../examples/notebooks/{path.name})" in text
        assert f"<!-- notebook: {path.stem} -->" in text


def test_pictures_of_the_notebooks_are_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in (DOCS / "pictures").iterdir())
