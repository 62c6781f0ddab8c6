// y += a x, n elements: the smallest kernel of one's own.
#include "platform.cuh"

extern "C" __global__ void saxpy(const float* x, float* y, float a, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
