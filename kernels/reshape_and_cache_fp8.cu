// Writes new tokens into an FP8 (E4M3) cache, as E4M3(x / scale), one scale for the tensor or for each
// head. Compile-time constants: SPEC_HEAD_DIM, SPEC_BLOCK_SIZE.
//
// The division is a true one: multiplying by 1 / scale lands on the other side of some ties. A tie of
// E4M3 has 5 significant bits.
#include "cache/write.cuh"
#include "numeric/division.cuh"
#include "numeric/e4m3.cuh"

struct Fp8Store {
  static constexpr int VALUES = 16;
  static constexpr int DATA_BYTES = VALUES;
  WriteScale write_scale;

  DEVICE void store(u32 (&pairs)[8], u32 head, u8* data, u8*) const {
    const Divisor scale = Divisor::of(without_extremes(pairs, write_scale.of(head)));
    u32 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const u32 first = scale.limited(pairs[2 * i]), second = scale.limited(pairs[2 * i + 1]);
      const u32 codes = floats_to_e4m3x4(
          scale.quotient(bf16x2_low(first)), scale.quotient(bf16x2_high(first)),
          scale.quotient(bf16x2_low(second)), scale.quotient(bf16x2_high(second)));
      // The sign is the value's own: that of a zero or NaN quotient is arbitrary.
      const u32 signs = ptx::prmt(pairs[2 * i], pairs[2 * i + 1], 0x7531u);
      words[i] = ptx::bit_select(signs, codes, 0x80808080u);
    }
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
       num_slots, cache_stride, 0, heads_first != 0},
      Fp8Store{{k_scale, k_scales}}, Fp8Store{{v_scale, v_scales}});
}
