"""Launchers of single-pass paged decode attention.

Arguments common to all: q BF16 ``[num_seqs, num_q_heads, head_dim]`` with q_stride elements between
sequences, or contiguous as ``[num_seqs * num_q_heads, head_dim]``; block_tables int32
``[num_seqs, max_blocks_per_seq]``; seq_lens int32 ``[num_seqs]``; inv_sqrt_d the softmax scale;
sliding_window the number of newest tokens attended (0: all).
With num_blocks given (or the pools given as arrays), a block id outside the pool makes its row NaN; a
negative id always does, and so does a length that needs more than max_blocks_per_seq blocks.
An empty sequence gives a row of zeros.
Sources: ``kernels/paged_decode_attn_*.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._batch import decode_batch
from cupaged.ops._checks import check_fp8_scales, check_kernel, check_size, takes_arrays
from cupaged.ops._pools import bf16_pools, fp8_pools, nvfp4_pools

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


@takes_arrays
def paged_decode_attn_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
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
    """Decode over a BF16 cache ``[num_blocks, block_size, num_kv_heads, head_dim]``,
    into output BF16 ``[num_seqs, num_q_heads, head_dim]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_bf16")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    check_size("output", output, batch.outputs, 2)
    pools = bf16_pools(block_size, num_kv_heads, head_dim)
    blocks = pools.readable_blocks(num_blocks, k_cache, v_cache, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u32(q_stride)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@takes_arrays
def paged_decode_attn_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
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
    """Decode over an FP8 cache, blocks cache_stride elements apart,
    into output BF16 ``[num_seqs, num_q_heads, head_dim]``.

    k_scale and v_scale are the dequantisation scales: finite and above 0 as float32.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_fp8")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    check_size("output", output, batch.outputs, 2)
    k_scale, v_scale = check_fp8_scales(inv_sqrt_d, k_scale, v_scale)
    pools = fp8_pools(block_size, num_kv_heads, head_dim, cache_stride)
    blocks = pools.readable_blocks(num_blocks, k_cache, v_cache, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
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
        .arg_u32(q_stride)
        .arg_u64(cache_stride)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@takes_arrays
def paged_decode_attn_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    output: Any,
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
    stream: Any,
    *,
    sliding_window: int = 0,
    num_blocks: int | None = None,
) -> None:
    """Decode over an NVFP4 cache, blocks block_stride_bytes apart, scales data_section_bytes into each,
    into output BF16 ``[num_seqs, num_q_heads, head_dim]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_nvfp4")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    check_size("output", output, batch.outputs, 2)
    pools = nvfp4_pools(block_size, num_kv_heads, head_dim, block_stride_bytes, data_section_bytes)
    blocks = pools.readable_blocks(num_blocks, k_cache, v_cache, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u32(q_stride)
        .arg_u64(block_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )
