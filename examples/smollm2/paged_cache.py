"""The KV cache of one sequence: blocks taken from a pool as the text grows, one pool pair a layer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupaged.formats import CacheLayout, cache_format
from examples.smollm2.bf16 import from_bf16, to_bf16
from examples.smollm2.cache_kernels import KERNELS, CacheKernels, Lookup, Pools
from examples.smollm2.device import Device
from examples.smollm2.scales import absmax_scales
from examples.smollm2.weights import ModelConfig

BLOCK_SIZE = 16  # tokens

# Sequences longer than this are cut into parts of about this many tokens, attended in parallel.
SPLIT_TOKENS = 64
MAX_SPLITS = 32


class CacheFullError(RuntimeError):
    """The pool has no free block left; the message says how many tokens it holds."""


class BlockAllocator:
    """Hands out block ids of a pool.

    The order is shuffled (always the same way), as it is in a pool that sequences have come to and left:
    a kernel that ignored the block table would read other tokens.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self._free)
        self._num_blocks = num_blocks

    def take(self) -> int:
        """A block nobody holds.

        Raises:
            CacheFullError: there is none.
        """
        if not self._free:
            raise CacheFullError(f"all {self._num_blocks} blocks of {BLOCK_SIZE} tokens are in use")
        return self._free.pop()


class BlockTable:
    """Blocks of one sequence in order, on the host and, in a row that doubles when full, on the device.

    Args:
        device: where the row lives.
        allocator: where blocks come from.
    """

    def __init__(self, device: Device, allocator: BlockAllocator) -> None:
        self._device, self._allocator = device, allocator
        self._blocks: list[int] = []
        self._columns = 1
        self.row = self._upload()

    def reserve(self, num_tokens: int) -> None:
        """Take blocks until the sequence has room for so many tokens.

        Raises:
            CacheFullError: the pool is too small.
        """
        missing = -(-num_tokens // BLOCK_SIZE) - len(self._blocks)
        if missing <= 0:
            return
        self._blocks += [self._allocator.take() for _ in range(missing)]
        while self._columns < len(self._blocks):
            self._columns *= 2
        self.row = self._upload()

    def slots(self, first: int, count: int) -> Any:
        """Slots of consecutive tokens: int64 ``[count]`` on the device."""
        positions = np.arange(first, first + count)
        blocks = np.asarray(self._blocks, np.int64)[positions // BLOCK_SIZE]
        return self._device.gpu.asarray(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)

    def _upload(self) -> Any:
        # Columns without a block are never read; -1 would show if they were.
        row = np.full((1, self._columns), -1, np.int32)
        row[0, : len(self._blocks)] = self._blocks
        return self._device.gpu.asarray(row)


@dataclass
class LayerTokens:
    """Some tokens in one layer.

    Attributes:
        key: BF16 bits ``[num_tokens, num_kv_heads, head_dim]``.
        value: as ``key``.
    """

    key: Any
    value: Any


class PagedCache:
    """Keys and values of one sequence in all layers.

    Args:
        device: where the pools live.
        config: of the model.
        format_name: one of `KERNELS`.
        max_tokens: longest sequence the pools have room for.
    """

    def __init__(self, device: Device, config: ModelConfig, format_name: str, max_tokens: int) -> None:
        layout = CacheLayout(cache_format(format_name), config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        self.layout, self.length = layout, 0
        self.gpu, stream = device.gpu, device.gpu.null_stream()
        self._kernels: CacheKernels = KERNELS[format_name](self.gpu, layout, config.num_q_heads, stream)
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.pools = [self._new_pools(num_blocks) for _ in range(config.num_layers)]
        self._table = BlockTable(device, BlockAllocator(num_blocks))

    def _new_pools(self, num_blocks: int) -> Pools:
        # Not zeroed: what no token owns must never matter.
        shape, dtype = self.layout.pool_shape(num_blocks), self.layout.pool_dtype
        return Pools(self.gpu.empty(shape, dtype), self.gpu.empty(shape, dtype), num_blocks)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: keys, values and their scales in all layers."""
        return 2 * self.layout.bytes_per_token * len(self.pools)

    def store_prompt(self, layers: Sequence[LayerTokens]) -> None:
        """Write the first tokens of the sequence; a cache that needs scales takes them from these.

        Raises:
            CacheFullError: the pool is too small.
        """
        largest, headroom = self.layout.format.largest, self._kernels.headroom
        if largest is not None and headroom is not None:  # `CacheKernels` sees to it that both are given
            self._calibrate(layers, largest, headroom)
        slots = self._extend(len(layers[0].key))
        for tokens, pools in zip(layers, self.pools, strict=True):
            self._kernels.write(tokens.key, tokens.value, pools, slots)

    def _calibrate(self, layers: Sequence[LayerTokens], largest: float, headroom: float) -> None:
        tensors = [tokens.key for tokens in layers] + [tokens.value for tokens in layers]
        scales = absmax_scales(self.gpu, tensors, largest, headroom, self._kernels.stream)
        k_scales, v_scales = scales[: len(layers)], scales[len(layers) :]
        self.pools = [
            replace(pools, k_scale=k_scale, v_scale=v_scale)
            for pools, k_scale, v_scale in zip(self.pools, k_scales, v_scales, strict=True)
        ]

    def _extend(self, count: int) -> Any:
        first = self.length
        self._table.reserve(first + count)
        self.length = first + count
        return self._table.slots(first, count)

    def begin_step(self) -> DecodeStep:
        """Make room for one more token and return the attention of its forward pass.

        Raises:
            CacheFullError: the pool is too small.
        """
        slots = self._extend(1)
        seq_lens = self.gpu.asarray(np.array([self.length], np.int32))
        lookup = Lookup(self._table.row, seq_lens)
        return DecodeStep(self._kernels, self.pools, slots, lookup, choose_num_splits(self.length))


@dataclass(frozen=True)
class DecodeStep:
    """Attention of one new token through the paged cache; see `examples.smollm2.model.Attention`."""

    kernels: CacheKernels
    pools: Sequence[Pools]
    slots: Any
    lookup: Lookup
    num_splits: int

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Write the token's key and value, then attend over the cache with them in it."""
        pools = self.pools[layer]
        self.kernels.write(to_bf16(k), to_bf16(v), pools, self.slots)
        return from_bf16(self.kernels.attend(to_bf16(q), pools, self.lookup, self.num_splits))


def choose_num_splits(length: int) -> int:
    """Parts to cut a sequence of that many tokens into; 1 means a single pass."""
    return min(MAX_SPLITS, -(-length // SPLIT_TOKENS))
