"""How many blocks the pools given to a launcher hold, by format. Nothing here synchronises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import ArgumentValueError
from cupaged.formats.layout import blocks_in
from cupaged.launch import as_integer
from cupaged.ops._checks import UNLIMITED_BLOCKS, check_num_blocks, check_shape, check_stride, remembered

__all__ = ["Pools", "bf16_pools", "check_readable", "fp8_pools", "nvfp4_pools", "strided_pools"]


@dataclass(frozen=True, slots=True)
class Pools:
    """How blocks lie in the K and in the V pool. Made by the functions below, which check the strides.

    Attributes:
        stride_bytes: bytes between blocks; 0 where every id is the same block.
        block_bytes: bytes from a block's begin to the end of what it uses.
        block_shape: shape of a block, which an array of four axes must have; None where a block has none.
    """

    stride_bytes: int
    block_bytes: int
    block_shape: tuple[int, int, int] | None

    def blocks(
        self,
        num_blocks: int | None,
        k_cache: Any,
        v_cache: Any,
        names: tuple[str, str] = ("k_cache", "v_cache"),
    ) -> int:
        """Blocks that both pools hold, as a kernel takes them: the caller's figure, or all there is room for.

        Args:
            num_blocks: the caller's own figure, or None.
            k_cache: array or address of the K pool.
            v_cache: the same of the V pool.
            names: what the launcher calls the two.
        """
        if type(k_cache) is type(v_cache) is int:
            return _given_blocks(num_blocks)
        return min(
            self.blocks_of(num_blocks, names[0], k_cache), self.blocks_of(num_blocks, names[1], v_cache)
        )

    def readable_blocks(
        self,
        num_blocks: int | None,
        k_cache: Any,
        v_cache: Any,
        num_seqs: int,
        names: tuple[str, str] = ("k_cache", "v_cache"),
    ) -> int:
        """The same, of pools that num_seqs sequences read: `check_readable` where there are any."""
        blocks = self.blocks(num_blocks, k_cache, v_cache, names)
        if num_seqs:
            check_readable(blocks)
        return blocks

    def blocks_of(self, num_blocks: int | None, name: str, cache: Any) -> int:
        """The same of one pool, which the argument `name` gives."""
        blocks = _given_blocks(num_blocks)
        if type(cache) is int:
            return blocks
        if self.block_shape is not None:
            check_shape(name, cache, self.block_shape)
        nbytes = None if isinstance(cache, (int, np.generic)) else getattr(cache, "nbytes", None)
        if not isinstance(nbytes, int):
            return blocks
        held = self._held(nbytes)
        if num_blocks is not None and held < num_blocks:
            raise ArgumentValueError(f"num_blocks: got {num_blocks}, but {name} holds {held} blocks")
        return min(blocks, held)

    def _held(self, nbytes: int) -> int:
        if self.stride_bytes == 0:
            return UNLIMITED_BLOCKS if nbytes >= self.block_bytes else 0
        return blocks_in(nbytes, self.stride_bytes, self.block_bytes)


def _given_blocks(num_blocks: int | None) -> int:
    return check_num_blocks(None if num_blocks is None else as_integer("num_blocks", num_blocks))


def _block_shape(block_size: int, num_kv_heads: int, head_dim: int, heads_first: int) -> tuple[int, int, int]:
    return (num_kv_heads, block_size, head_dim) if heads_first else (block_size, num_kv_heads, head_dim)


@remembered
def bf16_pools(
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    cache_stride: int | None = None,
    heads_first: int = 0,
) -> Pools:
    """BF16 pools, blocks cache_stride elements apart; contiguous where None."""
    block = block_size * num_kv_heads * head_dim
    stride = block if cache_stride is None else cache_stride
    check_stride("cache_stride", stride, block)
    return Pools(2 * stride, 2 * block, _block_shape(block_size, num_kv_heads, head_dim, heads_first))


@remembered
def fp8_pools(
    block_size: int, num_kv_heads: int, head_dim: int, cache_stride: int, heads_first: int = 0
) -> Pools:
    """FP8 pools, blocks cache_stride elements apart."""
    block_bytes = block_size * num_kv_heads * head_dim
    check_stride("cache_stride", cache_stride, block_bytes)
    return Pools(cache_stride, block_bytes, _block_shape(block_size, num_kv_heads, head_dim, heads_first))


@remembered
def nvfp4_pools(
    block_size: int, num_kv_heads: int, head_dim: int, block_stride_bytes: int, data_section_bytes: int
) -> Pools:
    """NVFP4 pools, blocks block_stride_bytes apart, their scales data_section_bytes into each."""
    values = block_size * num_kv_heads * head_dim
    check_stride("data_section_bytes", data_section_bytes, values // 2)
    block_bytes = data_section_bytes + values // 16
    check_stride("block_stride_bytes", block_stride_bytes, block_bytes)
    return Pools(block_stride_bytes, block_bytes, None)


@remembered
def strided_pools(
    itemsize: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    blk_stride: int,
    tok_stride: int,
    kvh_stride: int,
) -> Pools:
    """BF16 or FP8 pools of the streaming step, by strides in elements of itemsize bytes."""
    last = (block_size - 1) * tok_stride + (num_kv_heads - 1) * kvh_stride
    return Pools(itemsize * blk_stride, itemsize * (last + head_dim), None)


def check_readable(blocks: int) -> None:
    """There is a block to read in place of one outside the pool, whose row then becomes NaN."""
    if blocks == 0:
        raise ArgumentValueError("num_blocks: got 0, or a pool shorter than one block; allowed is 1 or more")
