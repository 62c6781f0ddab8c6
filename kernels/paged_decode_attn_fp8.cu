// Paged decode attention over an FP8 (E4M3) cache [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM] whose
// blocks are cache_stride elements apart. Stored K times k_scale and V times v_scale are the real
// values. Compile-time constants: SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS.
#include "attention/decode.cuh"
#include "attention/format_fp8.cuh"

using Kernel =
    Decode<Fp8Format<SPEC_HEAD_DIM>, SPEC_HEAD_DIM, SPEC_GQA_RATIO, SPEC_BLOCK_SIZE, SPEC_TOKEN_WARPS>;

static DEVICE PoolGeometry pool_geometry(u64 cache_stride, u32 num_kv_heads) {
  return plain_geometry(cache_stride, num_kv_heads, Fp8Format<SPEC_HEAD_DIM>::ROW_BYTES);
}

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, 1)
    paged_decode_attn_fp8(const bf16_bits* q, const u8* k_cache, const u8* v_cache, bf16_bits* output,
                          const i32* block_tables, const i32* seq_lens, u32 max_blocks_per_seq,
                          u32 num_seqs, u32 num_q_heads, u32 num_kv_heads, u32 head_dim, u32 block_size,
                          float inv_sqrt_d, float k_scale, float v_scale, u32 q_stride, u64 cache_stride,
                          u32 sliding_window, u32 num_blocks) {
  Kernel::single_pass({q, k_cache, v_cache, block_tables, seq_lens, max_blocks_per_seq, num_q_heads,
                       num_kv_heads, q_stride, sliding_window, num_blocks, inv_sqrt_d * k_scale, v_scale,
                       pool_geometry(cache_stride, num_kv_heads)},
                      output);
}

extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, 1)
    paged_decode_attn_splitk_fp8(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                 float* workspace, const i32* block_tables, const i32* seq_lens,
                                 u32 max_blocks_per_seq, u32 num_q_heads, u32 num_kv_heads, u32 head_dim,
                                 u32 block_size, float inv_sqrt_d, u32 num_splits, float k_scale,
                                 float v_scale, u32 q_stride, u64 cache_stride, u32 num_seqs,
                                 u32 sliding_window, u32 num_blocks) {
  Kernel::split({q, k_cache, v_cache, block_tables, seq_lens, max_blocks_per_seq, num_q_heads,
                 num_kv_heads, q_stride, sliding_window, num_blocks, inv_sqrt_d * k_scale, v_scale,
                 pool_geometry(cache_stride, num_kv_heads)},
                workspace, num_splits);
}
