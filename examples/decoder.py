"""FP8 with calibrated scales, a `KVCache` and its `Decoder`: `python examples/decoder.py`."""

import ml_dtypes
import numpy as np

from cupaged import BlockAllocator, EmulatorBackend, KVCache
from cupaged.calibration import Fp8Calibration
from cupaged.decode import Decoder
from cupaged.formats import FP8, CacheLayout
from cupaged.tables import sequence_tables, token_slots

LENGTHS, Q_HEADS, BLOCKS = [70, 9], 12, 8
layout = CacheLayout(FP8, num_kv_heads=4, head_dim=128, block_size=32)
gpu = EmulatorBackend()  # on a GPU: cupaged.CupyBackend()
stream = gpu.null_stream()
rng = np.random.default_rng(0)

# Both sequences' tokens, one after the other: three blocks for the first, one for the second.
shape = (sum(LENGTHS), layout.num_kv_heads, layout.head_dim)
key, value = (gpu.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16)) for _ in range(2))
allocator = BlockAllocator(BLOCKS, layout.block_size)
tables, seq_lens = sequence_tables([allocator.allocate(n) for n in LENGTHS])
slots = gpu.asarray(token_slots(tables, [0, 0], LENGTHS, layout.block_size))

# One scale for each tensor: the largest magnitude becomes 448, the largest E4M3 value. The cache keeps them
# for those who write and those who read.
scales = []
for tensor in (key, value):
    calibration = Fp8Calibration(gpu)
    row = layout.num_kv_heads * layout.head_dim  # elements of a token
    calibration.update(tensor, sum(LENGTHS), row, row, stream)
    scales.append(calibration.scale())
cache = KVCache(gpu, layout, BLOCKS, k_scale=scales[0], v_scale=scales[1])
cache.write(key, value, slots, stream=stream)

decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=2)
q = rng.standard_normal((2, Q_HEADS, layout.head_dim)).astype(ml_dtypes.bfloat16)
lse = gpu.empty(q.shape[:2], np.float32)
output = decoder.decode(
    gpu.asarray(q), cache, gpu.asarray(tables), gpu.asarray(seq_lens), stream=stream, lse=lse
)

# The same in NumPy, on what the cache holds: query head h reads KV head h // 3.
for s, n in enumerate(LENGTHS):
    stored = cache.gather(gpu.asarray(tables[s]), n, stream=stream)
    k, v = (np.repeat(gpu.to_host(x).astype(np.float64), 3, axis=1) for x in stored)
    weights = np.exp(np.einsum("hd,thd->ht", q[s].astype(np.float64), k) / np.sqrt(layout.head_dim))
    expected = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    got = gpu.to_host(output)[s].view(ml_dtypes.bfloat16).astype(np.float64)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    lse_error = np.abs(gpu.to_host(lse)[s] - np.log(weights.sum(axis=1))).max()
    print(f"sequence {s}: relative error {error:.1e}, log-sum-exp off by at most {lse_error:.1e}")
    if not (error < 5e-3 and lse_error < 1e-3):
        raise SystemExit("the error is larger than rounding explains")
