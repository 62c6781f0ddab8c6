# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Quickstart: attention over your own arrays
#
# A language model writes a key and a value for every token it has seen, and each new token attends to all
# of them. cupaged does that step over a *paged* cache: a pool of blocks of, say, 16 tokens each, which
# sequences take as they grow. This notebook puts plain arrays into such a cache, decodes, compares with
# NumPy, and then lets two sequences grow token by token.
#
# All of it runs on a GPU, or on a laptop through the emulator: the same kernels, slowly. In a checkout,
# `jupytext --to notebook examples/notebooks/quickstart.py` makes a notebook of this file.

# %%
import ml_dtypes
import numpy as np

from cupaged import (
    ArgumentValueError,
    BackendUnavailableError,
    BlockAllocator,
    CupyBackend,
    EmulatorBackend,
    KVCache,
)
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout
from cupaged.interop import to_device
from cupaged.tables import sequence_tables, token_slots

try:
    gpu = CupyBackend()
except BackendUnavailableError as error:
    print(f"no GPU ({error}); using the emulator")
    gpu = EmulatorBackend()
stream = gpu.null_stream()  # every call names its stream
print(f"backend: {gpu.name}")

# %% [markdown]
# ## 1. Your arrays
#
# Two sequences of 100 and 37 tokens. Each token has a key and a value of 64 elements for each of 2 KV
# heads; 8 query heads share them in groups of 4 (grouped-query attention). BF16 values come from the
# package `ml_dtypes`; CuPy, JAX, Numba and torch arrays do as well (see the notebook `other_libraries.py`).

# %%
LENGTHS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = [100, 37], 8, 2, 64, 16
rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


keys = [random(n, KV_HEADS, HEAD_DIM) for n in LENGTHS]
values = [random(n, KV_HEADS, HEAD_DIM) for n in LENGTHS]
q = random(len(LENGTHS), Q_HEADS, HEAD_DIM)

# %% [markdown]
# ## 2. A pool of blocks
#
# `CacheLayout` says what a block looks like, `KVCache` holds one pool for K and one for V, and
# `BlockAllocator` keeps the books on the host: which blocks are free, which belong to whom.

# %%
layout = CacheLayout(BF16, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK)
cache = KVCache(gpu, layout, num_blocks=32)
allocator = BlockAllocator(cache.num_blocks, BLOCK)
sequences = [allocator.allocate(n) for n in LENGTHS]
for n, sequence in zip(LENGTHS, sequences, strict=True):
    print(f"{n} tokens in blocks {list(sequence.blocks)}; the last block holds {(n - 1) % BLOCK + 1}")

# %% [markdown]
# ## 3. Write the tokens
#
# A token's place is its *slot*: `block * block_size + offset`. `sequence_tables` makes the block table, one
# row of block ids for each sequence, and `token_slots` the slots of all tokens. Both are small host arrays;
# `to_device` queues their copy.

# %%
tables, seq_lens = sequence_tables(sequences)
slots = token_slots(tables, [0, 0], LENGTHS, BLOCK)
print("block table:\n", tables)
cache.write(
    gpu.asarray(np.concatenate(keys)), gpu.asarray(np.concatenate(values)),
    to_device(gpu, slots, stream), stream=stream,
)  # fmt: skip

# %% [markdown]
# ## 4. Decode
#
# A `Decoder` is made once, for the most sequences a call may have. It reads the lengths on the device, so
# one decoder, and one captured CUDA graph, serves any lengths.

# %%
decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=4)
output = decoder.decode(
    gpu.asarray(q), cache, to_device(gpu, tables, stream), to_device(gpu, seq_lens, stream), stream=stream
)
got = gpu.to_host(output).view(ml_dtypes.bfloat16).astype(np.float64)
print("output:", got.shape, "[num_seqs, num_q_heads, head_dim]")

# %% [markdown]
# ## 5. The same in NumPy
#
# Softmax of `q . k / sqrt(head_dim)`, times V, in float64. Query head h reads KV head `h // 4`. What is
# left of a difference is the rounding of the output to BF16.


# %%
def attention(query, key, value):
    """Float64, one sequence: [num_q_heads, head_dim]."""
    k, v = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def check(result, queries):
    for s in range(len(LENGTHS)):
        expected = attention(queries[s], keys[s], values[s])
        error = np.linalg.norm(result[s] - expected) / np.linalg.norm(expected)
        print(f"sequence {s}, {len(keys[s])} tokens: relative error {error:.1e}")
        if not error < 5e-3:
            raise SystemExit("the error is larger than rounding to BF16 explains")


check(got, q)

# %% [markdown]
# ## 6. The decode loop
#
# In a model, each step brings one key and value for each sequence. `append_each` finds their slots, and
# takes a new block where the last one is full. What `copies` names must be copied before the write: that
# happens where sequences share blocks (`allocator.fork`), and here nothing is shared.

# %%
for _ in range(12):
    appended = allocator.append_each(sequences)
    cache.copy_blocks(appended.copies, stream=stream)
    new_key, new_value = random(2, KV_HEADS, HEAD_DIM), random(2, KV_HEADS, HEAD_DIM)
    cache.write(
        gpu.asarray(new_key), gpu.asarray(new_value), to_device(gpu, appended.slots, stream), stream=stream
    )
    tables, seq_lens = sequence_tables(sequences)
    q = random(2, Q_HEADS, HEAD_DIM)
    output = decoder.decode(
        gpu.asarray(q), cache, to_device(gpu, tables, stream), to_device(gpu, seq_lens, stream), stream=stream
    )
    for s in range(2):
        keys[s] = np.concatenate([keys[s], new_key[s : s + 1]])
        values[s] = np.concatenate([values[s], new_value[s : s + 1]])
print(
    f"after 12 steps: lengths {seq_lens.tolist()}, {allocator.num_free} of {allocator.num_blocks} blocks free"
)
check(gpu.to_host(output).view(ml_dtypes.bfloat16).astype(np.float64), q)

# %% [markdown]
# ## 7. When something is wrong
#
# Arguments are checked before anything runs, without waiting for the device. A message names the argument,
# what it was, and what is allowed. Here `q` has one head too few:

# %%
try:
    decoder.decode(
        gpu.asarray(q[:, 1:]), cache, to_device(gpu, tables, stream), to_device(gpu, seq_lens, stream),
        stream=stream,
    )  # fmt: skip
except ArgumentValueError as error:
    print(f"{type(error).__name__}: {error}")
else:
    raise SystemExit("a query of the wrong shape was taken")

# %% [markdown]
# What is *in* device memory costs time to look at, so it is not checked unless asked: a block id outside
# the pool makes that row NaN, and `cupaged.checked_mode()` raises instead. The page on the threat model
# lists all of it.
#
# Next: `formats.py` (FP8 and NVFP4 caches on a real model), `own_kernel.py` (a kernel of yours),
# `cuda_graphs.py`, `streaming.py` (contexts larger than GPU memory).
