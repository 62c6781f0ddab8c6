// Largest magnitude of BF16 values, accumulated into out_max (F32[1], which must hold a non-negative
// number or NaN). A NaN anywhere makes it NaN. No compile-time constants.
//
// As bit patterns without their sign, BF16 values order like integers, with NaN above infinity; the
// same holds for the float32 they widen to.
#include "numeric/bf16.cuh"

constexpr u32 ABSMAX_WARPS = 8;
constexpr u32 VECTOR = 8;  // values a 16-byte load

DEVICE u32 pair_magnitude(u32 pair) { return max(pair & 0x7fffu, (pair >> 16) & 0x7fffu); }

DEVICE u32 vector_magnitude(uint4 v) {
  return max(max(pair_magnitude(v.x), pair_magnitude(v.y)),
             max(pair_magnitude(v.z), pair_magnitude(v.w)));
}

// Largest of data[0 .. count), this thread's share of `threads`: single values up to the first 16-byte
// boundary, vectors, then what is left.
DEVICE u32 strided_magnitude(const bf16_bits* data, u64 count, u64 thread, u64 threads) {
  const u64 misaligned = (reinterpret_cast<u64>(data) / sizeof(bf16_bits)) % VECTOR;
  const u64 to_boundary = (VECTOR - misaligned) % VECTOR;
  const u64 head = to_boundary < count ? to_boundary : count;
  const u64 vectors = (count - head) / VECTOR, tail = head + vectors * VECTOR;
  const uint4* body = reinterpret_cast<const uint4*>(data + head);
  u32 largest = 0;
  if (thread < head) largest = data[thread] & 0x7fffu;
  for (u64 i = thread; i < vectors; i += threads) largest = max(largest, vector_magnitude(body[i]));
  if (thread < count - tail) largest = max(largest, static_cast<u32>(data[tail + thread] & 0x7fffu));
  return largest;
}

DEVICE void accumulate_block_max(u32 largest, float* out_max) {
  __shared__ u32 warp_max[ABSMAX_WARPS];
  UNROLL for (int offset = 16; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
  if (threadIdx.x % WARP_SIZE == 0) warp_max[threadIdx.x / WARP_SIZE] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 w = 1; w < blockDim.x / WARP_SIZE; w++) largest = max(largest, warp_max[w]);
  atomicMax(reinterpret_cast<u32*>(out_max), largest << 16);
}

extern "C" __global__ void __launch_bounds__(256)
    bf16_absmax(const bf16_bits* data, float* out_max, u32 n_elems) {
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  accumulate_block_max(strided_magnitude(data, n_elems, thread, threads), out_max);
}

// Rows of row_elems values, row_stride elements apart; what lies between rows is not read.
extern "C" __global__ void __launch_bounds__(256)
    bf16_absmax_rows(const bf16_bits* data, float* out_max, u32 num_rows, u32 row_elems,
                     u64 row_stride) {
  u32 largest = 0;
  for (u64 row = blockIdx.x; row < num_rows; row += gridDim.x)
    largest = max(largest, strided_magnitude(data + row * row_stride, row_elems, threadIdx.x, blockDim.x));
  accumulate_block_max(largest, out_max);
}
