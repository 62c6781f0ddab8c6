// Second step of split-K decode. Compile-time constant: SPEC_HEAD_DIM.
//
// There is one workspace format, so both entries do the same; each keeps the name that callers of its
// format's split-K kernel look for (`fp8` serves BF16 too). An empty sequence has only empty splits,
// which merge to a zero row: seq_lens is part of the contract but not read.
#include "attention/reduce.cuh"

extern "C" __global__ void __launch_bounds__(32)
    paged_decode_attn_reduce_fp8(const float* workspace, bf16_bits* output, const i32* seq_lens,
                                 u32 num_q_heads, u32 head_dim, u32 num_splits, u32 num_seqs) {
  reduce_splits<SPEC_HEAD_DIM>(workspace, output, num_q_heads, num_splits);
}

extern "C" __global__ void __launch_bounds__(32)
    paged_decode_attn_reduce_nvfp4(const float* workspace, bf16_bits* output, const i32* seq_lens,
                                   u32 num_q_heads, u32 head_dim, u32 num_splits, u32 num_seqs) {
  reduce_splits<SPEC_HEAD_DIM>(workspace, output, num_q_heads, num_splits);
}
