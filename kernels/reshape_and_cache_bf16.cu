// Writes new tokens into a BF16 cache. Compile-time constants: SPEC_HEAD_DIM, SPEC_BLOCK_SIZE.
#include "cache/write.cuh"

struct Bf16Store {
  static constexpr int VALUES = 8;
  static constexpr int DATA_BYTES = 2 * VALUES;

  DEVICE void store(const u32 (&pairs)[4], u32, u8* data, u8*) const {
    *reinterpret_cast<uint4*>(data) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

extern "C" __global__ void __launch_bounds__(256)
    reshape_and_cache_bf16(const bf16_bits* key, const bf16_bits* value, u8* k_cache, u8* v_cache,
                           const i64* slot_mapping, u32 num_tokens, u32 num_kv_heads, u32 head_dim,
                           u32 block_size, u32 key_stride, u32 value_stride, u64 cache_stride,
                           u32 heads_first, u64 num_slots) {
  write_tokens<Bf16Store, SPEC_HEAD_DIM, SPEC_BLOCK_SIZE>(
      {key, value, k_cache, v_cache, slot_mapping, num_tokens, num_kv_heads, key_stride, value_stride,
       num_slots, 2 * cache_stride, 0, heads_first != 0},
      Bf16Store{}, Bf16Store{});
}
