"""Launches of the kernels that stand under `cupaged.decode.Decoder`, which checks what they are given.

Sources: ``kernels/paged_decode_attn_planned.cu``. Each handle pins every compile-time constant. Strides of
caches and scale sections are in bytes; q_stride is in elements, between query tokens; score_scale is the
softmax scale times k_scale; a pointer of 0 leaves that argument out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


class Inputs(NamedTuple):
    """What every decode kernel of a `Decoder` reads.

    Attributes:
        q: ``[num_seqs, query_tokens, num_q_heads, head_dim]``.
        k_cache, v_cache: pools.
        block_tables: int32, rows table_stride entries apart.
        seq_lens: int32 ``[num_seqs]``.
        k_scales, v_scales: F32 ``[num_kv_heads]`` on top of score_scale and v_scale.
        others: scalars.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    block_tables: Any
    seq_lens: Any
    k_scales: Any
    v_scales: Any
    q_stride: int
    k_block_stride: int
    v_block_stride: int
    k_scale_section: int
    v_scale_section: int
    table_stride: int
    max_blocks_per_seq: int
    num_seqs: int
    num_blocks: int
    sliding_window: int
    score_scale: float
    v_scale: float
    soft_cap: float


def paged_decode_attn_planned(
    gpu: GpuBackend,
    kernel: KernelHandle,
    inputs: Inputs,
    output: Any,
    lse: Any,
    part_o: Any,
    part_state: Any,
    counters: Any,
    plan: Any,
    sinks: Any,
    stream: Any,
) -> None:
    """Decode into output and lse; part_o, part_state and counters are the workspace."""
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(inputs.seq_lens)
        .arg_ptr(inputs.block_tables)
        .arg_ptr(inputs.k_cache)
        .arg_ptr(inputs.v_cache)
        .arg_u64(inputs.k_block_stride)
        .arg_u64(inputs.v_block_stride)
        .arg_u64(inputs.k_scale_section)
        .arg_u64(inputs.v_scale_section)
        .arg_ptr(inputs.q)
        .arg_u64(inputs.q_stride)
        .arg_u32(inputs.table_stride)
        .arg_u32(inputs.max_blocks_per_seq)
        .arg_u32(inputs.num_seqs)
        .arg_u32(inputs.num_blocks)
        .arg_u32(inputs.sliding_window)
        .arg_f32(inputs.score_scale)
        .arg_f32(inputs.v_scale)
        .arg_f32(inputs.soft_cap)
        .arg_ptr(output)
        .arg_ptr(lse)
        .arg_ptr(part_o)
        .arg_ptr(part_state)
        .arg_ptr(counters)
        .arg_ptr(plan)
        .arg_ptr(inputs.k_scales)
        .arg_ptr(inputs.v_scales)
        .arg_ptr(sinks)
        .launch(stream)
    )


def paged_decode_attn_chunked(
    gpu: GpuBackend,
    kernel: KernelHandle,
    inputs: Inputs,
    states: Any,
    sinks: Any,
    max_chunks: int,
    chunk_tiles: int,
    stream: Any,
) -> None:
    """Decode chunks of 16 * chunk_tiles tokens into states F32 ``[num_seqs, rows, max_chunks, dim + 2]``."""
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(inputs.q)
        .arg_ptr(inputs.k_cache)
        .arg_ptr(inputs.v_cache)
        .arg_ptr(states)
        .arg_ptr(inputs.block_tables)
        .arg_ptr(inputs.seq_lens)
        .arg_ptr(inputs.k_scales)
        .arg_ptr(inputs.v_scales)
        .arg_ptr(sinks)
        .arg_u64(inputs.q_stride)
        .arg_u64(inputs.k_block_stride)
        .arg_u64(inputs.v_block_stride)
        .arg_u64(inputs.k_scale_section)
        .arg_u64(inputs.v_scale_section)
        .arg_u32(inputs.table_stride)
        .arg_u32(inputs.max_blocks_per_seq)
        .arg_u32(inputs.num_seqs)
        .arg_u32(inputs.num_blocks)
        .arg_u32(inputs.sliding_window)
        .arg_u32(max_chunks)
        .arg_u32(chunk_tiles)
        .arg_f32(inputs.score_scale)
        .arg_f32(inputs.v_scale)
        .arg_f32(inputs.soft_cap)
        .launch(stream)
    )


def paged_decode_attn_merge_chunks(
    gpu: GpuBackend,
    kernel: KernelHandle,
    inputs: Inputs,
    states: Any,
    output: Any,
    lse: Any,
    sinks: Any,
    max_chunks: int,
    chunk_tiles: int,
    stream: Any,
) -> None:
    """Merge the states of `paged_decode_attn_chunked` into output and lse."""
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(states)
        .arg_ptr(output)
        .arg_ptr(lse)
        .arg_ptr(inputs.seq_lens)
        .arg_ptr(sinks)
        .arg_u32(inputs.max_blocks_per_seq)
        .arg_u32(inputs.num_seqs)
        .arg_u32(inputs.sliding_window)
        .arg_u32(max_chunks)
        .arg_u32(chunk_tiles)
        .launch(stream)
    )


def paged_decode_attn_plan(
    gpu: GpuBackend, kernel: KernelHandle, inputs: Inputs, plan: Any, stream: Any
) -> None:
    """Write the plan of a large batch: uint32 ``[2 * num_seqs + 1]``."""
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(plan)
        .arg_ptr(inputs.seq_lens)
        .arg_u32(inputs.max_blocks_per_seq)
        .arg_u32(inputs.num_seqs)
        .arg_u32(inputs.sliding_window)
        .launch(stream)
    )
