"""Launchers of the streaming decode kernels, which plan on the device and merge what blocks share.

They stand under `cupaged.decode.Decoder`, which owns the workspace that they need: part_o F32 and part_state
F32 pairs, two parts for each block of the grid, and a uint32 counter for each sequence, zeroed before the
first launch. Everything else is as in `cupaged.ops.decode`; lse is F32 ``[num_seqs, num_q_heads]`` in natural
units, or 0. Sources: ``kernels/paged_decode_attn_planned_*.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    check_decode,
    check_scale,
    check_shape,
    check_size,
    launcher,
)
from cupaged.ops._pools import bf16_blocks, check_readable, fp8_blocks, nvfp4_blocks
from cupaged.registry.ring import MAX_PLANNED_SEQS

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def _check_batch(
    output: Any, lse: Any, counters: Any, num_seqs: int, num_q_heads: int, head_dim: int
) -> None:
    if num_seqs > MAX_PLANNED_SEQS:
        raise ArgumentValueError(f"num_seqs: got {num_seqs}, allowed is 0 to {MAX_PLANNED_SEQS}")
    check_size("output", output, num_seqs * num_q_heads * head_dim)
    check_shape("lse", lse, (num_q_heads,))
    check_size("lse", lse, num_seqs * num_q_heads)
    check_size("counters", counters, num_seqs)


@launcher
def paged_decode_attn_planned_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
    lse: Any,
    part_o: Any,
    part_state: Any,
    counters: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    q_stride: int,
    sliding_window: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Decode over a BF16 cache into output BF16 ``[num_seqs, num_q_heads, head_dim]`` and lse.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_decode(
        q,
        block_tables,
        seq_lens,
        max_blocks_per_seq,
        num_seqs,
        num_q_heads,
        num_kv_heads,
        head_dim,
        block_size,
        inv_sqrt_d,
        q_stride,
    )
    _check_batch(output, lse, counters, num_seqs, num_q_heads, head_dim)
    blocks = bf16_blocks(num_blocks, k_cache, v_cache, block_size, num_kv_heads, head_dim)
    if num_seqs == 0:
        return
    check_readable(blocks)
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(lse)
        .arg_ptr(part_o)
        .arg_ptr(part_state)
        .arg_ptr(counters)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u64(q_stride)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@launcher
def paged_decode_attn_planned_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
    lse: Any,
    part_o: Any,
    part_state: Any,
    counters: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    k_scale: float,
    v_scale: float,
    q_stride: int,
    cache_stride: int,
    sliding_window: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Decode over an FP8 cache into output BF16 ``[num_seqs, num_q_heads, head_dim]`` and lse.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_decode(
        q,
        block_tables,
        seq_lens,
        max_blocks_per_seq,
        num_seqs,
        num_q_heads,
        num_kv_heads,
        head_dim,
        block_size,
        inv_sqrt_d,
        q_stride,
    )
    _check_batch(output, lse, counters, num_seqs, num_q_heads, head_dim)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    blocks = fp8_blocks(num_blocks, k_cache, v_cache, block_size, num_kv_heads, head_dim, cache_stride)
    if num_seqs == 0:
        return
    check_readable(blocks)
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(lse)
        .arg_ptr(part_o)
        .arg_ptr(part_state)
        .arg_ptr(counters)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_f32(k_scale)
        .arg_f32(v_scale)
        .arg_u64(q_stride)
        .arg_u64(cache_stride)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@launcher
def paged_decode_attn_planned_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
    lse: Any,
    part_o: Any,
    part_state: Any,
    counters: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    q_stride: int,
    block_stride_bytes: int,
    data_section_bytes: int,
    sliding_window: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Decode over an NVFP4 cache into output BF16 ``[num_seqs, num_q_heads, head_dim]`` and lse.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_decode(
        q,
        block_tables,
        seq_lens,
        max_blocks_per_seq,
        num_seqs,
        num_q_heads,
        num_kv_heads,
        head_dim,
        block_size,
        inv_sqrt_d,
        q_stride,
    )
    _check_batch(output, lse, counters, num_seqs, num_q_heads, head_dim)
    blocks = nvfp4_blocks(
        num_blocks,
        k_cache,
        v_cache,
        block_size,
        num_kv_heads,
        head_dim,
        block_stride_bytes,
        data_section_bytes,
    )
    if num_seqs == 0:
        return
    check_readable(blocks)
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(lse)
        .arg_ptr(part_o)
        .arg_ptr(part_state)
        .arg_ptr(counters)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u64(q_stride)
        .arg_u64(block_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )
