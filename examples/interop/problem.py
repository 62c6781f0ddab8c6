"""What all examples of this folder compute: two sequences over a small BF16 cache, and the right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import BlockAllocator, KVCache
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout
from cupaged.interop import to_device
from cupaged.tables import sequence_tables, token_slots

LENGTHS, Q_HEADS, BLOCKS = [37, 5], 8, 6
LAYOUT = CacheLayout(BF16, num_kv_heads=2, head_dim=64, block_size=16)
MAX_ERROR = 5e-3  # relative L2: what rounding the output to BF16 explains


@dataclass(frozen=True)
class Problem:
    """bfloat16 q ``[2, 8, 64]``, key and value ``[42, 2, 64]``; float64 expected ``[2, 8, 64]``."""

    q: npt.NDArray[Any]
    key: npt.NDArray[Any]
    value: npt.NDArray[Any]
    expected: npt.NDArray[np.float64]


def make_problem() -> Problem:
    rng = np.random.default_rng(0)
    rows = (sum(LENGTHS), LAYOUT.num_kv_heads, LAYOUT.head_dim)
    q = rng.standard_normal((len(LENGTHS), Q_HEADS, LAYOUT.head_dim)).astype(ml_dtypes.bfloat16)
    key, value = (rng.standard_normal(rows).astype(ml_dtypes.bfloat16) for _ in range(2))
    expected, first = np.empty(q.shape), 0
    for s, length in enumerate(LENGTHS):
        k, v = (
            np.repeat(x[first : first + length].astype(np.float64), Q_HEADS // LAYOUT.num_kv_heads, axis=1)
            for x in (key, value)
        )
        scores = np.einsum("hd,thd->ht", q[s].astype(np.float64), k) / np.sqrt(LAYOUT.head_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected[s] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        first += length
    return Problem(q, key, value, expected)


def decode(gpu: Any, q: Any, key: Any, value: Any, output: Any, stream: Any) -> None:
    """Write key and value into a cache and decode q into output, whatever library the arrays are of."""
    allocator, cache = BlockAllocator(BLOCKS, LAYOUT.block_size), KVCache(gpu, LAYOUT, BLOCKS)
    tables, seq_lens = sequence_tables([allocator.allocate(n) for n in LENGTHS])
    slots = token_slots(tables, np.zeros(len(LENGTHS), np.int32), LENGTHS, LAYOUT.block_size)
    cache.write(key, value, to_device(gpu, slots, stream), stream=stream)
    decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=len(LENGTHS))
    tables, seq_lens = (to_device(gpu, array, stream) for array in (tables, seq_lens))
    decoder.decode(q, cache, tables, seq_lens, output, stream=stream)
    # The decoder's workspace and the pools go when this returns; the work must not need them any more.
    gpu.synchronize(gpu.stream_handle(stream))


def check(library: str, gpu: Any, got: npt.NDArray[np.float64], problem: Problem) -> None:
    error = np.linalg.norm(got - problem.expected) / np.linalg.norm(problem.expected)
    print(f"{library} on {gpu.name}: relative error against NumPy float64 {error:.1e}")
    if not error < MAX_ERROR:
        raise SystemExit("the error is larger than rounding to BF16 explains")
