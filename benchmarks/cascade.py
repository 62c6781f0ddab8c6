"""Decode over a shared prefix against flat decode of the same lengths: time, bytes, error to float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from benchmarks import accuracy
from benchmarks.decode import decode_calls
from benchmarks.loads import Load
from benchmarks.pools import Batch
from benchmarks.session import Row, Session
from cupaged import KVCache
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.formats import CacheFormat

NUM_SEQS, PREFIX, SUFFIX = 64, 8192, 256  # 32/8 heads of 128, blocks of 16
DRY_SEQS, DRY_PREFIX, DRY_SUFFIX = 9, 32, 16


def measure(session: Session) -> None:
    """Rows "cascade": the cascade's time, and how many times as long flat decode takes."""
    small = session.shrink != 1
    num_seqs, prefix, suffix = (DRY_SEQS, DRY_PREFIX, DRY_SUFFIX) if small else (NUM_SEQS, PREFIX, SUFFIX)
    for fmt in session.formats:
        load = Load(32, 8, 128, 16, (prefix + suffix,) * num_seqs)
        labels = {"load": f"{num_seqs} x ({prefix} shared + {suffix})", "format": fmt.name}
        session.attempt("cascade", labels, partial(_measure, session, fmt, load, prefix))


def _measure(session: Session, fmt: CacheFormat, load: Load, prefix: int) -> Row:
    """Flat decode is measured twice: every sequence with a copy of the prefix, and all with the same blocks.

    The second finds many of the prefix's bytes in the L2 cache.
    """
    device = session.device
    batch = session.arenas.batch(fmt, load)
    flat = Decoder(device.gpu, batch.layout, load.num_q_heads, batch.num_seqs)
    cascade = CascadeDecoder(device.gpu, batch.layout, load.num_q_heads, batch.num_seqs)
    flat_calls: list[Callable[[], object]] = [*decode_calls(session, flat, batch)]
    device.wait()
    copies = device.time(flat_calls)
    prefix_blocks = prefix // load.block_size
    for table in batch.tables:
        table[:, :prefix_blocks] = table[0, :prefix_blocks].copy()
    calls = _cascade_calls(session, cascade, batch, prefix)
    device.wait()
    same_blocks = device.time(flat_calls)
    batch.output.fill(0x7FC0)
    device.wait()
    calls[0]()
    device.wait()
    error = accuracy.relative_error(device, batch, batch.tables[0])
    time = device.time(calls)
    suffixes = load.bytes_read(fmt) - batch.num_seqs * _bytes_of(fmt, load, prefix)
    return {
        **asdict(time),
        "flat_copies_us": copies.median_us,
        "flat_same_blocks_us": same_blocks.median_us,
        "speedup_over_copies": copies.median_us / time.median_us,
        "speedup_over_same_blocks": same_blocks.median_us / time.median_us,
        "bytes": suffixes + _bytes_of(fmt, load, prefix),
        "flat_bytes": load.bytes_read(fmt),
        "relative_error": error,
        "tables": len(calls),
        "workspace_bytes": cascade.workspace_bytes,
    }


def _bytes_of(fmt: CacheFormat, load: Load, tokens: int) -> int:
    """K and V of so many tokens of one sequence."""
    return Load(load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size, (tokens,)).bytes_read(
        fmt
    )


def _cascade_calls(
    session: Session, decoder: CascadeDecoder, batch: Batch, prefix: int
) -> list[Callable[[], object]]:
    """One decode through each of the batch's tables, cut into the prefix's row and the suffixes' columns."""
    device, blocks = session.device, prefix // batch.layout.block_size
    scale = None if batch.layout.format.name == "bf16" else 1.0
    cache = KVCache.wrap(device.gpu, batch.layout, *batch.pools, k_scale=scale, v_scale=scale)
    suffix_lens = batch.seq_lens - np.int32(prefix)

    def call(table: Any) -> Callable[[], object]:
        row = device.xp.ascontiguousarray(table[0, :blocks])
        arrays = (row, prefix, table[:, blocks:], suffix_lens, batch.output)
        return lambda: decoder.decode(batch.q, cache, *arrays, stream=device.stream)

    return [call(table) for table in batch.tables]
