"""From plain arrays to attention output, and the same in NumPy: `python examples/minimal.py`."""

import ml_dtypes
import numpy as np

from cupaged import EmulatorBackend, KVCache
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout

TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 100, 8, 2, 64, 16
gpu = EmulatorBackend()  # on a GPU: cupaged.CupyBackend()
stream = gpu.null_stream()

# Your arrays, in BF16: one query token, and the keys and values of 100 tokens.
rng = np.random.default_rng(0)
q, key, value = (
    rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    for shape in ((1, Q_HEADS, HEAD_DIM), (TOKENS, KV_HEADS, HEAD_DIM), (TOKENS, KV_HEADS, HEAD_DIM))
)

# A pool of 10 blocks of 16 tokens; this sequence owns seven of them, in any order. A token's slot is its
# block * 16 + its place in the block.
cache = KVCache(gpu, CacheLayout(BF16, KV_HEADS, HEAD_DIM, BLOCK), num_blocks=10)
block_tables = np.array([[7, 2, 9, 4, 0, 5, 1]], np.int32)
position = np.arange(TOKENS)
slots = block_tables[0, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
cache.write(gpu.asarray(key), gpu.asarray(value), gpu.asarray(slots), stream=stream)

decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=1)
seq_lens = np.array([TOKENS], np.int32)
output = decoder.decode(
    gpu.asarray(q), cache, gpu.asarray(block_tables), gpu.asarray(seq_lens), stream=stream
)

# The same in NumPy: query head h reads KV head h // 4.
k, v = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (key, value))
scores = np.einsum("hd,thd->ht", q[0].astype(np.float64), k) / np.sqrt(HEAD_DIM)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
expected = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
got = gpu.to_host(output).view(ml_dtypes.bfloat16)[0].astype(np.float64)  # from a GPU, BF16 comes as its bits
error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
print(f"{gpu.name}: relative error against NumPy float64 {error:.1e}")
if not error < 5e-3:
    raise SystemExit("the error is larger than rounding to BF16 explains")
