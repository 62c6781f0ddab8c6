// Writes new tokens into an FP8 (E4M3) cache, as E4M3(x / scale), one scale for the tensor or for each
// head. Compile-time constants: SPEC_HEAD_DIM, SPEC_BLOCK_SIZE.
#include "cache/write.cuh"
#include "numeric/e4m3.cuh"

struct Fp8Store {
  static constexpr int DATA_BYTES = WRITE_GROUP;
  WriteScale write_scale;

  DEVICE void store(const u32 (&pairs)[8], u32 head, u8* data, u8*) const {
    const float scale = write_scale.of(head);
    u32 words[4] = {0, 0, 0, 0};
    UNROLL for (int i = 0; i < WRITE_GROUP; i++)
      words[i / 4] |= quantize_e4m3(group_value(pairs, i), scale) << (8 * (i % 4));
    *reinterpret_cast<uint4*>(data) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

extern "C" __global__ void __launch_bounds__(256)
    reshape_and_cache_fp8(const bf16_bits* key, const bf16_bits* value, u8* k_cache, u8* v_cache,
                          const i64* slot_mapping, u32 num_tokens, u32 num_kv_heads, u32 head_dim,
                          u32 block_size, float k_scale, float v_scale, u32 key_stride,
                          u32 value_stride, u64 cache_stride, const float* k_scales,
                          const float* v_scales, u32 heads_first, u64 num_slots) {
  write_tokens<Fp8Store, SPEC_HEAD_DIM, SPEC_BLOCK_SIZE>(
      {key, value, k_cache, v_cache, slot_mapping, num_tokens, num_kv_heads, key_stride, value_stride,
       num_slots, write_geometry(cache_stride, 0, num_kv_heads, SPEC_BLOCK_SIZE, SPEC_HEAD_DIM, 0, heads_first != 0)},
      Fp8Store{{k_scale, k_scales}}, Fp8Store{{v_scale, v_scales}});
}
