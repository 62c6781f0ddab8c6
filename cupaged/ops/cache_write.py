"""Launchers that write new tokens into a paged cache.

All of them: key and value BF16 ``[num_tokens, num_kv_heads, head_dim]`` with key_stride and value_stride
elements between tokens; slot_mapping int64 ``[num_tokens]``, slot = block * block_size + offset. A negative
slot is skipped; with num_blocks given (or a pool given as an array) a slot beyond the pool is dropped. With
heads_first a block's rows are in the order ``[num_kv_heads, block_size]`` instead of
``[block_size, num_kv_heads]``. Where key or value is 0, that pool is not written;
both are 0 only where there are no tokens.
Sources: ``kernels/reshape_and_cache_*.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    UNLIMITED_BLOCKS,
    UNLIMITED_SLOTS,
    check_each,
    check_kernel,
    check_positive,
    check_row_stride,
    check_rows,
    check_scale,
    check_size,
    remembered,
    takes_arrays,
)
from cupaged.ops._pools import bf16_pools, fp8_pools, nvfp4_pools
from cupaged.pointers import is_null

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Sizes of what is written, checked; made by `_tokens`. row: elements of a token of key or value."""

    num_tokens: int
    block_size: int
    key_stride: int
    value_stride: int
    row: int

    def check(self, key: Any, value: Any, slot_mapping: Any) -> None:
        """The arrays hold what the sizes say, and there is something to write where there are tokens."""
        if self.num_tokens and is_null(key) and is_null(value):
            raise ArgumentValueError(
                f"key, value: got two null pointers (address 0) for {self.num_tokens} tokens, allowed is one"
            )
        if type(key) is type(value) is type(slot_mapping) is int:
            return
        check_row_stride("key_stride", self.key_stride, self.row, self.num_tokens, key, "key")
        check_row_stride("value_stride", self.value_stride, self.row, self.num_tokens, value, "value")
        check_size("slot_mapping", slot_mapping, self.num_tokens, 8)

    def num_slots(self, blocks: int) -> int:
        """Slots of a pool of so many blocks."""
        return UNLIMITED_SLOTS if blocks == UNLIMITED_BLOCKS else blocks * self.block_size


@remembered
def _tokens(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, key_stride: int, value_stride: int
) -> _Tokens:
    check_positive(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    row = num_kv_heads * head_dim
    check_rows("key_stride", key_stride, row, num_tokens, None, "key")
    check_rows("value_stride", value_stride, row, num_tokens, None, "value")
    return _Tokens(num_tokens, block_size, key_stride, value_stride, row)


def _check_head_scales(k_scales: Any, v_scales: Any, num_kv_heads: int) -> None:
    if k_scales is not None or v_scales is not None:
        check_each("k_scales", k_scales, num_kv_heads)
        check_each("v_scales", v_scales, num_kv_heads)


def _flag(name: str, value: bool) -> int:
    if value is not True and value is not False:
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed are True and False")
    return int(value)


@takes_arrays
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
    cache_stride: int | None = None,
    heads_first: bool = False,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into a BF16 cache ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    cache_stride: elements between blocks, where they do not follow each other tightly (K and V interleaved,
    one layer of many); block_size * num_kv_heads * head_dim by default.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "reshape_and_cache_bf16")
    tokens = _tokens(num_tokens, num_kv_heads, head_dim, block_size, key_stride, value_stride)
    tokens.check(key, value, slot_mapping)
    swapped = _flag("heads_first", heads_first)
    pools = bf16_pools(block_size, num_kv_heads, head_dim, cache_stride, swapped)
    blocks = pools.blocks(num_blocks, k_cache, v_cache)
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
        .arg_u64(pools.stride_bytes // 2)
        .arg_u32(swapped)
        .arg_u64(tokens.num_slots(blocks))
        .launch(stream)
    )


@takes_arrays
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
    k_scales: Any = None,
    v_scales: Any = None,
    heads_first: bool = False,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into an FP8 cache as E4M3(x / scale), blocks cache_stride elements apart.

    k_scale and v_scale are the dequantisation scales: finite and above 0 as float32. Where k_scales or
    v_scales is given, F32 ``[num_kv_heads]`` on the device, each KV head has its own scale from there, which
    is taken at its word, and k_scale or v_scale is not used.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "reshape_and_cache_fp8")
    tokens = _tokens(num_tokens, num_kv_heads, head_dim, block_size, key_stride, value_stride)
    tokens.check(key, value, slot_mapping)
    _check_head_scales(k_scales, v_scales, num_kv_heads)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    swapped = _flag("heads_first", heads_first)
    pools = fp8_pools(block_size, num_kv_heads, head_dim, cache_stride, swapped)
    blocks = pools.blocks(num_blocks, k_cache, v_cache)
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
        .arg_ptr(0 if k_scales is None else k_scales)
        .arg_ptr(0 if v_scales is None else v_scales)
        .arg_u32(swapped)
        .arg_u64(tokens.num_slots(blocks))
        .launch(stream)
    )


@takes_arrays
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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    k_scales: Any = None,
    v_scales: Any = None,
    heads_first: bool = False,
    num_blocks: int | None = None,
) -> None:
    """Write tokens into an NVFP4 cache.

    Blocks are block_stride_bytes apart: a data section ``[block_size, num_kv_heads, head_dim / 2]`` and,
    data_section_bytes from its start, E4M3 scales ``[block_size, num_kv_heads, head_dim / 16]``. k_scale and
    v_scale are a second level: x / scale is stored. k_scales and v_scales as in `reshape_and_cache_fp8`.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_kernel(kernel, "reshape_and_cache_nvfp4")
    tokens = _tokens(num_tokens, num_kv_heads, head_dim, block_size, key_stride, value_stride)
    tokens.check(key, value, slot_mapping)
    _check_head_scales(k_scales, v_scales, num_kv_heads)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    swapped = _flag("heads_first", heads_first)
    pools = nvfp4_pools(block_size, num_kv_heads, head_dim, block_stride_bytes, data_section_bytes)
    blocks = pools.blocks(num_blocks, k_cache, v_cache)
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
        .arg_f32(k_scale)
        .arg_f32(v_scale)
        .arg_ptr(0 if k_scales is None else k_scales)
        .arg_ptr(0 if v_scales is None else v_scales)
        .arg_u32(swapped)
        .arg_u64(tokens.num_slots(blocks))
        .launch(stream)
    )
