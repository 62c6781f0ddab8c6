// Writes new tokens into an NVFP4 cache: values are divided by a second-level scale (1 where there is
// none), then for every 16 of them there is a scale E4M3(absmax / 6) and codes E2M1(x / decoded scale).
// Compile-time constants: SPEC_HEAD_DIM, SPEC_BLOCK_SIZE.
//
// All divisions are true ones, in effect. A float's quotient by 6 or by an E4M3 scale rounds to a tie of
// E4M3 or E2M1 only where it is one exactly, and lies beyond it only where the float lies beyond the tie
// times the divisor, which has at most 7 significant bits. So a quotient by the second level may be
// replaced by a BF16 number on the same side of all those.
#include "cache/write.cuh"
#include "numeric/division.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"

// pairs / scale as BF16 numbers on the same side of every number of up to 7 significant bits.
DEVICE void divide_by_second_level(u32 (&pairs)[8], float second_level) {
  const Divisor scale = Divisor::of(without_extremes(pairs, second_level));
  UNROLL for (int i = 0; i < 8; i++) {
    const u32 limited = scale.limited(pairs[i]);
    pairs[i] = signed_odd_pair(scale.quotient(bf16x2_low(limited)), scale.quotient(bf16x2_high(limited)),
                               pairs[i]);
  }
}

// E4M3(absmax / 6). The rounded reciprocal gives the same codes: no product with one of the 32,768
// magnitudes of BF16 rounds to another code than the quotient.
DEVICE u32 group_scale(const u32 (&pairs)[8]) {
  u32 magnitudes = pairs[0];
  UNROLL for (int i = 1; i < 8; i++) magnitudes = max_magnitude_bf16x2(magnitudes, pairs[i]);
  const float largest = bf16_to_float(larger_half(magnitudes));
  return floats_to_e4m3x4(__fmul_rn(largest, 1.0f / E2M1_MAX), 0.0f, 0.0f, 0.0f);
}

struct Nvfp4Store {
  static constexpr int VALUES = SCALE_GROUP;
  static constexpr int DATA_BYTES = VALUES / 2;
  WriteScale write_scale;

  DEVICE void store(u32 (&pairs)[8], u32 head, u8* data, u8* scales) const {
    const float second_level = write_scale.of(head);
    if (second_level != 1.0f) divide_by_second_level(pairs, second_level);
    const u32 scale_code = group_scale(pairs);
    const float scale = e4m3_to_float(scale_code);
    const float factor = ptx::reciprocal_approx(scale * E2M1_DECODE_SHIFT);
    u32 words[2];
    UNROLL for (int i = 0; i < 2; i++) {
      const u32 eight[4] = {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
      // Neither a zero scale nor a NaN has codes.
      words[i] = scale > 0.0f ? bf16x8_to_e2m1(eight, factor) : 0;
    }
    *reinterpret_cast<uint2*>(data) = make_uint2(words[0], words[1]);
    *scales = static_cast<u8>(scale_code);
  }
};

extern "C" __global__ void __launch_bounds__(256)
    reshape_and_cache_nvfp4(const bf16_bits* key, const bf16_bits* value, u8* k_cache, u8* v_cache,
                            const i64* slot_mapping, u32 num_tokens, u32 num_kv_heads, u32 head_dim,
                            u32 block_size, u32 key_stride, u32 value_stride, u64 block_stride_bytes,
                            u64 data_section_bytes, float k_scale, float v_scale, const float* k_scales,
                            const float* v_scales, u32 heads_first, u64 num_slots) {
  write_tokens<Nvfp4Store, SPEC_HEAD_DIM, SPEC_BLOCK_SIZE>(
      {key, value, k_cache, v_cache, slot_mapping, num_tokens, num_kv_heads, key_stride, value_stride,
       num_slots, block_stride_bytes, data_section_bytes, heads_first != 0},
      Nvfp4Store{{k_scale, k_scales}}, Nvfp4Store{{v_scale, v_scales}});
}
