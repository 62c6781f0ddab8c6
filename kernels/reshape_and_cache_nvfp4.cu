// Writes new tokens into an NVFP4 cache: values are divided by a second-level scale (1 where there is
// none), then for every 16 of them there is a scale E4M3(absmax / 6) and codes E2M1(x / decoded scale).
// Compile-time constants: SPEC_HEAD_DIM, SPEC_BLOCK_SIZE.
#include "cache/write.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"

// value / scale, without a division where the scale is 1, as it is without a second level.
DEVICE float second_level_quotient(float value, float scale) {
  return scale == 1.0f ? value : __fdiv_rn(value, scale);
}

struct Nvfp4Store {
  static constexpr int DATA_BYTES = WRITE_GROUP / 2;

  WriteScale write_scale;

  DEVICE void store(const u32 (&pairs)[8], u32 head, u8* data, u8* scales) const {
    const float second_level = write_scale.of(head);
    u32 magnitude = 0;  // as BF16 bit patterns: a NaN is larger than everything
    UNROLL for (int i = 0; i < 8; i++)
      magnitude = max(magnitude, max(pairs[i] & 0x7fffu, (pairs[i] >> 16) & 0x7fffu));
    const float largest = second_level_quotient(bf16_to_float(magnitude), second_level);
    const u32 scale_code = float_to_e4m3(__fdiv_rn(largest, E2M1_MAX));
    const float scale = e4m3_to_float(scale_code);

    u32 words[2] = {0, 0};
    if (scale > 0.0f) {  // neither a zero scale nor a NaN has codes
      UNROLL for (int i = 0; i < WRITE_GROUP; i++) {
        const float value = second_level_quotient(group_value(pairs, i), second_level);
        words[i / 8] |= float_to_e2m1(__fdiv_rn(value, scale)) << (4 * (i % 8));
      }
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
       num_slots,
       write_geometry(block_stride_bytes, data_section_bytes, num_kv_heads, SPEC_BLOCK_SIZE,
                      SPEC_HEAD_DIM / 2, SPEC_HEAD_DIM / 16, heads_first != 0)},
      Nvfp4Store{{k_scale, k_scales}}, Nvfp4Store{{v_scale, v_scales}});
}
