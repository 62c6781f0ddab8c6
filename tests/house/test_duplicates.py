"""No block of six lines of code stands twice in the package or in the kernels.

Lines are compared by their tokens. What repeats by nature does not count: spacing, comments, docstrings,
imports and includes, the parameters of a definition, the launch with its ``.arg_u32(n)`` for each parameter
of a kernel, and lines that only list names: arguments of a call, members of an initialiser.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator

import pytest

from tools.import_graph import ROOT

LINES = 6
SOURCES = {
    "python": ("cupaged", (".py",)),
    "kernels": ("kernels", (".cu", ".cuh")),
    "emulator": ("cupaged/backends/emulator", (".cpp", ".h")),
}

_STATEMENTS = ("return", "break", "continue", "pass", "raise", "else", "try", "yield")

_LAUNCH = re.compile(r"\.arg_|\.launch\(|KernelLaunch\(gpu,")

_unique = itertools.count()

Line = tuple[int, str]


def python_lines(text: str) -> list[Line]:
    """(number, tokens) of each line of code."""
    tree = ast.parse(text)
    skipped = _skipped(tree)
    words: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if (
            token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
            and token.start[0] not in skipped
        ):
            words.setdefault(token.start[0], []).append(token.string)
    lines = [(number, " ".join(tokens)) for number, tokens in words.items() if _says_something(tokens)]
    return sorted(lines + [(number, f"definition {next(_unique)}") for number in _definitions(tree)])


def _definitions(tree: ast.Module) -> set[int]:
    """Where functions begin: no block goes across."""
    return {
        node.lineno for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _skipped(tree: ast.Module) -> set[int]:
    """Lines of imports, docstrings, and of definitions up to their bodies."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min((d.lineno for d in node.decorator_list), default=node.lineno)
            lines.update(range(first, node.body[0].lineno))
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def _says_something(tokens: list[str]) -> bool:
    """False for brackets alone and for lists of names."""
    if not tokens or _LAUNCH.match("".join(tokens)):
        return False
    names = all(re.fullmatch(r"[A-Za-z_]\w*|[,{}()\[\]]", token) for token in tokens)
    return not names or ("(" in tokens and tokens[0] != "(") or tokens[0] in _STATEMENTS


def cuda_lines(text: str) -> list[Line]:
    """(number, tokens) of each line of code; parameter lists of functions left out."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*#[^\n]*", "", text, flags=re.MULTILINE)
    text = re.sub(r'extern "C" __global__ |__launch_bounds__\([^()]*\)', "", text)
    text = re.sub(r"\bvoid\s+(\w+\s*)\([^(){};]*\)", lambda m: "\n" * m[0].count("\n") + m[1], text)
    lines = ((number, re.findall(r"\w+|[^\w\s]", line)) for number, line in enumerate(text.splitlines(), 1))
    return [(number, " ".join(tokens)) for number, tokens in lines if _says_something(tokens)]


def repeated(files: dict[str, list[Line]], length: int = LINES) -> list[str]:
    """Each place where a block of so many lines stands again, as ``first:line = again:line``."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found: list[str] = []
    for name, lines in files.items():
        last = -length
        for index in range(len(lines) - length + 1):
            block = tuple(text for _, text in lines[index : index + length])
            first = seen.setdefault(block, (name, lines[index][0]))
            if first != (name, lines[index][0]):
                if index > last + 1:  # a longer block is reported once
                    found.append(f"{first[0]}:{first[1]} = {name}:{lines[index][0]}")
                last = index
    return found


def _files(kind: str) -> Iterator[tuple[str, list[Line]]]:
    folder, suffixes = SOURCES[kind]
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in suffixes:
            read = python_lines if path.suffix == ".py" else cuda_lines
            yield str(path.relative_to(ROOT)), read(path.read_text())


@pytest.mark.parametrize("kind", SOURCES)
def test_no_block_stands_twice(kind: str) -> None:
    files = dict(_files(kind))
    assert sum(map(len, files.values())) > 500
    assert repeated(files) == []


PYTHON = '''
import os

def first(a, b,
          c):
    """Says one thing."""
    x = a + 1
    y = b * 2  # why
    if x > y:
        return x
    z = call(x,
             y)
    z += 1
    return z
'''


def test_a_repeated_block_is_found_whatever_its_spacing() -> None:
    other = PYTHON.replace("def first(a, b,\n          c):", "def second(a, b, c):").replace("a + 1", "a+1")
    other = other.replace("one thing", "another").replace("  # why", "")
    files = {"a": python_lines(PYTHON), "b": python_lines("v = 1\n" + other)}
    assert repeated(files) == ["a:7 = b:7"]
    assert repeated({"a": files["a"], "b": python_lines(other.replace("* 2", "* 3"))}) == []


def test_definitions_and_imports_may_repeat() -> None:
    head = (
        "import a\nimport b\n" * 4
        + "def f(\n"
        + "".join(f"    p{i}: int,\n" for i in range(8))
        + ") -> None:\n"
    )
    assert repeated({"a": python_lines(head + "    g()\n"), "b": python_lines(head + "    h()\n")}) == []


def test_a_repeated_block_of_cuda_is_found() -> None:
    body = "".join(f"  x{i} = y[{i}];\n" for i in range(LINES))
    entry = (
        'extern "C" __global__ void NAME(const u16* q,\n  u32 n,\n  u32 m,\n  u32 k,\n  u32 l,\n  u32 j) {\n'
    )
    one, two = (entry.replace("NAME", name) for name in ("one", "two"))
    files = {
        "a": cuda_lines(one + body + "}"),
        "b": cuda_lines(two + "// why\n" + body.replace(" = ", "=") + "}"),
    }
    assert repeated(files) == ["a:7 = b:8"]
    assert repeated({"a": cuda_lines(one + "}"), "b": cuda_lines(two + "}")}) == []


def test_a_block_may_repeat_in_one_file() -> None:
    body = "".join(f"x{i} = {i}\n" for i in range(LINES))
    assert repeated({"a": python_lines(body + "y = 1\n" + body)}) == ["a:1 = a:8"]
