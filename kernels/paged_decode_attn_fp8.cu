// Paged decode attention over an FP8 (E4M3) cache [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM] whose
// blocks are cache_stride elements apart: one pass, or with SPEC_SPLIT the first step of split-K. Stored
// K times k_scale and V times v_scale are the real values. The other compile-time constants are in
// ring/spec.cuh.
#include "attention/format_fp8.cuh"
#include "ring/splits.cuh"

using Format = Fp8Format<SPEC_HEAD_DIM>;
using Spec = RingSpec<Format, Format>;
using Kernel = SplitDecode<Spec>;

#if SPEC_SPLIT
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_splitk_fp8(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                 float* workspace, const i32* block_tables, const i32* seq_lens,
                                 u32 max_blocks_per_seq, u32 num_q_heads, u32 num_kv_heads, u32 head_dim,
                                 u32 block_size, float inv_sqrt_d, u32 num_splits, float k_scale,
                                 float v_scale, u32 q_stride, u64 cache_stride, u32 num_seqs,
                                 u32 sliding_window, u32 num_blocks) {
  Kernel::run({q, q_stride, k_cache, v_cache, pool_geometry<Spec, Format>(cache_stride, 0), num_blocks,
               block_tables, seq_lens, max_blocks_per_seq, num_seqs, sliding_window,
               inv_sqrt_d * k_scale, v_scale},
              num_splits, nullptr, workspace);
}
#else
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_fp8(const bf16_bits* q, const u8* k_cache, const u8* v_cache, bf16_bits* output,
                          const i32* block_tables, const i32* seq_lens, u32 max_blocks_per_seq,
                          u32 num_seqs, u32 num_q_heads, u32 num_kv_heads, u32 head_dim, u32 block_size,
                          float inv_sqrt_d, float k_scale, float v_scale, u32 q_stride, u64 cache_stride,
                          u32 sliding_window, u32 num_blocks) {
  Kernel::run({q, q_stride, k_cache, v_cache, pool_geometry<Spec, Format>(cache_stride, 0), num_blocks,
               block_tables, seq_lens, max_blocks_per_seq, num_seqs, sliding_window,
               inv_sqrt_d * k_scale, v_scale},
              1, output, nullptr);
}
#endif
