#include "ptx.cuh"

// counter u32 [1], zero at first. Every block's thread 0 arrives; all wait until the whole grid has.
DEVICE void grid_barrier(u32* counter, u32 generation) {
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::atomic_add_acq_rel(counter, 1);
    while (ptx::load_acquire(counter) < generation * gridDim.x) ptx::spin_pause();
  }
  __syncthreads();
}

// Blocks pass values round: static and dynamic shared memory of each must keep its own.
extern "C" __global__ void pass_round(u32* counter, u32* cells, u32* out, u32 rounds) {
  __shared__ u32 kept;
  DYNAMIC_SHARED(u32, also_kept);
  if (threadIdx.x == 0) {
    kept = blockIdx.x;
    also_kept[0] = 100 + blockIdx.x;
  }
  __syncthreads();
  for (u32 round = 0; round < rounds; round++) {
    if (threadIdx.x == 0) cells[blockIdx.x] = kept;
    grid_barrier(counter, 2 * round + 1);
    if (threadIdx.x == 0) kept = cells[(blockIdx.x + 1) % gridDim.x];
    grid_barrier(counter, 2 * round + 2);
  }
  if (threadIdx.x == 0) out[2 * blockIdx.x] = kept, out[2 * blockIdx.x + 1] = also_kept[0];
}

// Block 0 waits for an arrival that no block makes.
extern "C" __global__ void one_block_missing(u32* counter) {
  if (blockIdx.x == 2) return;
  grid_barrier(counter, 1);
}
