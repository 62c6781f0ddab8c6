// Decode over an NVFP4 cache, blocks block_stride_bytes apart, scales data_section_bytes into each, by a
// persistent grid that plans on the device: see kernels/ring. Compile-time constants: SPEC_HEAD_DIM,
// SPEC_GQA_RATIO, SPEC_NUM_KV_HEADS, SPEC_BLOCK_SIZE, SPEC_JOINED, and the block's shape
// SPEC_STAGE_TILES, SPEC_STAGES, SPEC_TOKEN_WARPS, SPEC_BLOCKS_PER_SM, SPEC_FILL_DELAY,
// SPEC_SEQUENCE_COST.
#include "attention/format_nvfp4.cuh"
#include "ring/decode.cuh"

using Format = Nvfp4Format<SPEC_HEAD_DIM>;
using Kernel = RingDecode<Format, SPEC_HEAD_DIM, SPEC_NUM_KV_HEADS, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE,
                          SPEC_STAGE_TILES, SPEC_STAGES, SPEC_TOKEN_WARPS, SPEC_JOINED != 0,
                          SPEC_FILL_DELAY, SPEC_SEQUENCE_COST>;

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, SPEC_BLOCKS_PER_SM)
    paged_decode_attn_planned_nvfp4(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                    bf16_bits* output, float* lse, float* part_o, float2* part_state,
                                    u32* counters, const i32* block_tables, const i32* seq_lens,
                                    u32 max_blocks_per_seq, u32 num_seqs, u32 num_q_heads,
                                    u32 num_kv_heads, u32 head_dim, u32 block_size, float inv_sqrt_d,
                                    u64 q_stride, u64 block_stride_bytes, u64 data_section_bytes,
                                    u32 sliding_window, u32 num_blocks) {
  const PoolGeometry geometry = sectioned_geometry(
      block_stride_bytes, data_section_bytes, SPEC_NUM_KV_HEADS, Format::ROW_BYTES, Format::SCALE_BYTES);
  Kernel::run({q,
               q_stride,
               inv_sqrt_d,
               {seq_lens, num_seqs, sliding_window, max_blocks_per_seq, SPEC_BLOCK_SIZE},
               {k_cache, v_cache, block_tables, max_blocks_per_seq, num_blocks, geometry},
               {output, lse, Format::OPERAND_SHIFT},
               {part_o, part_state},
               counters});
}
