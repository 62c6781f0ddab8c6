// Streaming decode over BF16 tiles: the step that folds a tile into (m, l, o); and for all formats,
// merging partial states and the finalisation. Compile-time constants: SPEC_HEAD_DIM; for the step also
// SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS, SPEC_WARP_TILES, SPEC_BLOCKS_PER_SM (with them, it
// is compiled alone).
#include "attention/format_bf16.cuh"
#include "attention/tiled.cuh"

#ifdef SPEC_GQA_RATIO
using Kernel = Tiled<Bf16Format<SPEC_HEAD_DIM>, SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE,
                     SPEC_TOKEN_WARPS, SPEC_WARP_TILES>;

// Strides are in elements, so that one kernel reads a paged cache and a scratch pool
// [slot, K or V, kv_head, block_size, head_dim] alike.
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, SPEC_BLOCKS_PER_SM)
    paged_decode_attn_tiled(const bf16_bits* q, const u8* k_pool, const u8* v_pool,
                            const i32* tile_blocks, const i32* tile_block_counts, float* m_state,
                            float* l_state, float* o_state, u32 num_seqs, u32 num_q_heads,
                            u32 num_kv_heads, u32 head_dim, u32 block_size, u32 tile_capacity,
                            u32 gqa_ratio, i64 blk_stride, i64 tok_stride, i64 kvh_stride,
                            i32 last_block_valid_slots, float inv_sqrt_d,
                            const i32* last_block_valid_slots_per_seq, u32 num_blocks, u32 num_splits) {
  const PoolGeometry geometry = {2u * static_cast<u64>(blk_stride),
                                 2u * static_cast<u64>(tok_stride),
                                 2u * static_cast<u64>(kvh_stride),
                                 0,
                                 0,
                                 0};
  Kernel::step({q, k_pool, v_pool, tile_blocks, tile_block_counts, m_state, l_state, o_state,
                num_q_heads, tile_capacity, num_blocks, num_splits, last_block_valid_slots,
                last_block_valid_slots_per_seq, inv_sqrt_d, 1.0f, geometry});
}
#else
extern "C" __global__ void attention_merge_states(const float* m_parts, const float* l_parts,
                                                  const float* o_parts, float* m_out, float* l_out,
                                                  float* o_out, u32 num_seqs, u32 num_q_heads,
                                                  u32 head_dim, u32 num_parts, u64 seq_stride,
                                                  u64 part_stride) {
  merge_states<SPEC_HEAD_DIM>(m_parts, l_parts, o_parts, m_out, l_out, o_out, num_q_heads, num_parts,
                              seq_stride, part_stride);
}

extern "C" __global__ void attention_finalize(const float* l_state, const float* o_state,
                                              bf16_bits* output, u32 num_seqs, u32 num_q_heads,
                                              u32 head_dim) {
  finalize<SPEC_HEAD_DIM>(l_state, o_state, output, num_q_heads);
}
#endif
