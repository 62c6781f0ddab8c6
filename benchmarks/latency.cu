// Writes q, as the projection before a decode would: count 16-byte vectors.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256) write_q(const uint4* source, uint4* q, u32 count) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) q[i] = source[i];
}
