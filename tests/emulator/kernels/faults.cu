#include "ptx.cuh"

// Lanes of warp 1 wait for each other in different places.
extern "C" __global__ void stuck(u32* out) {
  u32 value = threadIdx.x;
  if (threadIdx.x >= 32 && threadIdx.x < 48) value = __shfl_xor_sync(FULL_WARP, value, 1);
  __syncthreads();  // here: stuck
  out[threadIdx.x] = value;
}

extern "C" __global__ void half_a_warp(u32* out) {
  u32 value = threadIdx.x;
  if (threadIdx.x < 16) value = __shfl_xor_sync(FULL_WARP, value, 1);  // here: half a shuffle
  __syncwarp();                                                        // here: whole warp
  out[threadIdx.x] = value;
}

extern "C" __global__ void mask_without_self(u32* out) {
  out[threadIdx.x] = __ballot_sync(0x0000ffffu, 1);  // here: wrong mask
}

extern "C" __global__ void partial_warp_product() {
  float c[4] = {};
  ptx::mma_m16n8k16_f16(c, 0, 0, 0, 0, 0, 0);
}

extern "C" __global__ void waits_for_nobody(const u32* flag) {
  while (ptx::load_acquire(flag) == 0u) ptx::spin_pause();  // here: endless spin
}

extern "C" __global__ void traps() {
  if (threadIdx.x == 5 && blockIdx.y == 1) __trap();  // here: trap
}

extern "C" __global__ void does_not_compile() {
#if SPEC_BAD
  return no_such_name;
#endif
}
