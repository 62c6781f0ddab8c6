// Largest magnitude of BF16 values, accumulated into out_max (F32[1], which must hold a non-negative
// number or NaN). A NaN anywhere makes it NaN. No compile-time constants.
//
// As bit patterns without their sign, BF16 values order like integers, with NaN above infinity; the
// same holds for the float32 they widen to.
//
// A warp takes a piece of a row at a time: with PIECE_LOADS loads of 16 bytes a lane, all asked for
// before the first is used. A block's pieces follow each other, and it ends after them unless the grid
// is full.
#include "numeric/bf16.cuh"
#include "numeric/magnitudes.cuh"

constexpr u32 ABSMAX_WARPS = 8;
constexpr u32 VECTOR = 8;  // values a 16-byte load
constexpr u32 PIECE_LOADS = 16;
constexpr u32 PIECE = PIECE_LOADS * WARP_SIZE;  // vectors

DEVICE u32 vector_magnitudes(uint4 v) {
  return max_magnitude_bf16x2(max_magnitude_bf16x2(v.x, v.y), max_magnitude_bf16x2(v.z, v.w));
}

// This lane's share of a piece whose first vector is `body`, `left` vectors before the row ends.
DEVICE u32 piece_magnitudes(const uint4* body, u32 left) {
  const u32 lane = threadIdx.x % WARP_SIZE;
  uint4 v[PIECE_LOADS];
  if (left >= PIECE) {
#pragma unroll
    for (u32 k = 0; k < PIECE_LOADS; k++) v[k] = ptx::load_streaming_16(body + lane + k * WARP_SIZE);
  } else {
#pragma unroll
    for (u32 k = 0; k < PIECE_LOADS; k++) {
      v[k] = make_uint4(0, 0, 0, 0);
      if (lane + k * WARP_SIZE < left) v[k] = ptx::load_streaming_16(body + lane + k * WARP_SIZE);
    }
  }
  u32 largest = 0;
  UNROLL for (u32 k = 0; k < PIECE_LOADS; k++)
    largest = max_magnitude_bf16x2(largest, vector_magnitudes(v[k]));
  return largest;
}

// This lane's share of one piece of data[0 .. count): vectors from the first 16-byte boundary on; the
// first piece also has the single values before that and behind the last vector.
DEVICE u32 row_magnitudes(const bf16_bits* data, u32 count, u32 piece) {
  const u32 lane = threadIdx.x % WARP_SIZE;
  const u32 misaligned = static_cast<u32>(reinterpret_cast<u64>(data) / sizeof(bf16_bits)) % VECTOR;
  const u32 head = min((VECTOR - misaligned) % VECTOR, count);
  const u32 vectors = (count - head) / VECTOR, first = piece * PIECE;
  u32 largest = 0;
  if (piece == 0) {
    const u32 tail = head + vectors * VECTOR;
    if (lane < head) largest = data[lane];
    if (lane < count - tail) largest = max_magnitude_bf16x2(largest, data[tail + lane]);
  }
  if (first >= vectors) return largest;
  const uint4* body = reinterpret_cast<const uint4*>(data + head) + first;
  return max_magnitude_bf16x2(largest, piece_magnitudes(body, vectors - first));
}

// The atomic is left out where it would change nothing: `known` is a value out_max has had, and it only grows.
DEVICE void accumulate_block_max(u32 largest, u32* out_max, u32 known) {
  __shared__ u32 warp_max[ABSMAX_WARPS];
  UNROLL for (int offset = 16; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
  if (threadIdx.x % WARP_SIZE == 0) warp_max[threadIdx.x / WARP_SIZE] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  UNROLL for (u32 w = 1; w < ABSMAX_WARPS; w++) largest = max(largest, warp_max[w]);
  if (largest << 16 > known) atomicMax(out_max, largest << 16);
}

DEVICE void accumulate_rows(const bf16_bits* data, float* out_max, u32 num_rows, u32 row_elems,
                            u64 row_stride) {
  u32* out = reinterpret_cast<u32*>(out_max);
  const u32 known = threadIdx.x == 0 ? ptx::load_relaxed(out) : 0;
  const u32 pieces = max(1u, (row_elems / VECTOR + PIECE - 1) / PIECE);  // of a row
  const u64 units = static_cast<u64>(num_rows) * pieces, warps = static_cast<u64>(gridDim.x) * ABSMAX_WARPS;
  u32 magnitudes = 0;
  for (u64 unit = static_cast<u64>(blockIdx.x) * ABSMAX_WARPS + threadIdx.x / WARP_SIZE; unit < units;
       unit += warps) {
    const u64 row = unit >> 32 == 0 ? static_cast<u32>(unit) / pieces : unit / pieces;
    const u32 piece = static_cast<u32>(unit - row * pieces);
    magnitudes = max_magnitude_bf16x2(magnitudes, row_magnitudes(data + row * row_stride, row_elems, piece));
  }
  accumulate_block_max(larger_half(magnitudes), out, known);
}

extern "C" __global__ void __launch_bounds__(256)
    bf16_absmax(const bf16_bits* data, float* out_max, u32 n_elems) {
  accumulate_rows(data, out_max, 1, n_elems, 0);
}

// Rows of row_elems values, row_stride elements apart; what lies between rows is not read.
extern "C" __global__ void __launch_bounds__(256)
    bf16_absmax_rows(const bf16_bits* data, float* out_max, u32 num_rows, u32 row_elems,
                     u64 row_stride) {
  accumulate_rows(data, out_max, num_rows, row_elems, row_stride);
}
