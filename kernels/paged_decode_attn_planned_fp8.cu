// Decode over an FP8 (E4M3) cache, blocks cache_stride elements apart, by a persistent grid that plans
// on the device: see kernels/ring. Compile-time constants: SPEC_HEAD_DIM, SPEC_GQA_RATIO,
// SPEC_NUM_KV_HEADS, SPEC_BLOCK_SIZE, and the block's shape SPEC_STAGE_TILES, SPEC_STAGES,
// SPEC_TOKEN_WARPS, SPEC_BLOCKS_PER_SM, SPEC_FILL_DELAY, SPEC_SEQUENCE_COST.
#include "attention/format_fp8.cuh"
#include "ring/decode.cuh"

using Format = Fp8Format<SPEC_HEAD_DIM>;
using Kernel = RingDecode<Format, SPEC_HEAD_DIM, SPEC_NUM_KV_HEADS, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE,
                          SPEC_STAGE_TILES, SPEC_STAGES, SPEC_TOKEN_WARPS, false, SPEC_FILL_DELAY,
                          SPEC_SEQUENCE_COST>;

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, SPEC_BLOCKS_PER_SM)
    paged_decode_attn_planned_fp8(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                  bf16_bits* output, float* lse, float* part_o, float2* part_state,
                                  u32* counters, const i32* block_tables, const i32* seq_lens,
                                  u32 max_blocks_per_seq, u32 num_seqs, u32 num_q_heads,
                                  u32 num_kv_heads, u32 head_dim, u32 block_size, float inv_sqrt_d,
                                  float k_scale, float v_scale, u64 q_stride, u64 cache_stride,
                                  u32 sliding_window, u32 num_blocks) {
  const PoolGeometry geometry = plain_geometry(cache_stride, SPEC_NUM_KV_HEADS, Format::ROW_BYTES);
  Kernel::run({q,
               q_stride,
               inv_sqrt_d * k_scale,
               {seq_lens, num_seqs, sliding_window, max_blocks_per_seq, SPEC_BLOCK_SIZE},
               {k_cache, v_cache, block_tables, max_blocks_per_seq, num_blocks, geometry},
               {output, lse, v_scale * Format::OPERAND_SHIFT},
               {part_o, part_state},
               counters});
}
