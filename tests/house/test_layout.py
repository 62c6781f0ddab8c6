"""The kernels' text is indented as its braces nest, also where the formatter loses count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.import_graph import ROOT

KERNELS = sorted((ROOT / "kernels").rglob("*.cu*"))


def misplaced_loops(text: str) -> list[int]:
    """Lines whose `UNROLL` is not two columns deep for each open brace; bodies without braces aside."""
    depth, before, found = 0, "", []
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"//.*", "", line).rstrip()
        if not code or code.startswith("#"):
            continue
        columns = len(code) - len(code.lstrip())
        if code.lstrip().startswith("UNROLL") and before[-1:] in "{};" and columns != 2 * depth:
            found.append(number)
        depth += code.count("{") - code.count("}")
        before = code
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_unrolled_loops_are_as_deep_as_their_block(path: Path) -> None:
    """clang-format gives the first `UNROLL` of a file its function's depth; it knows `#pragma unroll`."""
    assert misplaced_loops(path.read_text()) == []


def test_a_loop_at_its_functions_depth_is_found() -> None:
    lines = [
        "DEVICE void f() {",
        "  if (a) {",
        "  UNROLL for (;;) g();",
        "    UNROLL for (;;) g();",
        "  }",
        "}",
    ]
    assert misplaced_loops("\n".join(lines)) == [3]
