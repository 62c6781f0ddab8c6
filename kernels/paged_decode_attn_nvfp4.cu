// Paged decode attention over an NVFP4 cache: blocks block_stride_bytes apart, each a data section
// [BLOCK_SIZE, num_kv_heads, HEAD_DIM / 2] and, data_section_bytes after its start, E4M3 scales
// [BLOCK_SIZE, num_kv_heads, HEAD_DIM / 16]: one pass, or with SPEC_SPLIT the first step of split-K. The
// other compile-time constants are in ring/spec.cuh.
#include "attention/format_nvfp4.cuh"
#include "ring/splits.cuh"

using Format = Nvfp4Format<SPEC_HEAD_DIM>;
using Spec = RingSpec<Format, Format>;
using Kernel = SplitDecode<Spec>;

#if SPEC_SPLIT
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_splitk_nvfp4(const bf16_bits* q, const u8* k_cache, const u8* v_cache,
                                   float* workspace, const i32* block_tables, const i32* seq_lens,
                                   u32 max_blocks_per_seq, u32 num_q_heads, u32 num_kv_heads,
                                   u32 head_dim, u32 block_size, float inv_sqrt_d, u32 num_splits,
                                   u32 q_stride, u64 block_stride_bytes, u64 data_section_bytes,
                                   u32 num_seqs, u32 sliding_window, u32 num_blocks) {
  Kernel::run({q, q_stride, k_cache, v_cache,
               pool_geometry<Spec, Format>(block_stride_bytes, data_section_bytes), num_blocks,
               block_tables, seq_lens, max_blocks_per_seq, num_seqs, sliding_window, inv_sqrt_d, 1.0f},
              num_splits, nullptr, workspace);
}
#else
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_nvfp4(const bf16_bits* q, const u8* k_cache, const u8* v_cache, bf16_bits* output,
                            const i32* block_tables, const i32* seq_lens, u32 max_blocks_per_seq,
                            u32 num_seqs, u32 num_q_heads, u32 num_kv_heads, u32 head_dim,
                            u32 block_size, float inv_sqrt_d, u32 q_stride, u64 block_stride_bytes,
                            u64 data_section_bytes, u32 sliding_window, u32 num_blocks) {
  Kernel::run({q, q_stride, k_cache, v_cache,
               pool_geometry<Spec, Format>(block_stride_bytes, data_section_bytes), num_blocks,
               block_tables, seq_lens, max_blocks_per_seq, num_seqs, sliding_window, inv_sqrt_d, 1.0f},
              1, output, nullptr);
}
#endif
