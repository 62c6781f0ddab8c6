"""The package's own BF16 kernels run on the emulator: write tokens, attend to them, compare with float64."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import ops
from cupaged.backends.emulator import EmulatorBackend

BF16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 64, 16, 12
NUM_Q_HEADS, NUM_KV_HEADS = 6, 2
TABLE_WIDTH = 5


def random_bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def write_tokens(
    gpu: EmulatorBackend, key: np.ndarray, value: np.ndarray, slots: np.ndarray
) -> tuple[Any, Any]:
    k_cache = gpu.empty((NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), BF16)
    v_cache = gpu.empty(k_cache.shape, BF16)
    stride = NUM_KV_HEADS * HEAD_DIM
    name = "reshape_and_cache_bf16"
    arrays = (gpu.asarray(key), gpu.asarray(value), k_cache, v_cache, gpu.asarray(slots))
    sizes = (len(slots), NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, stride, stride)
    ops.reshape_and_cache_bf16(gpu, gpu.kernel(name, name), *arrays, *sizes, gpu.null_stream())
    return k_cache, v_cache


def softmax_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """q [num_q_heads, dim], keys and values [tokens, num_kv_heads, dim] -> float64 [num_q_heads, dim]."""
    q, keys, values = (a.astype(np.float64) for a in (q, keys, values))
    ratio = NUM_Q_HEADS // NUM_KV_HEADS
    rows = []
    for head in range(NUM_Q_HEADS):
        scores = keys[:, head // ratio] @ q[head] / math.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        rows.append(weights @ values[:, head // ratio] / weights.sum())
    return np.array(rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_write_then_attend(gpu: EmulatorBackend, workers: int) -> None:
    gpu.workers = workers
    rng = np.random.default_rng(3)
    seq_lens = [70, 1, 33]
    tables = rng.permutation(NUM_BLOCKS)[: 3 * 4].reshape(3, 4)
    tables = np.pad(tables, ((0, 0), (0, TABLE_WIDTH - 4)), constant_values=tables[0, 0])
    tables[0, 4] = tables[1, 1]  # sequence 1 needs one block only

    keys = [random_bf16(rng, n, NUM_KV_HEADS, HEAD_DIM) for n in seq_lens]
    values = [random_bf16(rng, n, NUM_KV_HEADS, HEAD_DIM) for n in seq_lens]
    slots = [
        tables[s, t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE
        for s, n in enumerate(seq_lens)
        for t in range(n)
    ]
    k_cache, v_cache = write_tokens(
        gpu, np.concatenate(keys), np.concatenate(values), np.array(slots, np.int64)
    )
    flat = k_cache.reshape(-1, NUM_KV_HEADS, HEAD_DIM)
    np.testing.assert_array_equal(flat[slots].view(np.uint16), np.concatenate(keys).view(np.uint16))
    unused = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), slots)
    assert (flat[unused].view(np.uint16) == 0xFFFF).all()

    q = random_bf16(rng, 3, NUM_Q_HEADS, HEAD_DIM)
    output = gpu.empty((3, NUM_Q_HEADS, HEAD_DIM), BF16)
    name = "paged_decode_attn_bf16"
    arrays = (gpu.asarray(q), k_cache, v_cache, output, gpu.asarray(tables.astype(np.int32)))
    lengths = gpu.asarray(np.array(seq_lens, np.int32))
    sizes = (TABLE_WIDTH, 3, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    scalars = (1 / math.sqrt(HEAD_DIM), NUM_Q_HEADS * HEAD_DIM, 0)
    ops.paged_decode_attn_bf16(
        gpu, gpu.kernel(name, name), *arrays, lengths, *sizes, *scalars, gpu.null_stream()
    )

    for s in range(3):
        expected = softmax_attention(q[s], keys[s], values[s])
        error = output[s].astype(np.float64) - expected
        assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(expected)
        largest = np.abs(expected).max(axis=1, keepdims=True)
        assert (np.abs(error) <= 2 * 2.0**-7 * 2.0 ** np.floor(np.log2(largest))).all()
