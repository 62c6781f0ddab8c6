"""A call that is made again and again: from the fifth on it is ready, and its bits are the first one's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.formats import FORMATS, CacheFormat
from tests.edges.gpu import Prepared, cupy_of
from tests.poison import Options, Shape, random_case
from tests.rig import Rig, upload_case

CALLS = 7
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
paths = pytest.mark.parametrize("path", ["single", "splits3", "decoder"])
pointers = pytest.mark.parametrize("pointers", ["arrays", "addresses"])


def job_of(rig: Rig, fmt: CacheFormat, path: str, pointers: str) -> Prepared:
    options = Options(seed=3, table_width=9)
    job = Prepared(
        upload_case(rig, random_case(fmt, [100, 1, 17, 0], Shape(8, 2, 64, 16), options=options)), path
    )
    if pointers == "addresses":
        arrays = job.named
        found = {name: rig.gpu.pointer(x) if hasattr(x, "dtype") else x for name, x in arrays.items()}
        job.named = found | {"kept alive": arrays}
    return job


def results(job: Prepared, stream: Any) -> list[Any]:
    found = []
    for _ in range(CALLS):
        job.clear()
        job.rig.gpu.synchronize()
        job.launch(stream)
        found.append(job.result())
    return found


@formats
@paths
@pointers
def test_every_call_gives_the_same_bits(rig: Rig, fmt: CacheFormat, path: str, pointers: str) -> None:
    first, *others = results(job_of(rig, fmt, path, pointers), 0)
    assert (first != 0x7FC0).all(), "every row was written"
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@formats
@paths
@pointers
def test_a_ready_call_inside_a_capture(rig: Rig, fmt: CacheFormat, path: str, pointers: str) -> None:
    cupy = cupy_of(rig)
    stream = cupy.cuda.Stream(non_blocking=True)
    job = job_of(rig, fmt, path, pointers)
    expected = results(job, stream.ptr)[0]
    with stream:
        stream.begin_capture()
        job.launch(stream.ptr)
        graph = stream.end_capture()
    job.clear()
    rig.gpu.synchronize()
    graph.launch(stream)
    np.testing.assert_array_equal(job.result(), expected)
