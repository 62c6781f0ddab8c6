"""What a store of blocks offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer, in_range
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
        """Add complete blocks, uint8 ``[n, record_bytes]``. A tail that was kept is dropped, unless n is 0.

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
    """Raise ArgumentTypeError or ArgumentValueError unless these are whole records."""
    _check_bytes("records", records)
    if records.ndim != 2 or records.shape[1] != shape.record_bytes:
        raise ArgumentValueError(
            f"records: got {records.dtype} {records.shape}, allowed is uint8 [n, {shape.record_bytes}]"
        )


def check_tail(shape: RecordLayout, tail: Tail) -> None:
    """Raise ArgumentTypeError or ArgumentValueError unless this is a block that is not full."""
    if not isinstance(tail, Tail):
        raise ArgumentTypeError(f"tail: got {tail!r}, allowed is a Tail")
    in_range("tail.num_tokens", tail.num_tokens, 1, shape.block_size - 1)
    _check_bytes("tail.record", tail.record)
    if tail.record.shape != (shape.record_bytes,):
        raise ArgumentValueError(
            f"tail.record: got shape {tail.record.shape}, allowed is ({shape.record_bytes},)"
        )


def check_range(first: int, count: int, num_blocks: int) -> None:
    """Raise ArgumentTypeError or ArgumentValueError unless the store has these blocks."""
    first, count = as_integer("first", first), as_integer("count", count)
    if first < 0 or count < 0 or first + count > num_blocks:
        raise ArgumentValueError(
            f"blocks: got {first} to {first + count}, the store has {num_blocks} complete blocks"
        )


def check_target(shape: RecordLayout, first: int, target: Bytes, num_blocks: int) -> int:
    """How many blocks fill this memory, which must be flat and take whole blocks that the store has.

    Raises:
        ArgumentTypeError, ArgumentValueError: it does not.
    """
    _check_bytes("target", target)
    count, rest = divmod(target.size, shape.record_bytes)
    if rest or target.ndim != 1 or not target.flags.c_contiguous or not target.flags.writeable:
        raise ArgumentValueError(
            f"target: got shape {target.shape}, strides {target.strides} and writeable "
            f"{target.flags.writeable}; allowed is flat memory of multiples of {shape.record_bytes} bytes"
        )
    check_range(first, count, num_blocks)
    return count


def _check_bytes(name: str, array: Bytes) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"{name}: got {type(array).__name__}, allowed is a NumPy array of uint8")
    if array.dtype != np.uint8:
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}, allowed: uint8")
