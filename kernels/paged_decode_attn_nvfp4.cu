// Paged decode attention over an NVFP4 cache: blocks block_stride_bytes apart, each a data section
// [BLOCK_SIZE, num_kv_heads, HEAD_DIM / 2] and, data_section_bytes after its start, E4M3 scales
// [BLOCK_SIZE, num_kv_heads, HEAD_DIM / 16].
// Compile-time constants: SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS.
#include "attention/decode.cuh"
#include "attention/format_nvfp4.cuh"

using Kernel =
    Decode<Nvfp4Format<SPEC_HEAD_DIM>, SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS>;

static DEVICE PoolGeometry pool_geometry(u64 block_stride_bytes, u64 data_section_bytes,
                                         u32 num_kv_heads) {
  return sectioned_geometry(block_stride_bytes, data_section_bytes, num_kv_heads,
                            Nvfp4Format<SPEC_HEAD_DIM>::ROW_BYTES,
                            Nvfp4Format<SPEC_HEAD_DIM>::SCALE_BYTES);
}

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, 1)
    paged_decode_attn_nvfp4(const bf16_bits* q, const u8* k_cache, const u8* v_cache, bf16_bits* output,
                            const i32* block_tables, const i32* seq_lens, u32 max_blocks_per_seq,
                            u32 num_seqs, u32 num_q_heads, u32 num_kv_heads, u32 head_dim,
                            u32 block_size, float inv_sqrt_d, u32 q_stride, u64 block_stride_bytes,
                            u64 data_section_bytes, u32 sliding_window, u32 num_blocks) {
  Kernel::single_pass({q, k_cache, v_cache, block_tables, seq_lens, max_blocks_per_seq, num_q_heads,
                       num_kv_heads, q_stride, sliding_window, num_blocks, inv_sqrt_d, 1.0f,
                       pool_geometry(block_stride_bytes, data_section_bytes, num_kv_heads)},
                      output);
}

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, 1)
    paged_decode_attn_splitk_nvfp4(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                   float* workspace, const i32* block_tables, const i32* seq_lens,
                                   u32 max_blocks_per_seq, u32 num_q_heads, u32 num_kv_heads,
                                   u32 head_dim, u32 block_size, float inv_sqrt_d, u32 num_splits,
                                   u32 q_stride, u64 block_stride_bytes, u64 data_section_bytes,
                                   u32 num_seqs, u32 sliding_window, u32 num_blocks) {
  Kernel::split({q, k_cache, v_cache, block_tables, seq_lens, max_blocks_per_seq, num_q_heads,
                 num_kv_heads, q_stride, sliding_window, num_blocks, inv_sqrt_d, 1.0f,
                 pool_geometry(block_stride_bytes, data_section_bytes, num_kv_heads)},
                workspace, num_splits);
}
