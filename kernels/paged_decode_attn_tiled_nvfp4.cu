// Streaming decode over NVFP4 tiles: the step that folds a tile into (m, l, o). Blocks as in
// paged_decode_attn_nvfp4. Compile-time constants: SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE,
// SPEC_TOKEN_WARPS, SPEC_WARP_TILES, SPEC_BLOCKS_PER_SM.
#include "attention/format_nvfp4.cuh"
#include "attention/tiled.cuh"

using Format = Nvfp4Format<SPEC_HEAD_DIM>;
using Kernel =
    Tiled<Format, SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS, SPEC_WARP_TILES>;

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, SPEC_BLOCKS_PER_SM)
    paged_decode_attn_tiled_nvfp4(const bf16_bits* q, const u8* k_pool, const u8* v_pool,
                                  const i32* tile_blocks, const i32* tile_block_counts, float* m_state,
                                  float* l_state, float* o_state, u32 num_seqs, u32 num_q_heads,
                                  u32 num_kv_heads, u32 head_dim, u32 block_size, u32 tile_capacity,
                                  u32 gqa_ratio, u64 block_stride_bytes, u64 data_section_bytes,
                                  i32 last_block_valid_slots, float inv_sqrt_d,
                                  const i32* last_block_valid_slots_per_seq, u32 num_blocks,
                                  u32 num_splits) {
  const PoolGeometry geometry = sectioned_geometry(block_stride_bytes, data_section_bytes, num_kv_heads,
                                                   Format::ROW_BYTES, Format::SCALE_BYTES);
  Kernel::step({q, k_pool, v_pool, tile_blocks, tile_block_counts, m_state, l_state, o_state,
                num_q_heads, tile_capacity, num_blocks, num_splits, last_block_valid_slots,
                last_block_valid_slots_per_seq, inv_sqrt_d, 1.0f, geometry});
}
