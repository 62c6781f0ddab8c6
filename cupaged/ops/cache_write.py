"""Launchers that write new tokens into a paged cache.

All of them: key and value BF16 ``[num_tokens, num_kv_heads, head_dim]`` with key_stride and value_stride
elements between tokens; slot_mapping int64 ``[num_tokens]``, slot = block * block_size + offset. A negative
slot is skipped; with num_blocks given (or a pool given as an array) a slot beyond the pool is dropped.
Sources: ``kernels/reshape_and_cache_*.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    UNLIMITED_BLOCKS,
    UNLIMITED_SLOTS,
    check_positive,
    check_row_stride,
    check_scale,
    check_size,
    launcher,
)
from cupaged.ops._pools import bf16_blocks, fp8_blocks, nvfp4_blocks

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def _check_source(
    key: Any,
    value: Any,
    slot_mapping: Any,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    key_stride: int,
    value_stride: int,
) -> None:
    check_positive(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    row = num_kv_heads * head_dim
    check_row_stride("key_stride", key_stride, row, num_tokens, key, "key")
    check_row_stride("value_stride", value_stride, row, num_tokens, value, "value")
    check_size("slot_mapping", slot_mapping, num_tokens)


def _num_slots(blocks: int, block_size: int) -> int:
    return UNLIMITED_SLOTS if blocks == UNLIMITED_BLOCKS else blocks * block_size


@launcher
def reshape_and_cache_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    key_stride: int,
    value_stride: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into a BF16 cache ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_source(
        key,
        value,
        slot_mapping,
        num_tokens,
        num_kv_heads,
        head_dim,
        block_size,
        key_stride,
        value_stride,
    )
    blocks = bf16_blocks(num_blocks, k_cache, v_cache, block_size, num_kv_heads, head_dim)
    if num_tokens == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(key)
        .arg_ptr(value)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(slot_mapping)
        .arg_u32(num_tokens)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(key_stride)
        .arg_u32(value_stride)
        .arg_u64(_num_slots(blocks, block_size))
        .launch(stream)
    )


@launcher
def reshape_and_cache_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    k_scale: float,
    v_scale: float,
    key_stride: int,
    value_stride: int,
    cache_stride: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into an FP8 cache as E4M3(x / scale), blocks cache_stride elements apart.

    k_scale and v_scale are the dequantisation scales: finite and above 0 as float32.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_source(
        key,
        value,
        slot_mapping,
        num_tokens,
        num_kv_heads,
        head_dim,
        block_size,
        key_stride,
        value_stride,
    )
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    blocks = fp8_blocks(num_blocks, k_cache, v_cache, block_size, num_kv_heads, head_dim, cache_stride)
    if num_tokens == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(key)
        .arg_ptr(value)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(slot_mapping)
        .arg_u32(num_tokens)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(k_scale)
        .arg_f32(v_scale)
        .arg_u32(key_stride)
        .arg_u32(value_stride)
        .arg_u64(cache_stride)
        .arg_u64(_num_slots(blocks, block_size))
        .launch(stream)
    )


@launcher
def reshape_and_cache_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    key_stride: int,
    value_stride: int,
    block_stride_bytes: int,
    data_section_bytes: int,
    stream: Any,
    *,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into an NVFP4 cache.

    Blocks are block_stride_bytes apart: a data section ``[block_size, num_kv_heads, head_dim / 2]`` and,
    data_section_bytes from its start, E4M3 scales ``[block_size, num_kv_heads, head_dim / 16]``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_source(
        key,
        value,
        slot_mapping,
        num_tokens,
        num_kv_heads,
        head_dim,
        block_size,
        key_stride,
        value_stride,
    )
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
    if num_tokens == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(key)
        .arg_ptr(value)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(slot_mapping)
        .arg_u32(num_tokens)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(key_stride)
        .arg_u32(value_stride)
        .arg_u64(block_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_u64(_num_slots(blocks, block_size))
        .launch(stream)
    )
