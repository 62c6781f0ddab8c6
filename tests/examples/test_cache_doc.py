"""The example of docs/cache.md runs, and leaves what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracle import assert_matches, attention_float64

DOC = Path(__file__).resolve().parents[2] / "docs" / "cache.md"


def test_the_example_of_the_document() -> None:
    found = re.search(
        r"<!-- example -->\n```python\n(.*?)```\n<!-- end example -->", DOC.read_text(), re.DOTALL
    )
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found[1], str(DOC), "exec"), names)
    branches, cache, gpu = names["branches"], names["cache"], names["gpu"]
    assert names["appended"].copies.shape == (1, 2)
    expected = np.empty((2, 8, 64))
    for s, branch in enumerate(branches):
        k, v = (gpu.to_host(array) for array in cache.gather(branch.blocks, branch.seq_len, stream=0))
        expected[s], _ = attention_float64(names["q"][s], k, v, 0.125)
    assert_matches(gpu.to_host(names["output"]).view(ml_dtypes.bfloat16), expected)
    np.testing.assert_array_equal(names["k"], cache.gather(branches[1].blocks, 41, stream=0)[0])
    assert (names["k"][:40] == cache.gather(branches[0].blocks, 40, stream=0)[0]).all()
    assert (names["k"][40] != cache.gather(branches[0].blocks, 41, stream=0)[0][40]).any()
    rows = names["host"].k.view(ml_dtypes.bfloat16).reshape(-1, 2, 64)[:41]
    np.testing.assert_array_equal(rows, cache.gather(branches[0].blocks, 41, stream=0)[0])
