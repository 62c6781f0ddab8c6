# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # CUDA graphs: one capture, every length
#
# A decode step of a model is a few hundred small launches. Queued one by one they cost the host more time
# than the GPU needs for them; captured once in a CUDA graph and replayed, they cost next to nothing. A
# graph repeats the same launches with the same arguments, so it fits only kernels whose arguments do not
# change from step to step.
#
# That is why a `Decoder` plans on the device: it gets the *addresses* of the block table and the lengths,
# and reads them when it runs. This notebook shows what must stay fixed, what may change, and what a graph
# saves. The capture itself needs a GPU; without one the cells say what they would do, and the same calls
# run one by one on the emulator.

# %%
import time

import ml_dtypes
import numpy as np

from cupaged import BackendUnavailableError, BlockAllocator, CupyBackend, EmulatorBackend, KVCache
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout
from cupaged.interop import to_device
from cupaged.tables import sequence_tables, token_slots

try:
    gpu = CupyBackend()
except BackendUnavailableError as error:
    print(f"no GPU ({error}); using the emulator")
    gpu = EmulatorBackend()
on_gpu = gpu.name == "cupy"
if on_gpu:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)  # a capture is not possible on the default stream
else:
    stream = gpu.null_stream()
print(f"backend: {gpu.name}")

# %% [markdown]
# ## 1. Buffers that stay where they are
#
# Everything that a captured launch touches keeps its address: query, output, block table, lengths, pools,
# and the decoder with its workspace. Their *contents* change between replays. So each is allocated once,
# for the largest batch and the widest table there will be.

# %%
MAX_SEQS, WIDTH, Q_HEADS, BLOCK, POOL = 3, 6, 8, 16, 24
layout = CacheLayout(BF16, num_kv_heads=2, head_dim=64, block_size=BLOCK)
cache, allocator = KVCache(gpu, layout, POOL), BlockAllocator(POOL, BLOCK)
decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=MAX_SEQS)
q = gpu.zeros((MAX_SEQS, Q_HEADS, layout.head_dim), np.uint16)  # BF16 bits
output = gpu.zeros((MAX_SEQS, Q_HEADS, layout.head_dim), np.uint16)
block_tables = gpu.zeros((MAX_SEQS, WIDTH), np.int32)
seq_lens = gpu.zeros(MAX_SEQS, np.int32)
gpu.synchronize()  # these were zeroed on the default stream


def step():
    """The launches of a step; a model would have its matrix products here, too."""
    decoder.decode(q, cache, block_tables, seq_lens, output, stream=stream)


def fill(buffer, host):
    """New contents for a buffer that stays where it is."""
    if on_gpu:
        with stream:
            buffer.set(host)
    else:
        buffer[...] = host


# %% [markdown]
# ## 2. Capture
#
# The first call of a kernel compiles and loads it, which a capture does not allow: so run a step before.
# Then between `begin_capture` and `end_capture` nothing runs; the launches are only written down. An `out`
# must be given (allocating inside a capture is refused), and checked mode, which has to wait for the
# device, is off.

# %%
step()
gpu.synchronize()
if on_gpu:
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()

    def replay():
        graph.launch(stream)

    print("captured one decode step")
else:
    replay = step
    print("no GPU: each 'replay' below calls the step itself, with the same arguments")

# %% [markdown]
# ## 3. Replay with other lengths, other blocks, other sequences
#
# Each round deals out new sequences and fills the same buffers. An empty place in the batch is a sequence
# of length 0: its output is a row of zeros, and it costs nothing.

# %%
rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def attention(query, key, value):
    """Float64, one sequence: [num_q_heads, head_dim]."""
    k, v = (np.repeat(x.astype(np.float64), Q_HEADS // layout.num_kv_heads, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), k) / np.sqrt(layout.head_dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


for lengths in ([20, 1, 90], [70, 0, 5], [3, 96, 0]):
    sequences = [allocator.allocate(n) for n in lengths]
    tables, lens = sequence_tables(sequences, max_blocks_per_seq=WIDTH)
    key, value = (random(sum(lengths), layout.num_kv_heads, layout.head_dim) for _ in range(2))
    slots = token_slots(tables, [0] * MAX_SEQS, lengths, BLOCK)
    cache.write(*(to_device(gpu, array, stream) for array in (key, value, slots)), stream=stream)
    query = random(MAX_SEQS, Q_HEADS, layout.head_dim)
    fill(q, query.view(np.uint16))
    fill(block_tables, tables)
    fill(seq_lens, lens)
    replay()
    gpu.synchronize()
    got = gpu.to_host(output).view(ml_dtypes.bfloat16).astype(np.float64)
    first = 0
    for s, n in enumerate(lengths):
        if n == 0:
            error = np.abs(got[s]).max()
        else:
            expected = attention(query[s], key[first : first + n], value[first : first + n])
            error = np.linalg.norm(got[s] - expected) / np.linalg.norm(expected)
        if not error < 5e-3:
            raise SystemExit(f"sequence {s} of {lengths}: error {error:.1e}")
        first += n
    print(f"lengths {lengths}: blocks {[list(x.blocks) for x in sequences]}, right")
    for sequence in sequences:
        allocator.free(sequence)

# %% [markdown]
# ## 4. What it saves
#
# Time for the host to queue 30 steps, a model's layers, one by one and as one graph. On a GPU the second
# figure is that of a single launch, whatever the graph holds.

# %%
LAYERS = 30


def seconds(queue):
    """Least of five, the device idle at the start; only queueing is timed."""
    times = []
    for _ in range(5):
        gpu.synchronize()
        begin = time.perf_counter()
        queue()
        times.append(time.perf_counter() - begin)
    gpu.synchronize()
    return min(times)


def all_layers():
    for _ in range(LAYERS):
        step()


if on_gpu:
    with stream:
        stream.begin_capture()
        all_layers()
        whole = stream.end_capture()
    whole.launch(stream)
    print(f"one by one: {seconds(all_layers) * 1e6:8.1f} us on the host for {LAYERS} steps")
    print(f"as a graph: {seconds(lambda: whole.launch(stream)) * 1e6:8.1f} us")
else:
    print("no GPU: nothing to measure. The emulator runs a launch before it returns.")

# %% [markdown]
# ## What to remember
#
# - One decoder belongs to one stream at a time; a graph that holds it counts as its user. Two graphs that
#   may run at once need two decoders.
# - Arrays that a graph names must outlive it.
# - `max_blocks_per_seq`, the table's width, is an argument and so is fixed: capture with the widest.
# - Anything that decides on the host (sampling, stopping, taking blocks) happens between replays.
