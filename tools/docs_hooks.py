"""Hooks of the documentation's build (mkdocs.yml): what comes from elsewhere in the repository.

`<!-- notebook: name -->` becomes that notebook, `<!-- changelog -->` CHANGELOG.md, both without their titles;
`<!-- README: Heading -->` becomes that section of README.md.
Read as plain Markdown, such a page says where its content is. Links to files that are no
pages become plain text, after a look whether the file exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "examples" / "notebooks"
_SECTION = re.compile(r"^<!-- README: (.+?) -->$", re.MULTILINE)
_NOTEBOOK = re.compile(r"^<!-- notebook: (\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def lesson(name: str) -> str:
    """A notebook as Markdown, without its front matter, its title and its output."""
    text: str = jupytext.writes(jupytext.read(NOTEBOOKS / f"{name}.py"), "markdown")
    return without_title(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL))


def without_title(text: str) -> str:
    """What stands below the first heading; the page has one of its own."""
    return text.strip().partition("\n")[2]


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Fill in sections of the README, then look after links that leave the documentation."""
    markdown = _SECTION.sub(lambda match: readme_section(match[1], page), markdown)
    markdown = _NOTEBOOK.sub(lambda match: lesson(match[1]), markdown)
    markdown = markdown.replace("<!-- changelog -->", without_title((ROOT / "CHANGELOG.md").read_text()))
    parts = _CODE.split(markdown)  # every second one is code
    parts[::2] = [_LINK.sub(lambda match: link(match, page, files), text) for text in parts[::2]]
    return "".join(parts)


def readme_section(heading: str, page: Page) -> str:
    """The text below a heading of the README, its links as seen from the page."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise PluginError(f"{page.file.src_uri}: README.md has no section '{heading}'")
    up = "../" * page.file.src_uri.count("/")
    return found[1].replace("](docs/", f"]({up}")


def link(match: re.Match[str], page: Page, files: Files) -> str:
    """The link as it is where it leads to a page or a picture, else its text."""
    target = (Path("/", page.file.src_uri).parent / match[3]).resolve().relative_to("/").as_posix()
    if files.get_file_from_path(target) is not None:
        return match[0]
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    if not any((folder / match[3]).exists() for folder in (source.parent, ROOT)):
        raise PluginError(f"{page.file.src_uri}: link to {match[3]}, which is no page and no file")
    return match[2]
