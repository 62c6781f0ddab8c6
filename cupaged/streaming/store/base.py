"""What a store of blocks offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.streaming.device import Bytes
from cupaged.streaming.records import RecordLayout


@dataclass(frozen=True)
class Tail:
    """The last block of a sequence, where it is not full.

    Attributes:
        record: uint8 ``[record_bytes]``.
        num_tokens: that count in it, 1 to block_size - 1.
    """

    record: Bytes
    num_tokens: int


class BlockStore(Protocol):
    """The complete blocks of one sequence, in order, and a tail that may be kept with them."""

    @property
    def layout(self) -> CacheLayout:
        """Of a block of K or V."""

    @property
    def num_blocks(self) -> int:
        """Complete blocks."""

    @property
    def tail(self) -> Tail | None:
        """The tail that was kept, if any."""

    def append(self, records: Bytes) -> None:
        """Add complete blocks, uint8 ``[n, record_bytes]``. A tail that was kept is dropped.

        Raises:
            StoreFullError: no room; nothing was added.
        """

    def keep_tail(self, tail: Tail) -> None:
        """Keep a block that is not full; a tail kept before is replaced."""

    def pinned(self, first: int, count: int) -> Bytes | None:
        """Blocks as a view ``[count * record_bytes]`` of pinned memory, or None where they must be read."""

    def read(self, first: int, target: Bytes) -> None:
        """Copy whole blocks from block `first` on into flat memory."""


def check_records(shape: RecordLayout, records: Bytes) -> None:
    """Raise ArgumentValueError unless these are whole records."""
    if records.ndim != 2 or records.shape[1] != shape.record_bytes or records.dtype.itemsize != 1:
        raise ArgumentValueError(
            f"records: got {records.dtype} {records.shape}, allowed is uint8 [n, {shape.record_bytes}]"
        )


def check_tail(shape: RecordLayout, tail: Tail) -> None:
    """Raise ArgumentValueError unless this is a block that is not full."""
    if not 1 <= tail.num_tokens < shape.block_size:
        raise ArgumentValueError(
            f"tail.num_tokens: got {tail.num_tokens}, allowed is 1 to {shape.block_size - 1}"
        )
    check_records(shape, tail.record.reshape(1, -1))


def check_range(first: int, count: int, num_blocks: int) -> None:
    """Raise ArgumentValueError unless the store has these blocks."""
    if first < 0 or count < 0 or first + count > num_blocks:
        raise ArgumentValueError(
            f"blocks: got {first} to {first + count}, the store has {num_blocks} complete blocks"
        )
