// Decode as `Decoder` runs it: any pair of cache formats, query tokens, sinks, soft cap and scales; see
// kernels/ring. SPEC_ENTRY chooses what is compiled: 0 paged_decode_attn_planned, a persistent grid that
// plans on the device and merges what its blocks share; 1 paged_decode_attn_chunked, pieces of fixed
// size whose states 2, paged_decode_attn_merge_chunks, then merges; 3 paged_decode_attn_plan, the plan
// of more sequences than fit in shared memory (SPEC_MANY). The other compile-time constants are in
// ring/spec.cuh.
#include "attention/formats.cuh"
#include "ring/planned.cuh"
#include "ring/splits.cuh"

using KeyFormat = FormatOf<SPEC_KEY_FORMAT, SPEC_HEAD_DIM>::type;
using ValueFormat = FormatOf<SPEC_VALUE_FORMAT, SPEC_HEAD_DIM>::type;
using Spec = RingSpec<KeyFormat, ValueFormat>;
constexpr u32 NEWER_TOKENS = Spec::CAUSAL ? Spec::QUERY_TOKENS - 1 : 0;

#if SPEC_ENTRY == 0
using Kernel = PlannedDecode<Spec, SPEC_MANY != 0>;

// Strides of caches and scale sections in bytes; q_stride in elements; score_scale is the softmax scale
// times k_scale.
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_planned(const i32* seq_lens, const i32* block_tables, const u8* k_cache,
                              const u8* v_cache, u64 k_block_stride, u64 v_block_stride,
                              u64 k_scale_section, u64 v_scale_section, const u16* q, u64 q_stride,
                              u32 table_stride, u32 max_blocks_per_seq, u32 num_seqs, u32 num_blocks,
                              u32 sliding_window, float score_scale, float v_scale, float soft_cap,
                              u16* output, float* lse, float* part_o, float2* part_state, u32* counters,
                              const u32* plan, const float* k_scales, const float* v_scales,
                              const float* sinks) {
  Kernel::run({{q,
                q_stride,
                k_scales,
                sinks,
                {score_scale, soft_cap},
                {k_cache, v_cache, block_tables, table_stride, num_blocks,
                 pool_geometry<Spec, KeyFormat>(k_block_stride, k_scale_section),
                 pool_geometry<Spec, ValueFormat>(v_block_stride, v_scale_section)}},
               {seq_lens, num_seqs, sliding_window, max_blocks_per_seq, Spec::BLOCK_SIZE, NEWER_TOKENS},
               {output, lse, v_scale * ValueFormat::OPERAND_SHIFT, v_scales},
               {part_o, part_state},
               counters,
               plan});
}
#elif SPEC_ENTRY == 1
using Kernel = SplitDecode<Spec>;

// states F32 [num_seqs, query_tokens, num_q_heads, max_chunks, HEAD_DIM + 2].
extern "C" __global__ void __launch_bounds__(Kernel::Shape::THREADS, Spec::BLOCKS_PER_SM)
    paged_decode_attn_chunked(const u16* q, const u8* k_cache, const u8* v_cache, float* states,
                              const i32* block_tables, const i32* seq_lens, const float* k_scales,
                              const float* v_scales, const float* sinks, u64 q_stride,
                              u64 k_block_stride, u64 v_block_stride, u64 k_scale_section,
                              u64 v_scale_section, u32 table_stride, u32 max_blocks_per_seq,
                              u32 num_seqs, u32 num_blocks, u32 sliding_window, u32 max_chunks,
                              u32 chunk_tiles, float score_scale, float v_scale, float soft_cap) {
  Kernel::run({q,
               q_stride,
               k_scales,
               sinks,
               {score_scale, soft_cap},
               {k_cache, v_cache, block_tables, table_stride, num_blocks,
                pool_geometry<Spec, KeyFormat>(k_block_stride, k_scale_section),
                pool_geometry<Spec, ValueFormat>(v_block_stride, v_scale_section)}},
              {{seq_lens, num_seqs, sliding_window, max_blocks_per_seq, Spec::BLOCK_SIZE, NEWER_TOKENS},
               max_chunks,
               chunk_tiles},
              {nullptr, nullptr, v_scale * ValueFormat::OPERAND_SHIFT, v_scales}, states);
}
#elif SPEC_ENTRY == 2
extern "C" __global__ void __launch_bounds__(32)
    paged_decode_attn_merge_chunks(const float* states, u16* output, float* lse, const i32* seq_lens,
                                   const float* sinks, u32 max_blocks_per_seq, u32 num_seqs,
                                   u32 sliding_window, u32 max_chunks, u32 chunk_tiles) {
  merge_chunks<Spec>(
      states, {seq_lens, num_seqs, sliding_window, max_blocks_per_seq, Spec::BLOCK_SIZE, NEWER_TOKENS},
      sinks, {output, lse, 1.0f, nullptr}, max_chunks, chunk_tiles);
}
#else
constexpr int PLAN_WARPS = 32;

// plan u32 [2 * num_seqs + 1]: where each sequence begins, then its length. One block.
extern "C" __global__ void __launch_bounds__(32 * PLAN_WARPS)
    paged_decode_attn_plan(u32* plan, const i32* seq_lens, u32 max_blocks_per_seq, u32 num_seqs,
                           u32 sliding_window) {
  const Lengths lengths = {seq_lens,           num_seqs,         sliding_window,
                           max_blocks_per_seq, Spec::BLOCK_SIZE, NEWER_TOKENS};
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  scan_many_sequences<PLAN_WARPS>(lengths, Spec::SEQUENCE_COST, plan, plan + num_seqs + 1);
}
#endif
