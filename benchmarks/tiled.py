"""The streaming step against the read ceiling: one tile of blocks folded into the running states.

A sequence has as many states as fill the GPU once; they are merged for the check of the result, which is no
part of a step.

Byte model: K and V of the tile, scales included. Tiles come from random blocks of a large pool, in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import accuracy
from benchmarks.loads import Load
from benchmarks.pools import Batch
from benchmarks.session import Row, Session, timed
from cupaged import ops
from cupaged.formats import CacheFormat, paged_strides
from cupaged.registry.tiled import resident_blocks

TILE_BYTES = (16 << 20, 64 << 20, 256 << 20)  # K and V
NUM_SEQS = (1, 16)


def measure(session: Session) -> None:
    """Rows "tiled"."""
    for fmt in session.formats:
        for tile_bytes in TILE_BYTES:
            for num_seqs in NUM_SEQS:
                load = _load(fmt, tile_bytes // session.shrink, num_seqs)
                labels = {
                    "load": f"{tile_bytes // session.shrink / (1 << 20):g} MiB, {num_seqs} sequences",
                    "format": fmt.name,
                    "tile_bytes": load.bytes_read(fmt),
                    "num_seqs": num_seqs,
                }
                session.attempt("tiled", labels, lambda f=fmt, x=load: _measure(session, f, x))


def _load(fmt: CacheFormat, tile_bytes: int, num_seqs: int) -> Load:
    """32/8 heads of 128, blocks of 16; whole blocks, at least one."""
    per_block = Load(32, 8, 128, 16, (16,)).bytes_read(fmt)
    length = 16 * max(1, tile_bytes // (per_block * num_seqs))
    return Load(32, 8, 128, 16, (length,) * num_seqs)


class States:
    """Running states (m, l, o) F32 of every row, num_splits for each sequence."""

    def __init__(self, session: Session, batch: Batch, num_splits: int) -> None:
        xp, load = session.device.xp, batch.load
        rows = batch.num_seqs * num_splits * load.num_q_heads
        self.num_splits = num_splits
        self.arrays = (
            xp.full(rows, -np.inf, np.float32),
            xp.zeros(rows, np.float32),
            xp.zeros(rows * load.head_dim, np.float32),
        )


def _measure(session: Session, fmt: CacheFormat, load: Load) -> Row:
    device = session.device
    name = "paged_decode_attn_tiled" + ("" if fmt.name == "bf16" else f"_{fmt.name}")
    batch = session.arenas.batch(fmt, load)
    kernel = device.gpu.kernel(name, name)
    states = States(session, batch, _num_splits(device.gpu, kernel, load))
    counts = device.upload(np.array(load.block_counts, np.int32))
    calls = [_step(device.gpu, kernel, name, batch, t, counts, states, device.stream) for t in batch.tables]
    device.wait()
    calls[0]()
    _finish(session, batch, states)
    device.wait()
    error = accuracy.relative_error(device, batch, batch.tables[0])
    time = device.time(calls)
    return {
        **timed(time, load.bytes_read(fmt), session.ceiling.get("read")),
        "num_splits": states.num_splits,
        "relative_error": error,
        "tables": len(calls),
    }


def _num_splits(gpu: Any, kernel: Any, load: Load) -> int:
    """States of a sequence with which the step's blocks fill the GPU once."""
    ratio = load.num_q_heads // load.num_kv_heads
    chosen = kernel.warm(head_dim=load.head_dim, gqa_ratio=ratio, block_size=load.block_size)
    blocks = gpu.num_sms * resident_blocks(chosen.constants)
    return max(1, blocks // (len(load.seq_lens) * load.num_kv_heads))


def _finish(session: Session, batch: Batch, states: States) -> None:
    """One state of the splits, and the output of it."""
    gpu, stream, load = session.device.gpu, session.device.stream, batch.load
    module, splits = "paged_decode_attn_tiled", states.num_splits
    merged = States(session, batch, 1)
    sizes = (batch.num_seqs, load.num_q_heads, load.head_dim)
    merge = gpu.kernel(module, "attention_merge_states")
    session.device.wait()
    ops.attention_merge_states(gpu, merge, *states.arrays, *merged.arrays, *sizes, splits, splits, 1, stream)
    finalize = gpu.kernel(module, "attention_finalize")
    ops.attention_finalize(gpu, finalize, *merged.arrays[1:], batch.output, *sizes, stream)
    session.device.wait()  # before the merged states are freed


def _step(
    gpu: Any, kernel: Any, name: str, batch: Batch, table: Any, counts: Any, states: States, stream: Any
) -> Callable[[], None]:
    launch, layout, load = getattr(ops, name), batch.layout, batch.load
    k_pool, v_pool = batch.pools
    strides: tuple[Any, ...] = paged_strides(layout.num_kv_heads, layout.head_dim, layout.block_size)
    if layout.format.has_scale_section:
        strides = (layout.block_stride_bytes, layout.data_section_bytes)
    elif layout.format.needs_scale:
        strides = (*strides, 1.0, 1.0)

    def call() -> None:
        launch(
            gpu, kernel, batch.q, k_pool, v_pool, table, counts, *states.arrays, batch.num_seqs,
            load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size, batch.max_blocks_per_seq,
            load.num_q_heads // load.num_kv_heads, *strides, load.block_size, stream,
            num_blocks=batch.num_blocks, num_splits=states.num_splits,
        )  # fmt: skip

    return call
