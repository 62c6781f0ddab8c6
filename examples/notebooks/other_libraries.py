# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # JAX and Numba: their arrays, these kernels
#
# cupaged has no arrays of its own. It takes those of any library that can lend them without a copy: by
# DLPack (JAX, torch, CuPy, NumPy) or by `__cuda_array_interface__` (Numba, CuPy). What needs care is
# *order*: the library has queued work that makes the array, on its stream; the kernel must come after it,
# and whoever reads the result after the kernel.
#
# `pip install '.[interop]'` brings JAX and Numba. What is not installed is left out, with a message. On the
# emulator arrays are host arrays: JAX's CPU arrays and NumPy arrays that Numba's compiled functions work
# on.

# %%
import importlib.util

import ml_dtypes
import numpy as np

from cupaged import BackendUnavailableError, BlockAllocator, CupyBackend, EmulatorBackend, KVCache
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout
from cupaged.interop import stream_memory, to_device
from cupaged.tables import sequence_tables, token_slots

try:
    gpu = CupyBackend()
except BackendUnavailableError as error:
    print(f"no GPU ({error}); using the emulator")
    gpu = EmulatorBackend()
have = {name: importlib.util.find_spec(name) is not None for name in ("jax", "numba")}
for name, found in have.items():
    if not found:
        print(f"{name} is not installed: its part is left out (pip install '.[interop]')")

# %% [markdown]
# ## 1. One problem for both
#
# Two sequences over a small BF16 cache, and the right answer in float64. `attend` below takes the arrays of
# *any* library: `KVCache.write` and `Decoder.decode` borrow them themselves.

# %%
LENGTHS, Q_HEADS, BLOCK = [37, 5], 8, 16
layout = CacheLayout(BF16, num_kv_heads=2, head_dim=64, block_size=BLOCK)
rng = np.random.default_rng(0)
key, value = (
    rng.standard_normal((sum(LENGTHS), layout.num_kv_heads, layout.head_dim)).astype(ml_dtypes.bfloat16)
    for _ in range(2)
)
query = rng.standard_normal((len(LENGTHS), Q_HEADS, layout.head_dim)).astype(ml_dtypes.bfloat16)


def attention(query, key, value):
    """Float64, one sequence: [num_q_heads, head_dim]."""
    k, v = (np.repeat(x.astype(np.float64), Q_HEADS // layout.num_kv_heads, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), k) / np.sqrt(layout.head_dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


ends = np.cumsum(LENGTHS)
expected = np.stack(
    [
        attention(query[s], key[end - n : end], value[end - n : end])
        for s, (n, end) in enumerate(zip(LENGTHS, ends, strict=True))
    ]
)


def check(library, got):
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    print(f"{library} on {gpu.name}: relative error {error:.1e}")
    if not error < 5e-3:
        raise SystemExit("the error is larger than rounding to BF16 explains")


def attend(q, k, v, out, stream):
    """Write k and v into a cache and decode q into out; everything is queued on the stream."""
    cache, allocator = KVCache(gpu, layout, num_blocks=6), BlockAllocator(6, BLOCK)
    tables, lengths = sequence_tables([allocator.allocate(n) for n in LENGTHS])
    slots = token_slots(tables, [0] * len(LENGTHS), LENGTHS, BLOCK)
    cache.write(k, v, to_device(gpu, slots, stream), stream=stream)
    decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=len(LENGTHS))
    decoder.decode(
        q, cache, to_device(gpu, tables, stream), to_device(gpu, lengths, stream), out, stream=stream
    )
    # Cache and decoder end with this function; the work must not need them any more.
    gpu.synchronize(gpu.stream_handle(stream))


# %% [markdown]
# ## 2. JAX
#
# JAX's arrays go in by DLPack. JAX passes our stream along and orders its own work before it. The way back
# is different: JAX arrays never change (and JAX reuses their memory on that promise), so a kernel must not
# write to one. The result goes to memory of the backend, which JAX then takes over without a copy.
#
# `stream_memory` makes the stream CuPy's current one while JAX asks for the array: so JAX comes after the
# kernel. BF16 travels as 16-bit integers there and back; `bitcast_convert_type` gives them their meaning.

# %%
if have["jax"]:
    import jax
    import jax.numpy as jnp

    if gpu.name == "cupy" and jax.default_backend() != "gpu":
        print("this JAX has no GPU support, and its host arrays cannot be lent to a GPU kernel: left out")
    else:
        stream = gpu.null_stream()
        q, k, v = (jnp.asarray(x) for x in (query, key, value))
        bits = gpu.empty(query.shape, np.uint16)
        attend(q, k, v, bits, stream)
        with stream_memory(gpu, stream):
            output = jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(bits), jnp.bfloat16)
        print(type(q).__module__, type(output).__module__, output.dtype, output.shape)
        check("JAX", np.asarray(output.astype(jnp.float32)).astype(np.float64))

# %% [markdown]
# ## 3. Numba
#
# On a GPU, Numba's device arrays lend themselves by `__cuda_array_interface__`, and say which stream they
# are ready on; ours waits for it by an event. They may be written to, so the output is one of them, too.
# Numba has no BF16: its arrays hold the bits.
#
# Without a GPU, Numba compiles functions over NumPy arrays, which is what the emulator works on: nothing
# needs to be lent. The function here scales the keys, on the bits, before they go into the cache: times -1
# for K and for q, which changes no score.

# %%
if have["numba"] and gpu.name == "cupy":
    from numba import cuda

    stream = cuda.stream()
    q, k, v = (cuda.to_device(x.view(np.uint16), stream=stream) for x in (query, key, value))
    out = cuda.device_array(query.shape, np.uint16, stream=stream)
    attend(q, k, v, out, int(stream))
    host = out.copy_to_host(stream=stream)
    stream.synchronize()
    check("Numba", host.view(ml_dtypes.bfloat16).astype(np.float64))
elif have["numba"]:
    import numba

    @numba.njit
    def negate(bits):
        """BF16 bits, in place: the sign is the highest."""
        for i in range(bits.size):
            bits.flat[i] ^= np.uint16(0x8000)

    q, k = query.view(np.uint16).copy(), key.view(np.uint16).copy()
    negate(q)
    negate(k)
    out = gpu.empty(query.shape, np.uint16)
    attend(q, k, value, out, gpu.null_stream())
    check("Numba", out.view(ml_dtypes.bfloat16).astype(np.float64))

# %% [markdown]
# ## What to remember
#
# - A borrowed array must live until the work that uses it is done.
# - CuPy's own arrays name no stream: order them yourself, by making them on the stream that you give.
# - A host array is never taken for a device array: `to_device` makes the copy, in the open.
#
# `examples/interop/` has the same as programs, for CuPy and torch too; "The cache object" in the
# documentation has the table of what is taken from whom.
