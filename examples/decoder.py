"""FP8 with calibrated scales, and the `Decoder`: `python examples/decoder.py`."""

import ml_dtypes
import numpy as np

from cupaged import EmulatorBackend
from cupaged.calibration import Fp8Calibration
from cupaged.decode import Decoder
from cupaged.formats import FP8, CacheLayout, gather_tokens
from cupaged.ops import reshape_and_cache_fp8

LENGTHS, Q_HEADS, BLOCKS = [70, 9], 12, 8
layout = CacheLayout(FP8, num_kv_heads=4, head_dim=128, block_size=32)
row = layout.num_kv_heads * layout.head_dim  # elements of one token of K or V
gpu = EmulatorBackend()  # on a GPU: cupaged.CupyBackend()
stream = gpu.null_stream()
rng = np.random.default_rng(0)

# Both sequences' tokens, one after the other, and where each goes: block 3, 0, 6 and block 5.
key, value = (rng.standard_normal((sum(LENGTHS), row)).astype(ml_dtypes.bfloat16) for _ in range(2))
tables = np.array([[3, 0, 6], [5, -1, -1]], np.int32)  # what no token needs may be anything
slots = [tables[s, t // 32] * 32 + t % 32 for s, n in enumerate(LENGTHS) for t in range(n)]

# One scale for each tensor: the largest magnitude becomes 448, the largest E4M3 value. Writer and decoder
# need the same ones; K's and V's must not be swapped.
scales = []
for tensor in (key, value):
    calibration = Fp8Calibration(gpu)
    calibration.update(gpu.asarray(tensor), len(tensor), row, row, stream)
    scales.append(calibration.scale())

k_cache, v_cache = (gpu.zeros(layout.pool_shape(BLOCKS), layout.pool_dtype) for _ in range(2))
write = gpu.kernel("reshape_and_cache_fp8", "reshape_and_cache_fp8")
reshape_and_cache_fp8(
    gpu, write, gpu.asarray(key), gpu.asarray(value), k_cache, v_cache,
    gpu.asarray(np.array(slots, np.int64)), len(slots), layout.num_kv_heads, layout.head_dim,
    layout.block_size, *scales, row, row, layout.cache_stride, stream,
)  # fmt: skip

decoder = Decoder(gpu, layout, num_q_heads=Q_HEADS, max_seqs=2)
q = rng.standard_normal((2, Q_HEADS, layout.head_dim)).astype(ml_dtypes.bfloat16)
output = gpu.empty(q.shape, ml_dtypes.bfloat16)
lse = gpu.empty(q.shape[:2], np.float32)
decoder.decode(
    gpu.asarray(q), k_cache, v_cache, gpu.asarray(tables), gpu.asarray(np.array(LENGTHS, np.int32)), output,
    num_seqs=2, max_blocks_per_seq=3, stream=stream, lse=lse, k_scale=scales[0], v_scale=scales[1],
)  # fmt: skip

# The same in NumPy, on what the cache holds: query head h reads KV head h // 3.
pools = [gpu.to_host(pool) for pool in (k_cache, v_cache)]
for s, n in enumerate(LENGTHS):
    k, v = (
        np.repeat(gather_tokens(pool, layout, tables[s], n, scale=scale).astype(np.float64), 3, axis=1)
        for pool, scale in zip(pools, scales, strict=True)
    )
    weights = np.exp(np.einsum("hd,thd->ht", q[s].astype(np.float64), k) / np.sqrt(layout.head_dim))
    expected = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    got = gpu.to_host(output)[s].view(ml_dtypes.bfloat16).astype(np.float64)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    lse_error = np.abs(gpu.to_host(lse)[s] - np.log(weights.sum(axis=1))).max()
    print(f"sequence {s}: relative error {error:.1e}, log-sum-exp off by at most {lse_error:.1e}")
    if not (error < 5e-3 and lse_error < 1e-3):
        raise SystemExit("the error is larger than rounding explains")
