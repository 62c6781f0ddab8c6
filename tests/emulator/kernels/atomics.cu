#include "ptx.cuh"

// cells T [10]: add, sub or (u64) second add, max, min, exch, and, or, xor, inc, dec.
template <class T>
DEVICE void integer_atomics(T* cells, const T* values) {
  const T v = values[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(cells, v);
  atomicMax(cells + 1, v);
  atomicMin(cells + 2, v);
  atomicAnd(cells + 3, v);
  atomicOr(cells + 4, v);
  atomicXor(cells + 5, v);
}
extern "C" __global__ void atomics_u32(u32* cells, const u32* values) { integer_atomics(cells, values); }
extern "C" __global__ void atomics_i32(i32* cells, const i32* values) { integer_atomics(cells, values); }
extern "C" __global__ void atomics_u64(u64* cells, const u64* values) { integer_atomics(cells, values); }

extern "C" __global__ void atomic_add_f32(float* cell) { atomicAdd(cell, 1.0f); }

// old values of each thread: of exch, inc (limit 4), dec (limit 4).
extern "C" __global__ void ordered_atomics(u32* cells, u32* old) {
  const u32 i = threadIdx.x;
  old[3 * i] = atomicExch(cells, i + 1);
  old[3 * i + 1] = atomicInc(cells + 1, 4u);
  old[3 * i + 2] = atomicDec(cells + 2, 4u);
}

// A lock that all threads of all blocks take in turns.
extern "C" __global__ void spin_lock(u32* lock, u64* total) {
  while (atomicCAS(lock, 0u, 1u) != 0u) ptx::spin_pause();
  __threadfence();
  *total = *total + 1;
  __threadfence();
  atomicExch(lock, 0u);
}

// The last block to arrive adds up what the others wrote.
extern "C" __global__ void last_block_sums(u32* partial, u32* counter, u32* out) {
  __shared__ u32 is_last;
  partial[blockIdx.x] = blockIdx.x + 1;
  if (threadIdx.x == 0) is_last = ptx::atomic_inc_acq_rel(counter, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last || threadIdx.x != 0) return;
  u32 sum = 0;
  for (u32 i = 0; i < gridDim.x; i++) sum += partial[i];
  *out = sum;
}

// Thread 32 waits for thread 0 of the same block.
extern "C" __global__ void acquire_release(u32* flag, u32* data) {
  if (threadIdx.x == 32) {
    while (ptx::load_acquire(flag) != 1u) ptx::spin_pause();
    data[1] = data[0] + 1;
  }
  if (threadIdx.x == 0) {
    data[0] = 41;
    ptx::store_release(flag, 1u);
  }
}
