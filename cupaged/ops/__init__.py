"""The launchers: one thin function for each kernel, one line for each of its parameters.

``gpu`` and ``kernel`` come first in all of them, ``stream`` is the last positional argument. Scalars are
ints and floats; pointers are ints, `cupaged.DevicePtr` or arrays that live on the backend.
"""

from cupaged.ops.absmax import bf16_absmax, bf16_absmax_rows
from cupaged.ops.blocks import copy_cache_blocks, gather_tokens_bf16, gather_tokens_f32
from cupaged.ops.cache_write import reshape_and_cache_bf16, reshape_and_cache_fp8, reshape_and_cache_nvfp4
from cupaged.ops.decode import paged_decode_attn_bf16, paged_decode_attn_fp8, paged_decode_attn_nvfp4
from cupaged.ops.merge import (
    merge_states_bf16,
    merge_states_f16,
    merge_states_f32,
    merge_states_f32_to_bf16,
    merge_states_f32_to_f16,
)
from cupaged.ops.splitk import (
    paged_decode_attn_reduce_fp8,
    paged_decode_attn_reduce_nvfp4,
    paged_decode_attn_splitk_bf16,
    paged_decode_attn_splitk_fp8,
    paged_decode_attn_splitk_nvfp4,
)
from cupaged.ops.states import attention_finalize, attention_merge_states
from cupaged.ops.tiled import (
    paged_decode_attn_tiled,
    paged_decode_attn_tiled_fp8,
    paged_decode_attn_tiled_nvfp4,
)

__all__ = [
    "attention_finalize",
    "attention_merge_states",
    "bf16_absmax",
    "bf16_absmax_rows",
    "copy_cache_blocks",
    "gather_tokens_bf16",
    "gather_tokens_f32",
    "merge_states_bf16",
    "merge_states_f16",
    "merge_states_f32",
    "merge_states_f32_to_bf16",
    "merge_states_f32_to_f16",
    "paged_decode_attn_bf16",
    "paged_decode_attn_fp8",
    "paged_decode_attn_nvfp4",
    "paged_decode_attn_reduce_fp8",
    "paged_decode_attn_reduce_nvfp4",
    "paged_decode_attn_splitk_bf16",
    "paged_decode_attn_splitk_fp8",
    "paged_decode_attn_splitk_nvfp4",
    "paged_decode_attn_tiled",
    "paged_decode_attn_tiled_fp8",
    "paged_decode_attn_tiled_nvfp4",
    "reshape_and_cache_bf16",
    "reshape_and_cache_fp8",
    "reshape_and_cache_nvfp4",
]
