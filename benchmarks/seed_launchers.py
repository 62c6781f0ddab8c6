"""The single launchers at 64 x 8192 (one pass, and split-K with its reduction) against `Decoder`."""

from __future__ import annotations

import numpy as np

from benchmarks import accuracy, launchers, loads
from benchmarks.cases import Case
from benchmarks.decode import measure as measure_decoder
from benchmarks.decode import shrunk
from benchmarks.loads import Load
from benchmarks.session import Row, Session, timed
from cupaged.formats import CacheFormat

NUM_SPLITS = (1, 2, 4, 8, 16, 33)


def measure(session: Session) -> None:
    """Rows "seed_launchers": `price` is the time over the decoder's, less 1."""
    (load,) = shrunk(session, (loads.BASE,))
    for fmt in session.formats:
        labels = {"load": load.label, "format": fmt.name}
        decoder = session.attempt(
            "seed_launchers",
            {**labels, "path": "Decoder"},
            lambda f=fmt: measure_decoder(session, Case(f, load)),
        )
        for num_splits in (0, *NUM_SPLITS):
            path = f"split-K, {num_splits} splits" if num_splits else "single pass"
            row = session.attempt(
                "seed_launchers",
                {**labels, "path": path, "num_splits": num_splits},
                lambda f=fmt, n=num_splits: _measure(session, f, load, n),
            )
            if row and decoder:
                row["price"] = row["median_us"] / decoder["median_us"] - 1


def _measure(session: Session, fmt: CacheFormat, load: Load, num_splits: int) -> Row:
    device = session.device
    gpu, stream = device.gpu, device.stream
    batch = session.arenas.batch(fmt, load)
    if num_splits == 0:
        calls = [launchers.single_pass(gpu, batch, table, stream) for table in batch.tables]
    else:
        rows = batch.num_seqs * load.num_q_heads
        workspace = device.xp.empty(rows * num_splits * (load.head_dim + 2), np.float32)
        calls = [
            launchers.split_and_reduce(gpu, batch, table, workspace, num_splits, stream)
            for table in batch.tables
        ]
    device.wait()
    calls[0]()
    device.wait()
    error = accuracy.relative_error(device, batch, batch.tables[0])
    time = device.time(calls)
    return {
        **timed(time, load.bytes_read(fmt), session.ceiling.get("read")),
        "relative_error": error,
        "tables": len(calls),
    }
