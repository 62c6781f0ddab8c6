"""Float64 attention of single sequences on the device, by decoders that share no code with the kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.device import Device
from benchmarks.pools import Batch
from cupaged.formats import CacheLayout
from tests.oracle import E2M1_TABLE, E4M3_TABLE

BOUND = 5e-3  # of relative_error: what rounding to BF16 explains
PEER_BOUND = 0.2  # of a peer's, which may round more: with weights in FP8 it is 5e-2
CHUNK_VALUES = 1 << 25  # K values held in float64 at a time


def dequantise(xp: Any, layout: CacheLayout, blocks: Any) -> Any:
    """Bytes ``[n, block_stride_bytes]`` to float64 ``[n * block_size, num_kv_heads, head_dim]``."""
    values = _values(xp, layout, blocks)
    rows = (layout.block_size, layout.num_kv_heads)
    if layout.heads_first:
        values = values.reshape(len(blocks), *rows[::-1], layout.head_dim).swapaxes(1, 2)
    return values.reshape(len(blocks) * rows[0], rows[1], layout.head_dim)


def _values(xp: Any, layout: CacheLayout, blocks: Any) -> Any:
    """Float64 ``[n, rows of a block * head_dim]``, in the order of the pool."""
    count, rows = len(blocks), layout.block_size * layout.num_kv_heads
    data = xp.ascontiguousarray(blocks[:, : rows * layout.format.data_bytes(layout.head_dim)])
    if layout.format.name == "bf16":
        return bf16_to_float64(xp, data.view(np.uint16))
    if layout.format.name == "fp8":
        return xp.asarray(E4M3_TABLE)[data]
    if layout.format.name != "nvfp4":
        raise ValueError(f"layout: got format {layout.format.name!r}, which has no float64 decoder here")
    pairs = xp.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
    values = xp.asarray(E2M1_TABLE)[pairs].reshape(count, -1, 16)
    begin = layout.data_section_bytes
    scales = blocks[:, begin : begin + rows * (layout.head_dim // 16)]
    return (values * xp.asarray(E4M3_TABLE)[scales][..., None]).reshape(count, -1)


def bf16_to_float64(xp: Any, bits: Any) -> Any:
    """BF16 patterns to float64."""
    return (xp.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def to_float64(xp: Any, array: Any) -> Any:
    """Queries or outputs: BF16 patterns or float16."""
    return bf16_to_float64(xp, array) if array.dtype == np.uint16 else array.astype(np.float64)


def attention(device: Device, batch: Batch, seq: int, table: Any, q: Any, length: int) -> Any:
    """Float64 output ``[num_q_heads, head_dim]`` of one sequence's query, float64 of the same shape.

    Args:
        device: of the batch.
        batch: pools and shape.
        seq: row of the table.
        table: block ids.
        q: the query.
        length: tokens that it sees, but for the window.
    """
    xp, layout, load = device.xp, batch.layout, batch.load
    begin = max(0, length - load.sliding_window) if load.sliding_window else 0
    q = q.reshape(layout.num_kv_heads, -1, layout.head_dim)
    step = max(1, CHUNK_VALUES // (layout.block_size * layout.num_kv_heads * layout.head_dim))
    biggest = xp.full((*q.shape[:2], 1), -math.inf)
    total, out = xp.zeros(biggest.shape), xp.zeros(q.shape)
    pools = ((layout, batch.k_bytes), (batch.value_layout, batch.v_bytes))
    for first in range(begin // layout.block_size, -(-length // layout.block_size), step):
        ids = table[seq, first : min(first + step, -(-length // layout.block_size))]
        k, v = (dequantise(xp, stored, pool[ids]) for stored, pool in pools)
        token = first * layout.block_size + xp.arange(len(k))
        live = (token >= begin) & (token < length)
        scores = xp.matmul(q, k.transpose(1, 2, 0)) * layout.head_dim**-0.5  # [kv_heads, gqa, tokens]
        scores = xp.where(live, scores, -math.inf)
        higher = xp.maximum(biggest, scores.max(axis=-1, keepdims=True))
        weights, fade = xp.exp(scores - higher), xp.exp(biggest - higher)
        total = total * fade + weights.sum(axis=-1, keepdims=True)
        out = out * fade + xp.matmul(weights, v.transpose(1, 0, 2))
        biggest = higher
    return (out / total).reshape(load.num_q_heads, layout.head_dim)


def sequence(device: Device, batch: Batch, seq: int, table: Any) -> Any:
    """Float64 output of one sequence, of the shape of its rows in `batch.output`."""
    load = batch.load
    tokens = to_float64(device.xp, batch.q[seq]).reshape(load.query_tokens, load.num_q_heads, load.head_dim)
    newest = load.seq_lens[seq] - load.query_tokens + 1  # what the first query token sees
    rows = [attention(device, batch, seq, table, q, newest + i) for i, q in enumerate(tokens)]
    return device.xp.stack(rows).reshape(batch.output[seq].shape)


def relative_error(device: Device, batch: Batch, table: Any) -> float:
    """Largest relative L2 error to float64 of the first, a middle and the last sequence; inf for NaN."""
    worst = 0.0
    count = batch.num_seqs
    for seq in sorted({0, count // 2, count - 1}):
        expected = sequence(device, batch, seq, table)
        got = to_float64(device.xp, batch.output[seq])
        error = float(device.xp.linalg.norm(got - expected) / device.xp.linalg.norm(expected))
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return worst


if __name__ == "__main__":
    raise SystemExit(
        "a library: `python -m benchmarks --help` measures kernels and gives their errors to float64; "
        "`python -m examples.smollm2.evaluate --help` compares cache formats along a text"
    )
