// Layer normalisation of BF16 rows: out = (x - mean) / sqrt(variance + epsilon) * weight + bias.
// One block of THREADS threads for each row; THREADS, a multiple of 32, is set by the host.
// FORGET_BARRIER=1 leaves out one barrier: the deliberate bug of docs/howto_kernel.md.
#include "numeric/bf16.cuh"

DEVICE float warp_sum(float value) {
  UNROLL for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

// Sum over the block, in every thread. warp_sums: THREADS / 32 floats of shared memory.
DEVICE float block_sum(float value, float* warp_sums) {
  value = warp_sum(value);
#if !FORGET_BARRIER
  __syncthreads();  // every thread has read the previous sum
#endif
  if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  float total = 0.0f;
  for (u32 warp = 0; warp < THREADS / WARP_SIZE; warp++) total += warp_sums[warp];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm(const bf16_bits* x, const bf16_bits* weight, const bf16_bits* bias, bf16_bits* out,
               u32 row_elems, float epsilon) {
  DYNAMIC_SHARED(float, warp_sums);
  const u64 row = static_cast<u64>(blockIdx.x) * row_elems;
  const float count = static_cast<float>(row_elems);

  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < row_elems; i += THREADS) sum += bf16_to_float(x[row + i]);
  const float mean = block_sum(sum, warp_sums) / count;

  float squares = 0.0f;
  for (u32 i = threadIdx.x; i < row_elems; i += THREADS) {
    const float centred = bf16_to_float(x[row + i]) - mean;
    squares += centred * centred;
  }
  const float scale = rsqrtf(block_sum(squares, warp_sums) / count + epsilon);

  for (u32 i = threadIdx.x; i < row_elems; i += THREADS) {
    const float normal = (bf16_to_float(x[row + i]) - mean) * scale;
    out[row + i] = float_to_bf16(normal * bf16_to_float(weight[i]) + bf16_to_float(bias[i]));
  }
}
