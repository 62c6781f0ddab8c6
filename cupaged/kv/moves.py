"""Blocks copied between pools of one kind of cache, on the device or to and from pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.interop import named_array, to_device
from cupaged.kv.sources import host_integers
from cupaged.kv.swap import HostBlocks
from cupaged.ops._kernels import kernel_of
from cupaged.ops.blocks import copy_cache_blocks
from cupaged.pointers import DevicePtr


@dataclass(frozen=True)
class BlockPools:
    """A K and a V pool that blocks are copied from or to."""

    k: DevicePtr
    v: DevicePtr
    k_layout: CacheLayout
    v_layout: CacheLayout
    num_blocks: int


_ALIKE = ("format", "num_kv_heads", "head_dim", "block_size", "heads_first")  # blocks apart, they may differ


def _check_alike(name: str, given: BlockPools, own: BlockPools) -> None:
    """Raise ArgumentValueError unless blocks of both hold the same rows in the same order.

    Args:
        name: of the argument that has the pools given.
        given: the caller's.
        own: those of the cache.
    """
    for side, theirs, ours in (
        ("K", given.k_layout, own.k_layout),
        ("V", given.v_layout, own.v_layout),
    ):
        for field in _ALIKE:
            got, allowed = (_shown(getattr(layout, field)) for layout in (theirs, ours))
            if got != allowed:
                raise ArgumentValueError(
                    f"{name}: got {side} blocks of {field} {got}, allowed is the cache's, {allowed}"
                )


def _shown(value: Any) -> Any:
    return value.name if isinstance(value, CacheFormat) else value


def host_pools(host: HostBlocks, own: BlockPools) -> BlockPools:
    """Those of the host, whose blocks are as the cache's."""
    if not isinstance(host, HostBlocks):
        raise ArgumentTypeError(f"host: got {type(host).__name__}, allowed is what `host_blocks` returns")
    pools = BlockPools(*host.pointers(), host.layout, host.value_layout, host.num_blocks)
    _check_alike("host", pools, own)
    return pools


def copy_blocks(gpu: Any, source: BlockPools, target: BlockPools, pairs: Any, stream: Any) -> None:
    """Copy the blocks of pairs (source, target), K and V; see `KVCache.copy_blocks`."""
    if isinstance(pairs, (list, tuple, np.ndarray)):
        pairs = to_device(gpu, _checked_pairs(pairs, source, target), stream)
    else:
        pairs = named_array(gpu, "pairs", pairs, stream)
        shape = getattr(pairs, "shape", None)
        if shape is None:
            raise ArgumentTypeError(
                f"pairs: got {type(pairs).__name__}, allowed are a list of pairs and an array [num_pairs, 2]"
            )
        if len(shape) != 2 or shape[1] != 2:
            raise ArgumentValueError(f"pairs: got shape {shape}, allowed is [num_pairs, 2]")
    if (source.k_layout, target.k_layout) == (source.v_layout, target.v_layout):
        _launch(gpu, source, target, source.k_layout, target.k_layout, (source.k, source.v), pairs, stream)
        return
    # Formats of their own: one launch for K, one for V, each with the other left out.
    _launch(gpu, source, target, source.k_layout, target.k_layout, (source.k, 0), pairs, stream)
    _launch(gpu, source, target, source.v_layout, target.v_layout, (0, source.v), pairs, stream)


def _launch(
    gpu: Any,
    source: BlockPools,
    target: BlockPools,
    layout: CacheLayout,
    target_layout: CacheLayout,
    pointers: tuple[Any, Any],
    pairs: Any,
    stream: Any,
) -> None:
    rows = layout.block_size * layout.num_kv_heads
    copy_cache_blocks(
        gpu,
        kernel_of(gpu, "cache_blocks", "copy_cache_blocks"),
        *pointers,
        target.k if pointers[0] else 0,
        target.v if pointers[1] else 0,
        pairs,
        pairs.shape[0],
        rows * layout.format.data_bytes(layout.head_dim),
        rows * layout.format.scale_bytes(layout.head_dim),
        layout.block_stride_bytes,
        layout.data_section_bytes,
        target_layout.block_stride_bytes,
        target_layout.data_section_bytes,
        source.num_blocks,
        target.num_blocks,
        stream,
    )


def _checked_pairs(given: Any, source: BlockPools, target: BlockPools) -> np.ndarray:
    """Host pairs as int32 ``[num_pairs, 2]``: ids inside, and no copy that another one of them disturbs."""
    pairs = host_integers("pairs", given)
    if pairs.size == 0:
        return np.empty((0, 2), np.int32)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ArgumentValueError(f"pairs: got shape {pairs.shape}, allowed is [num_pairs, 2]")
    for column, name, pools in ((0, "source", source), (1, "target", target)):
        ids = pairs[:, column]
        if ids.min() < 0 or ids.max() >= pools.num_blocks:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ArgumentValueError(
                f"pairs: got {wrong} for a {name}, allowed is 0 to {pools.num_blocks - 1}"
            )
    targets, counts = np.unique(pairs[:, 1], return_counts=True)
    if counts.max() > 1:
        raise ArgumentValueError(f"pairs: block {int(targets[counts > 1][0])} is a target twice")
    if source.k == target.k:
        both = np.intersect1d(pairs[:, 0], targets)
        if both.size:
            raise ArgumentValueError(
                f"pairs: block {int(both[0])} is a source and a target; copies of one call have no order"
            )
    return pairs.astype(np.int32)
