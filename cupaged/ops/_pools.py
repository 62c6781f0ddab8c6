"""How many blocks the pools given to a launcher hold, by format. Nothing here synchronises.

Each function checks the strides of its layout and returns what a kernel takes for the size of the pools.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import ArgumentValueError
from cupaged.ops._checks import check_num_blocks, check_shape, check_stride

__all__ = ["bf16_blocks", "check_readable", "fp8_blocks", "nvfp4_blocks"]


def bf16_blocks(
    num_blocks: int | None, k_cache: Any, v_cache: Any, block_size: int, num_kv_heads: int, head_dim: int
) -> int:
    """Blocks of contiguous BF16 pools."""
    block_bytes = 2 * block_size * num_kv_heads * head_dim
    shape = (block_size, num_kv_heads, head_dim)
    return _pool_blocks(num_blocks, k_cache, v_cache, block_bytes, block_bytes, shape)


def fp8_blocks(
    num_blocks: int | None,
    k_cache: Any,
    v_cache: Any,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    cache_stride: int,
) -> int:
    """Blocks of FP8 pools, cache_stride elements apart."""
    block_bytes = block_size * num_kv_heads * head_dim
    check_stride("cache_stride", cache_stride, block_bytes)
    shape = (block_size, num_kv_heads, head_dim)
    return _pool_blocks(num_blocks, k_cache, v_cache, cache_stride, block_bytes, shape)


def nvfp4_blocks(
    num_blocks: int | None,
    k_cache: Any,
    v_cache: Any,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    block_stride_bytes: int,
    data_section_bytes: int,
) -> int:
    """Blocks of NVFP4 pools, block_stride_bytes apart, their scales data_section_bytes into each."""
    values = block_size * num_kv_heads * head_dim
    check_stride("data_section_bytes", data_section_bytes, values // 2)
    block_bytes = data_section_bytes + values // 16
    check_stride("block_stride_bytes", block_stride_bytes, block_bytes)
    return _pool_blocks(num_blocks, k_cache, v_cache, block_stride_bytes, block_bytes, None)


def _pool_blocks(
    num_blocks: int | None,
    k_cache: Any,
    v_cache: Any,
    stride_bytes: int,
    block_bytes: int,
    block_shape: tuple[int, int, int] | None,
) -> int:
    """Blocks that both pools hold: as given, and never more than an array given for a pool has room for.

    Args:
        num_blocks: the caller's own figure, or None.
        k_cache: array or address of the K pool.
        v_cache: the same of the V pool.
        stride_bytes: bytes between blocks.
        block_bytes: bytes that a block uses.
        block_shape: shape of a block, which an array of four axes must have; None where a block has none.
    """
    blocks = check_num_blocks(num_blocks)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if block_shape is not None:
            check_shape(name, cache, block_shape)
        nbytes = None if isinstance(cache, (int, np.generic)) else getattr(cache, "nbytes", None)
        if not isinstance(nbytes, int):
            continue
        held = (nbytes - block_bytes) // stride_bytes + 1 if nbytes >= block_bytes else 0
        if num_blocks is not None and held < num_blocks:
            raise ArgumentValueError(f"num_blocks: got {num_blocks}, but {name} holds {held} blocks")
        blocks = min(blocks, held)
    return blocks


def check_readable(blocks: int) -> None:
    """There is a block to read in place of one outside the pool, whose row then becomes NaN."""
    if blocks == 0:
        raise ArgumentValueError("num_blocks: got 0, or a pool shorter than one block; allowed is 1 or more")
