"""Nothing is defined that nothing uses: in the package, and in the kernels."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.import_graph import ROOT

READERS = ("cupaged", "tests", "examples", "benchmarks", "tools")  # whose use of a public name counts
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def definitions(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, methods and module constants; names that Python itself calls left out."""
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def uses(tree: ast.Module) -> Iterator[str]:
    """Names that are read, attributes, imports, and words in strings, as getattr takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def documented() -> set[str]:
    """Words of code in the pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    code = (
        piece for page in pages for piece in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    )
    return {word for piece in code for word in re.findall(r"\w+", piece)}


def unused(files: Iterable[tuple[str, str]], readers: Iterable[str], also: Iterable[str] = ()) -> list[str]:
    """``file: name`` of what is defined in the files and used neither there nor, if public, by readers."""
    trees = {name: ast.parse(text) for name, text in files}
    inside = {word for tree in trees.values() for word in uses(tree)}
    outside = inside | {word for text in readers for word in uses(ast.parse(text))} | set(also)
    return [
        f"{file}: {name}"
        for file, tree in trees.items()
        for name in definitions(tree)
        if not re.fullmatch(r"__\w+__", name) and name not in (inside if name.startswith("_") else outside)
    ]


def test_the_package_has_no_dead_code() -> None:
    files = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in python_files("cupaged")]
    assert unused(files, (path.read_text() for path in python_files(*READERS)), documented()) == []


def test_dead_code_is_found() -> None:
    text = "A = 1\n_B = 2\ndef f(): return A\nclass C:\n  def used(self): ...\n  def _never(self): ...\n"
    assert unused([("x", text)], ["f(); C.used; C._never; _B"]) == ["x: C", "x: _never", "x: _B"][1:]
    assert unused([("x", text)], []) == ["x: f", "x: C", "x: used", "x: _never", "x: _B"]


# ---- kernels

_DEFINED = re.compile(
    r"\bDEVICE\s+(?:[\w:<>*&, ]+?\s)?[*&]?(\w+)\s*\(|\bstruct\s+(\w+)|\bconstexpr\s+\w+\s+(\w+)|"
    r"#define\s+(\w+)|\busing\s+(\w+)\s*="
)
_SPECIALISED = re.compile(r"\bstruct\s+\w+<")


def undefined_elsewhere(texts: dict[str, str], others: Iterable[str] = ()) -> list[str]:
    """``file: name`` of functions, structs, constants and macros that are named once in all the texts."""
    code = {name: re.sub(r"//[^\n]*", "", text) for name, text in texts.items()}
    words = Counter(word for text in (*code.values(), *others) for word in re.findall(r"\w+", text))
    found = []
    for file, text in code.items():
        for match in _DEFINED.finditer(_SPECIALISED.sub("", text)):
            name = next(group for group in match.groups() if group)
            if words[name] < 2:
                found.append(f"{file}: {name}")
    return found


def test_the_kernels_have_no_dead_code() -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted((ROOT / "kernels").rglob("*"))
        if path.suffix in (".cu", ".cuh")
    }
    others = [path.read_text() for path in python_files("cupaged/registry")]
    others += [path.read_text() for path in (ROOT / "cupaged/backends/emulator").rglob("*.h")]
    assert undefined_elsewhere(texts, others) == []


def test_dead_kernel_code_is_found() -> None:
    text = """
    constexpr int USED = 1;
    struct Dead { int x; };
    DEVICE u32 twice(u32 x) { return x * USED; }  // Dead
    template <int N> DEVICE float* row(float* p) { return p + twice(N); }
    #define LOST 3
    """
    assert undefined_elsewhere({"a.cuh": text}) == ["a.cuh: Dead", "a.cuh: row", "a.cuh: LOST"]
    assert undefined_elsewhere({"a.cuh": text}, ["Dead row LOST"]) == []
