"""Latency of one sequence: decodes back to back, and each behind a kernel that writes its q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks import accuracy, loads
from benchmarks.decode import decode_calls, shrunk
from benchmarks.loads import Load
from benchmarks.session import Row, Session
from cupaged import KernelLaunch, div_ceil
from cupaged.decode import Decoder
from cupaged.formats import CacheFormat

SOURCE = Path(__file__).parent / "latency.cu"


def measure(session: Session) -> None:
    """Rows "latency"."""
    for fmt in session.formats:
        for load in shrunk(session, loads.LATENCY):
            labels = {"load": load.label, "format": fmt.name}
            session.attempt("latency", labels, lambda f=fmt, x=load: _measure(session, f, x))


def _measure(session: Session, fmt: CacheFormat, load: Load) -> Row:
    """median_us is that of decodes back to back; behind a writer it is the pair's less the writer's alone."""
    device = session.device
    decoder = Decoder(device.gpu, load.layout(fmt), load.num_q_heads, len(load.seq_lens))
    batch = session.arenas.batch(fmt, load)
    source = batch.q.copy()
    vectors = batch.q.nbytes // 16
    kernel = device.gpu.kernel(str(SOURCE), "write_q")
    calls = decode_calls(session, decoder, batch)

    def write() -> None:
        launch = KernelLaunch(device.gpu, kernel).grid([div_ceil(vectors, 256), 1, 1]).block([256, 1, 1])
        launch.arg_ptr(source).arg_ptr(batch.q).arg_u32(vectors).launch(device.stream)

    def pair(call: Callable[[], None]) -> None:
        write()
        call()

    batch.q.fill(0)  # the writer must have run for the result to be right
    device.wait()
    pair(calls[0])
    device.wait()
    error = accuracy.relative_error(device, batch, batch.tables[0])
    back_to_back = device.time(calls)
    together = device.time([lambda c=c: pair(c) for c in calls])
    alone = device.time([write])
    return {
        **asdict(back_to_back),
        "pair_us": together.median_us,
        "pair_min_us": together.min_us,
        "pair_max_us": together.max_us,
        "writer_us": alone.median_us,
        "behind_writer_us": together.median_us - alone.median_us,
        "bytes": load.bytes_read(fmt),
        "relative_error": error,
        "tables": len(calls),
    }
