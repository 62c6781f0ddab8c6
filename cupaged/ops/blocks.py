"""Launchers that read tokens back from a paged pool and copy its blocks: ``kernels/cache_blocks.cu``.

They serve every format and layout: strides are arguments, in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.errors import ArgumentValueError
from cupaged.formats import FORMATS
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    UNLIMITED_BLOCKS,
    check_each,
    check_positive,
    check_scale,
    check_size,
    item_bytes,
    launcher,
)
from cupaged.ops._pools import Pools, check_readable
from cupaged.ops.states import check_element_strides

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

# What the kernels call a format; the order of `cupaged.formats.FORMATS`.
FORMAT_NUMBERS = {fmt.name: number for number, fmt in enumerate(FORMATS)}


def _check_bytes(name: str, pool: Any, blocks: int, stride_bytes: int, block_bytes: int) -> None:
    """An array or sized pointer reaches to the end of its last block."""
    nbytes = None if isinstance(pool, (int, np.generic)) else getattr(pool, "nbytes", None)
    if not isinstance(nbytes, int) or blocks == 0:
        return
    needed = (blocks - 1) * stride_bytes + block_bytes
    if nbytes < needed:
        raise ArgumentValueError(f"{name}: got {nbytes} bytes, needed are {needed}")


def block_end(data_bytes: int, scale_bytes: int, section_bytes: int) -> int:
    """Bytes from a block's begin to the end of its last section."""
    return max(data_bytes, section_bytes + scale_bytes) if scale_bytes else data_bytes


def gather_pool(
    cache_format: int,
    sizes: tuple[int, int, int],
    block_stride_bytes: int,
    strides: tuple[int, int],
    scale_strides: tuple[int, int],
    data_section_bytes: int,
) -> Pools:
    """The pool of a gather.

    Args:
        cache_format: one of `FORMAT_NUMBERS`.
        sizes: block_size, num_kv_heads and head_dim.
        block_stride_bytes: between blocks.
        strides: of the data section, in bytes: between tokens and between heads.
        scale_strides: of the scale section.
        data_section_bytes: from a block's begin to its scale section.
    """
    block_size, num_kv_heads, head_dim = sizes
    fmt = FORMATS[cache_format]

    def reach(steps: tuple[int, int], row: int) -> int:
        return (block_size - 1) * steps[0] + (num_kv_heads - 1) * steps[1] + row

    scale_row = fmt.scale_bytes(head_dim)
    scales = reach(scale_strides, scale_row) if scale_row else 0
    end = block_end(reach(strides, fmt.data_bytes(head_dim)), scales, data_section_bytes)
    return Pools(block_stride_bytes, end, None)


def _check_blocks(name: str, blocks: int) -> int:
    if not 0 <= blocks <= UNLIMITED_BLOCKS:
        raise ArgumentValueError(f"{name}: got {blocks}, allowed is 0 to {UNLIMITED_BLOCKS}")
    return blocks


def _gather(
    gpu: GpuBackend,
    kernel: KernelHandle,
    pool: Any,
    block_ids: Any,
    scales: Any,
    output: Any,
    seq_len: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_format: int,
    scale: float,
    block_stride_bytes: int,
    token_stride_bytes: int,
    head_stride_bytes: int,
    data_section_bytes: int,
    scale_token_stride_bytes: int,
    scale_head_stride_bytes: int,
    stream: Any,
    num_blocks: int | None,
) -> None:
    check_positive(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    if not 0 <= cache_format < len(FORMAT_NUMBERS):
        allowed = ", ".join(f"{number} ({name})" for name, number in FORMAT_NUMBERS.items())
        raise ArgumentValueError(f"cache_format: got {cache_format}, allowed are {allowed}")
    scale = check_scale("scale", scale)
    check_element_strides(
        block_stride_bytes=block_stride_bytes,
        token_stride_bytes=token_stride_bytes,
        head_stride_bytes=head_stride_bytes,
        data_section_bytes=data_section_bytes,
        scale_token_stride_bytes=scale_token_stride_bytes,
        scale_head_stride_bytes=scale_head_stride_bytes,
    )
    strides, scale_strides = (
        (token_stride_bytes, head_stride_bytes),
        (scale_token_stride_bytes, scale_head_stride_bytes),
    )
    pools = gather_pool(
        cache_format,
        (block_size, num_kv_heads, head_dim),
        block_stride_bytes,
        strides,
        scale_strides,
        data_section_bytes,
    )
    blocks = pools.blocks_of(num_blocks, "pool", pool)
    if seq_len == 0:
        return
    if num_blocks is None:
        check_readable(blocks)
    check_size("block_ids", block_ids, -(-seq_len // block_size))
    check_each("scales", scales, num_kv_heads)
    check_size("output", output, seq_len * num_kv_heads * head_dim, item_bytes(kernel, "output"))
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(pool)
        .arg_ptr(block_ids)
        .arg_ptr(scales)
        .arg_ptr(output)
        .arg_u32(seq_len)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(cache_format)
        .arg_f32(scale)
        .arg_u64(block_stride_bytes)
        .arg_u64(token_stride_bytes)
        .arg_u64(head_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_u64(scale_token_stride_bytes)
        .arg_u64(scale_head_stride_bytes)
        .arg_u32(blocks)
        .launch(stream)
    )


@launcher
def gather_tokens_f32(
    gpu: GpuBackend,
    kernel: KernelHandle,
    pool: Any,
    block_ids: Any,
    scales: Any,
    output: Any,
    seq_len: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_format: int,
    scale: float,
    block_stride_bytes: int,
    token_stride_bytes: int,
    head_stride_bytes: int,
    data_section_bytes: int,
    scale_token_stride_bytes: int,
    scale_head_stride_bytes: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Dequantised tokens of one sequence as F32 ``[seq_len, num_kv_heads, head_dim]``.

    block_ids int32 ``[ceil(seq_len / block_size)]``; with num_blocks given (or the pool given as an array), a
    token whose block is outside the pool reads NaN, and one whose block is negative always does.
    cache_format is one of `FORMAT_NUMBERS`. Stored values are multiplied by scales F32 ``[num_kv_heads]``, or
    by scale where scales is 0. The last two strides are those of the scale section, which begins
    data_section_bytes into a block (NVFP4; other formats do not look at the three).

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _gather(
        gpu,
        kernel,
        pool,
        block_ids,
        scales,
        output,
        seq_len,
        num_kv_heads,
        head_dim,
        block_size,
        cache_format,
        scale,
        block_stride_bytes,
        token_stride_bytes,
        head_stride_bytes,
        data_section_bytes,
        scale_token_stride_bytes,
        scale_head_stride_bytes,
        stream,
        num_blocks,
    )


@launcher
def gather_tokens_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    pool: Any,
    block_ids: Any,
    scales: Any,
    output: Any,
    seq_len: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_format: int,
    scale: float,
    block_stride_bytes: int,
    token_stride_bytes: int,
    head_stride_bytes: int,
    data_section_bytes: int,
    scale_token_stride_bytes: int,
    scale_head_stride_bytes: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """As `gather_tokens_f32`, rounded to BF16.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _gather(
        gpu,
        kernel,
        pool,
        block_ids,
        scales,
        output,
        seq_len,
        num_kv_heads,
        head_dim,
        block_size,
        cache_format,
        scale,
        block_stride_bytes,
        token_stride_bytes,
        head_stride_bytes,
        data_section_bytes,
        scale_token_stride_bytes,
        scale_head_stride_bytes,
        stream,
        num_blocks,
    )


@launcher
def copy_cache_blocks(
    gpu: GpuBackend,
    kernel: KernelHandle,
    k_source: Any,
    v_source: Any,
    k_target: Any,
    v_target: Any,
    pairs: Any,
    num_pairs: int,
    data_bytes: int,
    scale_bytes: int,
    source_stride_bytes: int,
    source_section_bytes: int,
    target_stride_bytes: int,
    target_section_bytes: int,
    num_source_blocks: int,
    num_target_blocks: int,
    stream: Any,
) -> None:
    """Copy blocks, K and V, from pools to pools, which may be the same.

    pairs int32 ``[num_pairs, 2]`` of (source, target); no target may be given twice, and in one pool none may
    be a source. A pair with an id outside its pool is left out; so is K or V where its source is 0. A block
    is data_bytes from its start and scale_bytes from its section on (0: none). Pools may be pinned host
    memory.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    source_blocks = _check_blocks("num_source_blocks", num_source_blocks)
    target_blocks = _check_blocks("num_target_blocks", num_target_blocks)
    if num_pairs == 0:
        return
    check_size("pairs", pairs, 2 * num_pairs)
    source_end = block_end(data_bytes, scale_bytes, source_section_bytes)
    for name, pool in (("k_source", k_source), ("v_source", v_source)):
        _check_bytes(name, pool, source_blocks, source_stride_bytes, source_end)
    target_end = block_end(data_bytes, scale_bytes, target_section_bytes)
    for name, pool in (("k_target", k_target), ("v_target", v_target)):
        _check_bytes(name, pool, target_blocks, target_stride_bytes, target_end)
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(k_source)
        .arg_ptr(v_source)
        .arg_ptr(k_target)
        .arg_ptr(v_target)
        .arg_ptr(pairs)
        .arg_u32(num_pairs)
        .arg_u64(data_bytes)
        .arg_u64(scale_bytes)
        .arg_u64(source_stride_bytes)
        .arg_u64(source_section_bytes)
        .arg_u64(target_stride_bytes)
        .arg_u64(target_section_bytes)
        .arg_u32(source_blocks)
        .arg_u32(target_blocks)
        .launch(stream)
    )
