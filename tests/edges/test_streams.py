"""Streams and graphs: results are bit for bit those of a launch alone on the default stream."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any

import numpy as np
import pytest

from cupaged.backends.cupy.streams import stream_of
from cupaged.decode import Decoder
from cupaged.errors import LaunchError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat
from tests.edges.gpu import Prepared, cupy_of, spin
from tests.paths import DECODER_SEQS, arguments, call
from tests.poison import Options, Shape, random_case
from tests.rig import Rig, UploadedCase, bits, upload_case

pytestmark = pytest.mark.gpu
edge = pytest.mark.edge
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
paths = pytest.mark.parametrize("path", ["single", "splits3", "decoder"])
SHAPE = Shape(8, 2, 64, 16)


def up_of(rig: Rig, fmt: CacheFormat, lengths: list[int], seed: int = 0, width: int = 300) -> UploadedCase:
    options = Options(seed=seed, table_width=width)
    return upload_case(rig, random_case(fmt, lengths, SHAPE, options=options))


@edge("side-stream")
@formats
@paths
def test_a_side_stream_keeps_its_order(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """A hundred times: spin, then fill q, then decode, all on one stream; the host waits only at the end."""
    cupy = cupy_of(rig)
    up = up_of(rig, fmt, [100, 1, 700, 0])
    alone = Prepared(up, path)
    alone.launch(0)
    expected = alone.result()
    wanted = up.q.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    handles = [stream, stream.ptr, stream_of(stream.ptr)]
    jobs = [Prepared(up, path) for _ in range(100)]
    up.q.fill(0x7FC0)
    cupy.cuda.Device().synchronize()
    spin(cupy, stream)
    for i, job in enumerate(jobs):
        spin(cupy, stream, 100_000)
        with stream:
            up.q.fill(0x7FC0)
            cupy.copyto(up.q, wanted)
        job.launch(handles[i % 3])
    for job in jobs:
        np.testing.assert_array_equal(job.result(), expected)


@edge("side-stream")
@paths
def test_the_default_streams_are_told_apart(rig: Rig, path: str) -> None:
    """Handles 0 (default), 1 (legacy) and 2 (per thread) all work and give the same."""
    cupy_of(rig)
    up = up_of(rig, BF16, [100, 1, 700, 0])
    results = []
    for handle in (0, 1, 2):
        job = Prepared(up, path)
        job.launch(handle)
        results.append(job.result())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def rewrite(up: UploadedCase, other: UploadedCase) -> None:
    """The contents of another case of the same sizes, in place."""
    for name in ("q", "tables", "lengths"):
        getattr(up, name)[...] = getattr(other, name)
    for name in ("k", "v"):
        own, new = getattr(up, name).array, getattr(other, name).array
        own[...] = new[: len(own)]


@edge("capture-replay")
@formats
@paths
def test_a_graph_serves_other_inputs(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """Captured once, replayed with lengths, tables, queries and pools changed in place."""
    cupy = cupy_of(rig)
    lengths = ([1, 17, 4096, 0], [4096, 4096, 1, 1], [0, 0, 0, 0], [17, 100, 3000, 4095])
    cases = [random_case(fmt, n, SHAPE, options=Options(seed=i, table_width=256, spare_blocks=3 + 520 - sum(-(-x // 16) for x in n)))  # noqa: E501
             for i, n in enumerate(lengths)]  # fmt: skip
    assert len({case.num_blocks for case in cases}) == 1
    ups = [upload_case(rig, case) for case in cases]
    eager = []
    for up in ups:
        job = Prepared(up, path)
        job.launch(0)
        eager.append(job.result())
    job = Prepared(ups[0], path)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        job.launch(stream)
        graph = stream.end_capture()
    for i in (0, 1, 2, 3, 1, 0):
        rewrite(ups[0], upload_case(rig, cases[i]))
        job.clear()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(job.result(), eager[i])


@edge("capture-replay")
@formats
def test_a_graph_of_write_and_decode(rig: Rig, fmt: CacheFormat) -> None:
    """Writer, split-K and reduction in one graph: other tokens in place, the same bits as eagerly."""
    cupy = cupy_of(rig)
    case = random_case(fmt, [1, 17, 100, 0], SHAPE)
    layout, slots = case.layout, []
    for table, n in zip(case.block_tables, case.seq_lens, strict=True):
        slots += [int(table[t // 16]) * 16 + t % 16 for t in range(n)]
    rng = np.random.default_rng(5)
    up = upload_case(rig, case)
    source = [rig.gpu.zeros((len(slots), 2, 64), np.uint16) for _ in range(2)]
    job = Prepared(up, "splits3")
    named: dict[str, Any] = arguments(up) | {
        "key": source[0], "value": source[1], "slot_mapping": rig.upload(np.array(slots, np.int64)),
        "num_tokens": len(slots), "key_stride": 128, "value_stride": 128,
        "cache_stride": layout.block_stride_bytes // (2 if fmt == BF16 else 1),
    }  # fmt: skip

    def step(stream: Any) -> None:
        call(rig, f"reshape_and_cache_{fmt.name}", stream, **named)
        job.launch(stream)

    draws = [rng.standard_normal((2, len(slots), 2, 64)).astype(np.float32) for _ in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def fill(draw: np.ndarray) -> None:
        for target, values in zip(source, draw, strict=True):
            target[...] = rig.upload((values.view(np.uint32) >> 16).astype(np.uint16))
        job.clear()
        cupy.cuda.Device().synchronize()

    eager = []
    for draw in draws:
        fill(draw)
        step(0)
        eager.append(job.result())
    assert (eager[0] != eager[1]).any()
    with stream:
        stream.begin_capture()
        step(stream)
        graph = stream.end_capture()
    for draw, expected in zip(draws, eager, strict=True):
        fill(draw)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(job.result(), expected)


@edge("capture-replay")
@edge("prepared-launches")
@formats
@paths
def test_warm_launches_allocate_and_load_nothing(
    rig: Rig, path: str, fmt: CacheFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 launches: no module load, no device memory, no host synchronisation."""
    cupy = cupy_of(rig)
    job = Prepared(up_of(rig, fmt, [100, 1, 17, 0]), path)
    job.launch(0)
    job.launch(0)
    expected = job.result()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a warm launch did this")

    for name in ("load", "synchronize", "to_host", "empty", "zeros", "asarray"):
        monkeypatch.setattr(rig.gpu, name, refuse)
    pool = cupy.get_default_memory_pool()
    used = (pool.used_bytes(), pool.total_bytes())
    for _ in range(10_000):
        job.launch(0)
    assert (pool.used_bytes(), pool.total_bytes()) == used
    monkeypatch.undo()
    np.testing.assert_array_equal(job.result(), expected)


def fresh_job(rig: Rig, fmt: CacheFormat, path: str) -> Prepared:
    """A job of a backend that has loaded no kernel but a decoder's."""
    fresh = Rig(type(rig.gpu)())
    return Prepared(upload_case(fresh, random_case(fmt, [100, 1, 17, 0], SHAPE)), path)


@edge("first-call-in-capture")
@formats
@paths
def test_a_first_call_inside_a_capture(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """CuPy captures in relaxed mode, in which code may be loaded."""
    cupy = cupy_of(rig)
    job = fresh_job(rig, fmt, path)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        job.launch(stream)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    captured = job.result()
    job.clear()
    job.launch(stream)
    np.testing.assert_array_equal(job.result(), captured)


@edge("first-call-in-capture")
@paths
def test_a_first_call_inside_a_strict_capture(rig: Rig, path: str) -> None:
    """Right, or "warm up first"; either way the stream is fit for use afterwards."""
    cupy = cupy_of(rig)
    job = fresh_job(rig, BF16, path)
    stream = cupy.cuda.Stream(non_blocking=True)
    graph, refused = None, "Warm up first"
    gc.collect()  # a module of an earlier test, unloaded during the capture, would end it
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            job.launch(stream)
            graph = stream.end_capture()
        except LaunchError as error:
            refused = str(error)
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                stream.end_capture()  # what was captured is void
    assert "Warm up first" in refused
    if graph is not None:
        graph.launch(stream)
        stream.synchronize()
    captured = job.result()
    job.clear()
    job.launch(stream)
    eager = job.result()
    assert not (eager == 0x7FC0).all()
    if graph is not None:
        np.testing.assert_array_equal(captured, eager)


@edge("two-streams")
@formats
@paths
def test_two_streams_of_a_thousand_calls(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """Two batches, each on its own stream and with its own workspace; temporaries are dropped on the way."""
    cupy = cupy_of(rig)
    ups = [up_of(rig, fmt, [100, 1, 700, 0], seed=1), up_of(rig, fmt, [33, 512, 2, 64], seed=2)]
    jobs = [Prepared(up, path) for up in ups]
    expected = []
    for job in jobs:
        job.launch(0)
        expected.append(job.result())
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in jobs]
    for job, up in zip(jobs, ups, strict=True):
        job.clear()
        if path == "decoder":  # a decoder belongs to one stream at a time
            job.decoder = Decoder(rig.gpu, up.case.layout, 8, DECODER_SEQS)
    cupy.cuda.Device().synchronize()
    for _ in range(1000):
        for job, stream in zip(jobs, streams, strict=True):
            with stream:
                copies = {"block_tables": job.up.tables.copy(), "seq_lens": job.up.lengths.copy()}
            job.named |= copies  # those before are dropped, and their memory serves again on that stream
            job.launch(stream)
    for job, wanted in zip(jobs, expected, strict=True):
        np.testing.assert_array_equal(job.result(), wanted)


@edge("two-gpus")
@formats
@paths
def test_two_gpus(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """A backend for each: the same bits on both, in turn, and the current device is left alone."""
    cupy = cupy_of(rig)
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    case = random_case(fmt, [100, 1, 700, 0], SHAPE)
    jobs = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            jobs.append(Prepared(upload_case(Rig(type(rig.gpu)(device)), case), path))
    results = []
    for current in (0, 1):
        with cupy.cuda.Device(current):
            for job in jobs:
                job.launch(0)
                assert cupy.cuda.runtime.getDevice() == current
    for job in jobs:
        results.append(job.result())
    np.testing.assert_array_equal(results[0], results[1])


@edge("two-gpus")
def test_arrays_of_another_gpu(rig: Rig) -> None:
    """Refused with both devices named, whichever is current."""
    cupy = cupy_of(rig)
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    case = random_case(FP8, [100, 1], SHAPE)
    with cupy.cuda.Device(1):
        up = upload_case(Rig(type(rig.gpu)(1)), case)
    up.rig = Rig(type(rig.gpu)(0))
    with pytest.raises(ValueError, match=r"(?s)0.*1|1.*0"):
        Prepared(up, "single").launch(0)


@edge("capture-replay")
def test_cases_differ(rig: Rig) -> None:
    """What the graph tests compare is not the same anyway."""
    up = up_of(rig, BF16, [100, 1, 17, 0], seed=1)
    other = dataclasses.replace(up_of(rig, BF16, [100, 1, 17, 0], seed=2))
    jobs = [Prepared(x, "single") for x in (up, other)]
    for job in jobs:
        job.launch(rig.stream)
    assert (bits(jobs[0].result()) != bits(jobs[1].result())).any()
