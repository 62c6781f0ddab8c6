"""A K or V pool in device memory, and whether it is what its layout says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.interop import address_of
from cupaged.launch import as_integer
from cupaged.ops._runs import Run, meet
from cupaged.pointers import DevicePtr
from cupaged.registry import DTYPES, dtype_names

_MOST_AXES = 4  # of a pool: blocks, tokens, heads, values


@dataclass(frozen=True)
class Pool:
    """One pool.

    Attributes:
        array: what was given for it.
        pointer: its first block, with all bytes from there to the end of the last one.
        num_blocks: its blocks.
    """

    array: Any
    pointer: DevicePtr
    num_blocks: int


def pool_of(gpu: Any, name: str, array: Any, layout: CacheLayout, num_blocks: int | None) -> Pool:
    """A pool that the caller owns.

    Args:
        gpu: the backend whose memory it is in.
        name: what an error calls it.
        array: ``[num_blocks, ...]``, each block contiguous and as its layout says, blocks as far apart as it
            says; a flat array over all bytes; or an address, of which `num_blocks` must be known.
        layout: of the pool.
        num_blocks: blocks, where the array does not tell or has more.

    Raises:
        ArgumentTypeError: a dtype of another format.
        ArgumentValueError: shape, strides or alignment that the layout does not have, or too small a pool.
    """
    address = address_of(gpu, name, array)
    held = _held_blocks(name, array, layout)
    if num_blocks is None and held is None:
        raise ArgumentValueError(f"num_blocks: got None, but nothing tells how many blocks {name} has")
    count = held if num_blocks is None else as_integer("num_blocks", num_blocks)
    if count is None or count < 0 or (held is not None and count > held):
        raise ArgumentValueError(f"num_blocks: got {num_blocks}, but {name} holds {held} blocks")
    if address % 16:
        raise ArgumentValueError(f"{name}: got address {address:#x}, it must be a multiple of 16")
    nbytes = (count - 1) * layout.block_stride_bytes + layout.block_bytes if count else 0
    return Pool(array, DevicePtr(address, nbytes), count)


def check_blocks_apart(k: Pool, v: Pool, layout: CacheLayout, value_layout: CacheLayout) -> None:
    """Raise ArgumentValueError where a block of K shares memory with one of V.

    Blocks of the two may lie between each other, and so may their sections.
    """
    if meet(_sections(k, layout), _sections(v, value_layout)):
        places = (f"{pool.pointer.address:#x}, {pool.pointer.nbytes} bytes" for pool in (k, v))
        raise ArgumentValueError(
            f"k_pool, v_pool: got {' and '.join(places)}, whose blocks share memory; allowed are two pools, "
            "or one in which K and V lie in turns"
        )


def _sections(pool: Pool, layout: CacheLayout) -> tuple[Run, ...]:
    rows = layout.block_size * layout.num_kv_heads
    fmt, begin = layout.format, pool.pointer.address
    blocks = (pool.num_blocks, layout.block_stride_bytes)
    return (
        Run(begin, rows * fmt.data_bytes(layout.head_dim), *blocks),
        Run(begin + layout.data_section_bytes, rows * fmt.scale_bytes(layout.head_dim), *blocks),
    )


def _held_blocks(name: str, array: Any, layout: CacheLayout) -> int | None:
    """Blocks of an array or a sized pointer; None for a bare address."""
    shape = None if isinstance(array, (int, np.generic)) else getattr(array, "shape", None)
    if shape is None:
        nbytes = getattr(array, "nbytes", None) if isinstance(array, DevicePtr) else None
        return None if nbytes is None else layout.blocks_in(nbytes)
    _check_dtype(name, array, layout)
    steps = _strides(array)
    if len(shape) == 1:
        if shape[0] and steps[0] != array.dtype.itemsize:
            raise ArgumentValueError(f"{name}: got strides {steps} (bytes), a flat pool has no gaps")
        return layout.blocks_in(int(shape[0]) * array.dtype.itemsize)
    _check_block_shape(name, tuple(shape), array.dtype.itemsize, layout)
    if shape[0]:  # where there are no blocks, strides may be anything
        _check_contiguous(name, tuple(shape), steps, array.dtype.itemsize)
    if shape[0] > 1 and steps[0] != layout.block_stride_bytes:
        raise ArgumentValueError(
            f"{name}: got {steps[0]} bytes between blocks, but the layout says {layout.block_stride_bytes}; "
            "CacheLayout(..., block_stride_override=) is for pools whose blocks are further apart"
        )
    return int(shape[0])


def _check_dtype(name: str, array: Any, layout: CacheLayout) -> None:
    allowed = DTYPES[layout.format.name]
    if str(array.dtype) not in allowed:
        raise ArgumentTypeError(
            f"{name}: got dtype {array.dtype}, allowed for {layout.format.name}: {dtype_names(allowed)}"
        )


def _check_block_shape(name: str, shape: tuple[int, ...], itemsize: int, layout: CacheLayout) -> None:
    block = (layout.block_size, layout.num_kv_heads, layout.head_dim)
    if layout.heads_first:
        block = (layout.num_kv_heads, layout.block_size, layout.head_dim)
    if not layout.format.has_scale_section and len(shape) == 4 and shape[1:] != block:
        raise ArgumentValueError(f"{name}: got shape {shape}, the layout says [num_blocks, {block}]")
    size = math.prod(shape[1:]) * itemsize
    if len(shape) > _MOST_AXES or (len(shape) > 2 and size >= 2 * layout.block_bytes):
        raise ArgumentValueError(
            f"{name}: got shape {shape}, which has more axes than blocks of {block}; of one array with both "
            "pools, pass pool[0] and pool[1] where it is [2, num_blocks, ...], and the whole to "
            "KVCache.wrap_interleaved where it is [num_blocks, 2, ...]"
        )
    if size < layout.block_bytes:
        raise ArgumentValueError(
            f"{name}: got shape {shape}, whose blocks have {size} bytes; the layout says {layout.block_bytes}"
        )


def _check_contiguous(name: str, shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> None:
    """Each block by itself."""
    expected = itemsize
    for length, step in zip(reversed(shape[1:]), reversed(steps[1:]), strict=True):
        if length > 1 and step != expected:
            raise ArgumentValueError(
                f"{name}: got strides {steps} (bytes) for shape {shape}; a block must be contiguous"
            )
        expected *= length


def _strides(array: Any) -> tuple[int, ...]:
    """Bytes between elements along each axis."""
    strides = array.strides
    if strides is not None:
        return tuple(strides)
    sizes = [math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape))]
    return tuple(size * array.dtype.itemsize for size in sizes)
