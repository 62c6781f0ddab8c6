"""Blocks in pinned host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError, StoreFullError
from cupaged.formats import CacheLayout
from cupaged.launch import in_range
from cupaged.streaming.arguments import MOST_BLOCKS
from cupaged.streaming.device import Bytes, device_of
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store.base import Tail, check_range, check_records, check_tail, check_target


class PinnedStore:
    """The complete blocks of one sequence in pinned host memory.

    Args:
        gpu: the backend whose copies will read it.
        layout: of a block of K or V.
        capacity_blocks: blocks that it can hold; the memory is taken at once.
        memory: pinned memory of the caller's to use instead, uint8, one axis, contiguous, that long at least.

    Raises:
        ArgumentValueError, ArgumentTypeError: the message names the argument.
    """

    def __init__(
        self, gpu: Any, layout: CacheLayout, capacity_blocks: int, *, memory: Bytes | None = None
    ) -> None:
        self._shape = RecordLayout(layout)
        capacity_blocks = in_range("capacity_blocks", capacity_blocks, 1, MOST_BLOCKS)
        size = capacity_blocks * self._shape.record_bytes
        if memory is not None:
            _check_memory(memory, size)
        self._memory = device_of(gpu).pinned(size) if memory is None else memory[:size]
        self._records = self._memory.reshape(capacity_blocks, self._shape.record_bytes)
        self._num_blocks = 0
        self._tail: Tail | None = None

    @property
    def layout(self) -> CacheLayout:
        """Of a block of K or V."""
        return self._shape.layout

    @property
    def num_blocks(self) -> int:
        """Complete blocks."""
        return self._num_blocks

    @property
    def capacity_blocks(self) -> int:
        """Blocks that it can hold."""
        return len(self._records)

    @property
    def tail(self) -> Tail | None:
        """The tail that was kept, if any."""
        return self._tail

    def append(self, records: Bytes) -> None:
        """See `BlockStore.append`."""
        check_records(self._shape, records)
        self._extend(len(records))[...] = records

    def reserve(self, count: int) -> Bytes:
        """Add blocks whose bytes the caller writes in place: a view ``[count, record_bytes]``."""
        return self._extend(in_range("count", count, 0))

    def _extend(self, count: int) -> Bytes:
        end = self._num_blocks + count
        if end > self.capacity_blocks:
            raise StoreFullError(
                f"a pinned store of {self.capacity_blocks} blocks has {self._num_blocks}; {count} more do "
                "not fit"
            )
        added = self._records[self._num_blocks : end]
        self._num_blocks = end
        if count:
            self._tail = None
        return added

    def keep_tail(self, tail: Tail) -> None:
        """See `BlockStore.keep_tail`."""
        check_tail(self._shape, tail)
        self._tail = Tail(tail.record.copy(), tail.num_tokens)

    def pinned(self, first: int, count: int) -> Bytes:
        """See `BlockStore.pinned`."""
        check_range(first, count, self._num_blocks)
        size = self._shape.record_bytes
        return self._memory[first * size : (first + count) * size]

    def read(self, first: int, target: Bytes) -> None:
        """See `BlockStore.read`."""
        count = check_target(self._shape, first, target, self._num_blocks)
        target[...] = self.pinned(first, count)


def _check_memory(memory: Bytes, size: int) -> None:
    if not isinstance(memory, np.ndarray):
        raise ArgumentTypeError(f"memory: got {type(memory).__name__}, allowed is a NumPy array of uint8")
    if memory.dtype != "uint8" or memory.ndim != 1 or memory.size < size:
        raise ArgumentValueError(
            f"memory: got {memory.dtype} {memory.shape}, allowed is uint8 with {size} bytes or more"
        )
    if not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ArgumentValueError(
            f"memory: got strides {memory.strides} and writeable {memory.flags.writeable}, allowed is "
            "contiguous memory that may be written"
        )
