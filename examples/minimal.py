"""From plain arrays to attention output, and the same in NumPy: `python examples/minimal.py`."""

import ml_dtypes
import numpy as np

from cupaged import EmulatorBackend
from cupaged.ops import paged_decode_attn_bf16, reshape_and_cache_bf16

TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 100, 8, 2, 64, 16
gpu = EmulatorBackend()  # on a GPU: cupaged.CupyBackend()
stream = gpu.null_stream()
rng = np.random.default_rng(0)
q, key, value = (
    rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    for shape in ((1, Q_HEADS, HEAD_DIM), (TOKENS, KV_HEADS, HEAD_DIM), (TOKENS, KV_HEADS, HEAD_DIM))
)

# A pool of 10 blocks of 16 tokens; this sequence owns seven of them, in any order.
k_cache, v_cache = (gpu.empty((10, BLOCK, KV_HEADS, HEAD_DIM), ml_dtypes.bfloat16) for _ in range(2))
table = np.array([[7, 2, 9, 4, 0, 5, 1]], np.int32)
position = np.arange(TOKENS)
slots = table[0, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK

write = gpu.kernel("reshape_and_cache_bf16", "reshape_and_cache_bf16")
row = KV_HEADS * HEAD_DIM  # elements between two tokens of key and value
reshape_and_cache_bf16(
    gpu, write, gpu.asarray(key), gpu.asarray(value), k_cache, v_cache, gpu.asarray(slots),
    TOKENS, KV_HEADS, HEAD_DIM, BLOCK, row, row, stream,
)  # fmt: skip

decode = gpu.kernel("paged_decode_attn_bf16", "paged_decode_attn_bf16")
lengths = gpu.asarray(np.array([TOKENS], np.int32))
output = gpu.empty((1, Q_HEADS, HEAD_DIM), ml_dtypes.bfloat16)
paged_decode_attn_bf16(
    gpu, decode, gpu.asarray(q), k_cache, v_cache, output, gpu.asarray(table), lengths,
    table.shape[1], 1, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, HEAD_DIM**-0.5, q.size, 0, stream,
)  # fmt: skip

# The same in NumPy: query head h reads KV head h // 4.
k, v = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (key, value))
scores = np.einsum("hd,thd->ht", q[0].astype(np.float64), k) / np.sqrt(HEAD_DIM)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
expected = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
got = gpu.to_host(output).view(ml_dtypes.bfloat16)[0].astype(np.float64)
error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
print(f"{gpu.name}: relative error against NumPy float64 {error:.1e}")
if not error < 5e-3:
    raise SystemExit("the error is larger than rounding to BF16 explains")
