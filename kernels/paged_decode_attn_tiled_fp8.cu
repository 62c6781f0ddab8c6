// Streaming decode over FP8 (E4M3) tiles: the step that folds a tile into (m, l, o). Stored K times
// k_scale and V times v_scale are the real values; o is in real units. Compile-time constants:
// SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS, SPEC_WARP_TILES,
// SPEC_BLOCKS_PER_SM.
#include "attention/format_fp8.cuh"
#include "attention/tiled.cuh"

using Format = Fp8Format<SPEC_HEAD_DIM>;
using Kernel =
    Tiled<Format, SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS, SPEC_WARP_TILES>;

// Strides are in elements, as those of paged_decode_attn_tiled.
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, SPEC_BLOCKS_PER_SM)
    paged_decode_attn_tiled_fp8(const bf16_bits* q, const u8* k_pool, const u8* v_pool,
                                const i32* tile_blocks, const i32* tile_block_counts, float* m_state,
                                float* l_state, float* o_state, u32 num_seqs, u32 num_q_heads,
                                u32 num_kv_heads, u32 head_dim, u32 block_size, u32 tile_capacity,
                                u32 gqa_ratio, i64 blk_stride, i64 tok_stride, i64 kvh_stride,
                                float k_scale, float v_scale, i32 last_block_valid_slots,
                                float inv_sqrt_d, const i32* last_block_valid_slots_per_seq,
                                u32 num_blocks, u32 num_splits) {
  const PoolGeometry geometry = {
      static_cast<u64>(blk_stride), static_cast<u64>(tok_stride), static_cast<u64>(kvh_stride), 0, 0, 0};
  Kernel::step({q, k_pool, v_pool, tile_blocks, tile_block_counts, m_state, l_state, o_state,
                num_q_heads, tile_capacity, num_blocks, num_splits, last_block_valid_slots,
                last_block_valid_slots_per_seq, inv_sqrt_d * k_scale, v_scale, geometry});
}
