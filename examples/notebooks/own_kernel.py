# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A kernel of your own, and the race in it
#
# The builder that launches the package's kernels launches yours: a `.cu` file, compiled at its first
# launch, on a GPU by NVRTC or on the CPU by the emulator. On the emulator it can also be *checked*: check
# mode knows which accesses are ordered by barriers and which only happened to come out right.
#
# The kernel here computes the attention scores of one query over a paged cache. We write it, run it, break
# it, watch the test pass all the same, and let check mode find the fault.

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from cupaged import (
    BackendUnavailableError,
    CupagedError,
    CupyBackend,
    EmulatorBackend,
    KernelFault,
    KernelLaunch,
)
from cupaged.errors import DataRaceFault, OutOfBoundsFault

backends = [EmulatorBackend()]
try:
    backends.append(CupyBackend())
except BackendUnavailableError as error:
    print(f"no GPU ({error}); the emulator alone")

# %% [markdown]
# ## 1. The kernel
#
# One block of threads for each block of the cache, found through the block table as in any paged kernel;
# one thread for each element. For each token in turn, a warp adds up its 32 products by shuffles, leaves
# the sum in shared memory, and thread 0 adds the sums of the warps.
#
# - `u32`, `u64`, `bf16_bits`, `DYNAMIC_SHARED` and `FULL_WARP` come from the package's headers; no CUDA
#   toolkit header is needed.
# - `HEAD_DIM`, `BLOCK_SIZE` and `FORGET_BARRIER` are macros that the host gives.

# %%
SOURCE = """
#include "numeric/bf16.cuh"

extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    paged_scores(const bf16_bits* q, const bf16_bits* k_cache, const i32* block_table, float* scores,
                 u32 num_tokens, float scale) {
  DYNAMIC_SHARED(float, warp_sums);
  const u32 first = blockIdx.x * BLOCK_SIZE;  // token
  const u64 row = static_cast<u64>(block_table[blockIdx.x]) * BLOCK_SIZE;
  for (u32 i = 0; i < BLOCK_SIZE && first + i < num_tokens; i++) {
    const bf16_bits* key = k_cache + (row + i) * HEAD_DIM;
    float sum = bf16_to_float(q[threadIdx.x]) * bf16_to_float(key[threadIdx.x]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = sum;
    __syncthreads();  // all sums are there
    if (threadIdx.x == 0) {
      float score = 0.0f;
      for (u32 warp = 0; warp < HEAD_DIM / WARP_SIZE; warp++) score += warp_sums[warp];
      scores[first + i] = score * scale;
    }
#if !FORGET_BARRIER
    __syncthreads();  // they were read: the next token may overwrite them
#endif
  }
}
"""
folder = Path(tempfile.mkdtemp())
file = folder / "paged_scores.cu"
file.write_text(SOURCE.lstrip())

# %% [markdown]
# ## 2. Launching it
#
# `gpu.kernel` takes the file, the entry and the macros. The builder then takes one argument after the
# other, and compares them with the parameters that it reads from the source.

# %%
HEAD_DIM, BLOCK, TOKENS = 128, 16, 40
SCALE = HEAD_DIM**-0.5
rng = np.random.default_rng(0)
q = rng.standard_normal(HEAD_DIM).astype(ml_dtypes.bfloat16)
k_cache = rng.standard_normal((8, BLOCK, HEAD_DIM)).astype(ml_dtypes.bfloat16)
table = np.array([5, 0, 3], np.int32)


def paged_scores(gpu, table=table, *, forget_barrier=False):
    kernel = gpu.kernel(
        file, "paged_scores", HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK, FORGET_BARRIER=int(forget_barrier)
    )
    q_device, k_device, table_device = (gpu.asarray(x) for x in (q, k_cache, table))
    scores = gpu.empty(TOKENS, np.float32)
    launch = KernelLaunch(gpu, kernel).grid([len(table), 1, 1]).block([HEAD_DIM, 1, 1])
    launch.shared_mem(HEAD_DIM // 32 * 4)  # a float32 for each warp
    launch.arg_ptr(q_device).arg_ptr(k_device).arg_ptr(table_device).arg_ptr(scores)
    launch.arg_u32(TOKENS).arg_f32(SCALE).launch(gpu.null_stream())
    return gpu.to_host(scores)


rows = k_cache[table].reshape(-1, HEAD_DIM)[:TOKENS].astype(np.float64)
expected = rows @ q.astype(np.float64) * SCALE
for gpu in backends:
    error = np.abs(paged_scores(gpu) - expected).max()
    print(f"{gpu.name}: largest error {error:.1e}")
    if not error < 1e-5:
        raise SystemExit("the error is larger than rounding to float32 explains")

# %% [markdown]
# A launch that does not fit the source is refused before anything runs:

# %%
gpu = backends[0]
kernel = gpu.kernel(file, "paged_scores", HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK, FORGET_BARRIER=0)
try:
    KernelLaunch(gpu, kernel).grid([1, 1, 1]).block([HEAD_DIM, 1, 1]).arg_u32(1).launch(gpu.null_stream())
except CupagedError as error:
    print(f"{type(error).__name__}: {error}")
else:
    raise SystemExit("a launch without arguments was taken")

# %% [markdown]
# ## 3. The race
#
# The second barrier looks idle: everything was added up already. Without it, a fast warp may store its sum
# of the next token while thread 0 still reads those of this one. Whether that shows depends on who runs
# first, which the emulator's `schedule` decides: let us try all.

# %%
for schedule in ("fifo", "reverse", "random"):
    scores = paged_scores(EmulatorBackend(schedule=schedule), forget_barrier=True)
    error = np.abs(scores - expected).max()
    print(f"{schedule:7} largest error {error:.1e}", "(right, by luck)" if error < 1e-5 else "(wrong)")

# %% [markdown]
# A test that compares numbers finds such a fault only where the schedule is unlucky, and a GPU's schedule
# is not yours to choose. Check mode does not look at numbers. It follows what orders one access after
# another, and stops at two that nothing orders, whatever the result.

# %%
checked = EmulatorBackend(check="full")
try:
    paged_scores(checked, forget_barrier=True)
except DataRaceFault as fault:
    print(f"{type(fault).__name__}: {fault}")
    print("\nkernel:", fault.kernel, " block:", fault.block, " thread:", fault.thread)
else:
    raise SystemExit("the race was not found")

# %% [markdown]
# The report names both accesses, each with its thread and its line of the file: thread 0 reads a warp's
# sum, and that warp overwrites it, in whichever order the two happened to run. What is missing is an order
# between the two lines: a `__syncthreads()` after the reading. With it the same run ends without a report:

# %%
error = np.abs(paged_scores(checked) - expected).max()
print(f"with the barrier: no fault, largest error {error:.1e}")

# %% [markdown]
# ## 4. A stray read
#
# A block table with a wrong id sends the kernel out of the pool. On a GPU that reads somebody else's memory
# in silence, or ends the context. Check mode knows the arrays behind the pointers:

# %%
try:
    paged_scores(checked, np.array([5, 8, 3], np.int32))  # the pool has blocks 0 to 7
except OutOfBoundsFault as fault:
    print(f"{type(fault).__name__}: {fault}")
else:
    raise SystemExit("the stray read was not found")

# %% [markdown]
# All these faults are kinds of `KernelFault`, so a test suite may catch one type. The how-to on kernels
# lists them all, with what a kernel may use; `examples/own_kernel/` is a program with the same parts.

# %%
print(sorted(fault.__name__ for fault in KernelFault.__subclasses__()))
file.unlink()
folder.rmdir()
