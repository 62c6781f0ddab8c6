"""Host threads and forked processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.decode import Decoder
from cupaged.formats import FORMATS, CacheFormat
from tests.edges.gpu import Prepared
from tests.paths import DECODER_SEQS
from tests.poison import Options, Shape, random_case
from tests.rig import Rig, upload_case

edge = pytest.mark.edge
ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(8, 2, 64, 16)


@edge("host-threads")
@pytest.mark.parametrize("path", ["single", "splits3", "decoder"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_eight_threads_on_one_device(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """Each with its own batch, stream and decoder, through the same kernel handles: as one after another."""
    calls = 20 if rig.name == "emulator" else 200
    lengths = [[100, 1, 700, 0], [33, 512], [5], [1, 2, 3, 4], [64] * 8, [999], [0, 0, 1], [250, 250]]
    ups = [
        upload_case(rig, random_case(fmt, n, SHAPE, options=Options(seed=i))) for i, n in enumerate(lengths)
    ]
    jobs = [Prepared(up, path) for up in ups]
    expected = []
    for job in jobs:
        job.launch(rig.stream)
        expected.append(job.result())
        job.clear()
        if path == "decoder":
            job.decoder = Decoder(rig.gpu, job.up.case.layout, 8, DECODER_SEQS)

    def work(job: Prepared) -> None:
        stream: Any = rig.stream
        if rig.name == "cupy":
            import cupy

            stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(calls):
            job.launch(stream)
        rig.gpu.synchronize(rig.gpu.stream_handle(stream))

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(work, jobs))
    for job, wanted in zip(jobs, expected, strict=True):
        np.testing.assert_array_equal(job.result(), wanted)


def _run(when: str, backend: str) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.edges.fork_program", when, backend],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["who"]: line for line in found}


@edge("fork")
def test_a_fork_before_the_first_use(rig: Rig) -> None:
    found = _run("before", rig.name)
    assert found["child"]["digest"] == found["parent"]["digest"]


@edge("fork")
def test_a_fork_after_the_first_use(rig: Rig) -> None:
    """The emulator works on; a GPU refuses in the child, by name, and works on in the parent."""
    found = _run("after", rig.name)
    if rig.name == "emulator":
        assert found["child"]["digest"] == found["parent"]["digest"]
        return
    for who in ("child", "child's own backend"):
        assert "forked from one that uses CUDA" in found[who]["error"]
    assert "digest" in found["parent"]


@edge("fork")
def test_backends_of_the_parent_refuse_in_the_child() -> None:
    """Without a GPU: any object that is guarded."""
    program = """
import os
from cupaged.backends.cupy import forked
class Backend:
    def load(self): return 1
    def launch_packed(self): return 2
gpu = Backend()
forked.guard(gpu)
child = os.fork()
if child == 0:
    for act in (gpu.load, gpu.launch_packed, forked.refuse_in_child):
        try: act()
        except RuntimeError as error: print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(gpu.load(), gpu.launch_packed())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *refusals, last = done.stdout.splitlines()
    assert len(refusals) == 3
    assert all("forked from one that uses CUDA" in line for line in refusals)
    assert last == "1 2"
