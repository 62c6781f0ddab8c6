"""Launchers of split-K paged decode attention and of its second step.

Arguments common to all: q BF16 ``[num_seqs, num_q_heads, head_dim]`` with q_stride elements between
sequences, or contiguous as ``[num_seqs * num_q_heads, head_dim]``; block_tables int32
``[num_seqs, max_blocks_per_seq]``; seq_lens int32 ``[num_seqs]``; inv_sqrt_d the softmax scale;
sliding_window the number of newest tokens attended (0: all).
With num_blocks given (or the pools given as arrays), a block id outside the pool makes its row NaN; a
negative id always does, and so does a length that needs more than max_blocks_per_seq blocks.
A workspace row is o, m, l in natural units, (0, -inf, 0) for a split without tokens.
Sources: ``kernels/paged_decode_attn_*.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch, as_integer
from cupaged.ops._batch import DecodeBatch, decode_batch
from cupaged.ops._checks import (
    check_fp8_scales,
    check_kernel,
    check_size,
    check_splits,
    launcher,
    takes_arrays,
)
from cupaged.ops._pools import bf16_pools, fp8_pools, nvfp4_pools

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def _check_workspace(workspace: Any, num_splits: int, batch: DecodeBatch) -> None:
    splits = as_integer("num_splits", num_splits)
    check_splits(splits)
    check_size("workspace", workspace, splits * (batch.outputs + 2 * batch.num_seqs * batch.num_q_heads))


@takes_arrays
def paged_decode_attn_splitk_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    workspace: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    num_splits: int,
    q_stride: int,
    num_seqs: int,
    sliding_window: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Split-K decode over a BF16 cache ``[num_blocks, block_size, num_kv_heads, head_dim]``,
    into workspace F32 ``[num_seqs, num_q_heads, num_splits, head_dim + 2]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_splitk_bf16")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    _check_workspace(workspace, num_splits, batch)
    pools = bf16_pools(block_size, num_kv_heads, head_dim)
    blocks = pools.readable_blocks(num_blocks, k_cache, v_cache, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(workspace)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u32(num_splits)
        .arg_u32(q_stride)
        .arg_u32(num_seqs)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@takes_arrays
def paged_decode_attn_splitk_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    workspace: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    num_splits: int,
    k_scale: float,
    v_scale: float,
    q_stride: int,
    cache_stride: int,
    num_seqs: int,
    sliding_window: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Split-K decode over an FP8 cache, blocks cache_stride elements apart,
    into workspace F32 ``[num_seqs, num_q_heads, num_splits, head_dim + 2]``.

    k_scale and v_scale are the dequantisation scales: finite and above 0 as float32.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_splitk_fp8")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    _check_workspace(workspace, num_splits, batch)
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
        .arg_ptr(workspace)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u32(num_splits)
        .arg_f32(k_scale)
        .arg_f32(v_scale)
        .arg_u32(q_stride)
        .arg_u64(cache_stride)
        .arg_u32(num_seqs)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


@takes_arrays
def paged_decode_attn_splitk_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    workspace: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    num_splits: int,
    q_stride: int,
    block_stride_bytes: int,
    data_section_bytes: int,
    num_seqs: int,
    stream: Any,
    *,
    sliding_window: int = 0,
    num_blocks: int | None = None,
) -> None:
    """Split-K decode over an NVFP4 cache, blocks block_stride_bytes apart, scales data_section_bytes into
    each, into workspace F32 ``[num_seqs, num_q_heads, num_splits, head_dim + 2]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "paged_decode_attn_splitk_nvfp4")
    batch = decode_batch(
        max_blocks_per_seq, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size, q_stride
    )
    batch.check(q, block_tables, seq_lens, inv_sqrt_d)
    _check_workspace(workspace, num_splits, batch)
    pools = nvfp4_pools(block_size, num_kv_heads, head_dim, block_stride_bytes, data_section_bytes)
    blocks = pools.readable_blocks(num_blocks, k_cache, v_cache, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(workspace)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(max_blocks_per_seq)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_u32(num_splits)
        .arg_u32(q_stride)
        .arg_u64(block_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_u32(num_seqs)
        .arg_u32(sliding_window)
        .arg_u32(blocks)
        .launch(stream)
    )


def _reduce(
    gpu: GpuBackend,
    kernel: KernelHandle,
    workspace: Any,
    output: Any,
    seq_lens: Any,
    num_q_heads: int,
    head_dim: int,
    num_splits: int,
    num_seqs: int,
    stream: Any,
) -> None:
    check_splits(num_splits)
    check_size("workspace", workspace, num_seqs * num_q_heads * num_splits * (head_dim + 2))
    check_size("output", output, num_seqs * num_q_heads * head_dim, 2)
    check_size("seq_lens", seq_lens, num_seqs)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(workspace)
        .arg_ptr(output)
        .arg_ptr(seq_lens)
        .arg_u32(num_q_heads)
        .arg_u32(head_dim)
        .arg_u32(num_splits)
        .arg_u32(num_seqs)
        .launch(stream)
    )


@launcher
def paged_decode_attn_reduce_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    workspace: Any,
    output: Any,
    seq_lens: Any,
    num_q_heads: int,
    head_dim: int,
    num_splits: int,
    num_seqs: int,
    stream: Any,
) -> None:
    """Merge the workspace of an FP8 or BF16 split-K decode into output BF16
    ``[num_seqs, num_q_heads, head_dim]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _reduce(gpu, kernel, workspace, output, seq_lens, num_q_heads, head_dim, num_splits, num_seqs, stream)


@launcher
def paged_decode_attn_reduce_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    workspace: Any,
    output: Any,
    seq_lens: Any,
    num_q_heads: int,
    head_dim: int,
    num_splits: int,
    num_seqs: int,
    stream: Any,
) -> None:
    """Merge the workspace of an NVFP4 split-K decode into output BF16 ``[num_seqs, num_q_heads, head_dim]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _reduce(gpu, kernel, workspace, output, seq_lens, num_q_heads, head_dim, num_splits, num_seqs, stream)
