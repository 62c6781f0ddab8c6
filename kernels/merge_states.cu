// Merges attention results over disjoint sets of keys. No compile-time constants.
//
// outputs [num_parts, num_rows, head_dim] are normalised, lses F32 [num_parts, num_rows] are natural
// logarithms, a row is one (sequence, query head). With M the largest LSE of a row:
//   weight of part p = e^(lse_p - M),  output = sum(weight_p output_p) / sum(weight_p),  lse = M +
//   ln(sum).
// A part without keys (LSE -inf) is never read: what its output holds cannot matter, not even a NaN.
// A row without keys in any part is 0 with LSE -inf; a NaN LSE makes its row NaN. out and out_lse may be
// one of the parts.
#include "numeric/bf16.cuh"
#include "numeric/f16.cuh"
#include "numeric/f32.cuh"
#include "ptx.cuh"

constexpr u32 MERGE_VECTOR = 4;  // values a lane takes at once

struct Bf16Part {
  using Element = bf16_bits;

  static DEVICE float4 load(const bf16_bits* values) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(values);
    return make_float4(bf16x2_low(pairs.x), bf16x2_high(pairs.x), bf16x2_low(pairs.y),
                       bf16x2_high(pairs.y));
  }
  static DEVICE void store(bf16_bits* values, float4 v) {
    *reinterpret_cast<uint2*>(values) =
        make_uint2(floats_to_bf16x2(v.x, v.y), floats_to_bf16x2(v.z, v.w));
  }
};

struct HalfPart {
  using Element = u16;

  static DEVICE float4 load(const u16* values) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(values);
    return make_float4(f16_to_float(pairs.x & 0xffffu), f16_to_float(pairs.x >> 16),
                       f16_to_float(pairs.y & 0xffffu), f16_to_float(pairs.y >> 16));
  }
  static DEVICE void store(u16* values, float4 v) {
    *reinterpret_cast<uint2*>(values) = make_uint2(ptx::pack_f16x2(v.x, v.y), ptx::pack_f16x2(v.z, v.w));
  }
};

struct FloatPart {
  using Element = float;

  static DEVICE float4 load(const float* values) { return *reinterpret_cast<const float4*>(values); }
  static DEVICE void store(float* values, float4 v) { *reinterpret_cast<float4*>(values) = v; }
};

DEVICE float warp_max(float value) {
  UNROLL for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

DEVICE float warp_sum(float value) {
  UNROLL for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

// One warp a row. All lanes sum in an order that depends on the number of parts alone, so the result is the
// same bits every time.
template <class In, class Out>
DEVICE void merge(const typename In::Element* outputs, const float* lses, typename Out::Element* out,
                  float* out_lse, u32 num_parts, u64 num_rows, u32 head_dim, u64 part_stride,
                  u64 lse_stride) {
  const u32 lane = threadIdx.x % WARP_SIZE;
  const u64 row = static_cast<u64>(blockIdx.x) * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
  if (row >= num_rows) return;

  float largest = negative_infinity();
  for (u32 part = lane; part < num_parts; part += WARP_SIZE)
    largest = fmaxf(largest, lses[part * lse_stride + row]);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (u32 part = lane; part < num_parts; part += WARP_SIZE) {
    const float lse = lses[part * lse_stride + row];
    if (lse != negative_infinity()) sum += expf(lse - largest);
  }
  sum = warp_sum(sum);

  for (u32 dim = lane * MERGE_VECTOR; dim < head_dim; dim += WARP_SIZE * MERGE_VECTOR) {
    // From -0, so that a lone part comes out with its own bits; no part at all gives +0.
    const float start = sum == 0.0f ? 0.0f : -0.0f;
    float4 total = make_float4(start, start, start, start);
    for (u32 part = 0; part < num_parts; part++) {
      const float lse = lses[part * lse_stride + row];
      if (lse == negative_infinity()) continue;
      const float weight = expf(lse - largest);
      const float4 v = In::load(outputs + part * part_stride + row * head_dim + dim);
      total.x = fmaf(weight, v.x, total.x);
      total.y = fmaf(weight, v.y, total.y);
      total.z = fmaf(weight, v.z, total.z);
      total.w = fmaf(weight, v.w, total.w);
    }
    if (sum != 0.0f)
      total = make_float4(total.x / sum, total.y / sum, total.z / sum, total.w / sum);
    Out::store(out + row * head_dim + dim, total);
  }
  __syncwarp();  // every lane has read the LSEs, one of which out_lse may replace
  if (lane == 0 && out_lse != nullptr)
    out_lse[row] = sum == 0.0f ? negative_infinity() : largest + logf(sum);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_states_bf16(const bf16_bits* outputs, const float* lses, bf16_bits* out, float* out_lse,
                      u32 num_parts, u64 num_rows, u32 head_dim, u64 part_stride, u64 lse_stride) {
  merge<Bf16Part, Bf16Part>(outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride,
                            lse_stride);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_states_f32(const float* outputs, const float* lses, float* out, float* out_lse, u32 num_parts,
                     u64 num_rows, u32 head_dim, u64 part_stride, u64 lse_stride) {
  merge<FloatPart, FloatPart>(outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride,
                              lse_stride);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_states_f32_to_bf16(const float* outputs, const float* lses, bf16_bits* out, float* out_lse,
                             u32 num_parts, u64 num_rows, u32 head_dim, u64 part_stride,
                             u64 lse_stride) {
  merge<FloatPart, Bf16Part>(outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride,
                             lse_stride);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_states_f16(const u16* outputs, const float* lses, u16* out, float* out_lse, u32 num_parts,
                     u64 num_rows, u32 head_dim, u64 part_stride, u64 lse_stride) {
  merge<HalfPart, HalfPart>(outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride,
                            lse_stride);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_states_f32_to_f16(const float* outputs, const float* lses, u16* out, float* out_lse,
                            u32 num_parts, u64 num_rows, u32 head_dim, u64 part_stride,
                            u64 lse_stride) {
  merge<FloatPart, HalfPart>(outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride,
                             lse_stride);
}
