"""Block tables and slots of many sequences as host arrays, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.blocks import PagedSequence
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.launch import as_integer, in_range

UNUSED_COLUMN = -1  # no block: a kernel that looked there would give NaN, and never another's tokens

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def sequence_tables(
    sequences: Sequence[PagedSequence], *, max_blocks_per_seq: int | None = None
) -> tuple[Int32, Int32]:
    """Block tables and lengths of sequences, as the decode launchers take them.

    Args:
        sequences: in the order of the rows.
        max_blocks_per_seq: columns; as many as the longest sequence has blocks by default.

    Returns:
        block_tables int32 ``[num_seqs, max_blocks_per_seq]``, -1 where a sequence has no block, and seq_lens
        int32 ``[num_seqs]``.

    Raises:
        ArgumentTypeError: an object that is no sequence.
        ArgumentValueError: a sequence has more blocks than there are columns, or an id or a length that 32
            bits do not hold.
    """
    for sequence in sequences:
        if not isinstance(sequence, PagedSequence):
            raise ArgumentTypeError(
                f"sequences: got {sequence!r} among them, allowed is what `BlockAllocator.allocate` returns"
            )
    counts = np.array([len(sequence.blocks) for sequence in sequences], np.int64)
    blocks = np.array([block for sequence in sequences for block in sequence.blocks], np.int64)
    lengths = np.array([sequence.seq_len for sequence in sequences], np.int64)
    table = _padded(counts, _block_ids("sequences", blocks), max_blocks_per_seq)
    return table, _int32("sequences", lengths)


def token_slots(
    block_tables: npt.ArrayLike, first: npt.ArrayLike, num_tokens: npt.ArrayLike, block_size: int
) -> Int64:
    """Slots of tokens first, first + 1, ... of each sequence, one sequence after the other.

    Args:
        block_tables: integers ``[num_seqs, max_blocks_per_seq]``.
        first: integers ``[num_seqs]``: position of the first token in its sequence.
        num_tokens: integers ``[num_seqs]``, or one for all: tokens of each sequence.
        block_size: tokens of one block.

    Returns:
        int64 ``[sum of num_tokens]``: slot_mapping of the writers.

    Raises:
        ArgumentValueError: a token beyond the table's width, or in a column that holds no block; an id that
            32 bits do not hold.
    """
    tables = _integers("block_tables", block_tables, 2)
    size = _block_size(block_size)
    starts = _integers("first", first, 1)
    given = _integers("num_tokens", num_tokens, None)
    if given.ndim and given.shape != starts.shape:
        raise ArgumentValueError(
            f"num_tokens: got shape {given.shape}, allowed are one number and ({len(starts)},), as first has"
        )
    counts = np.broadcast_to(given, starts.shape)
    if len(starts) != len(tables):
        raise ArgumentValueError(f"first: got {len(starts)} sequences, block_tables has {len(tables)}")
    _not_negative("first", starts)
    _not_negative("num_tokens", counts)
    room = min(tables.shape[1] * size, 2**63 - 1)
    beyond = (counts > 0) & (counts > room - np.minimum(starts, room))
    if beyond.any():
        worst = int(np.argmax(beyond))
        raise ArgumentValueError(
            f"first: sequence {worst} reaches to token {int(starts[worst]) + int(counts[worst])}, but "
            f"block_tables has {tables.shape[1]} columns of {size}"
        )
    row = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    position = starts[row] + within
    column = position // size
    blocks = tables[row, column]
    if len(row) and blocks.min() < 0:
        at = int(np.argmax(blocks < 0))
        raise ArgumentValueError(
            f"block_tables: got {int(blocks[at])} at [{int(row[at])}, {int(column[at])}], where a token goes"
        )
    _int32("block_tables", blocks)
    slots: Int64 = blocks * size + position % size
    return slots


def csr_to_padded(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    last_page_len: npt.ArrayLike,
    block_size: int,
    *,
    max_blocks_per_seq: int | None = None,
) -> tuple[Int32, Int32]:
    """Padded tables and lengths of tables in compressed rows, as FlashInfer takes them.

    Args:
        indptr: integers ``[num_seqs + 1]``: row s is indices[indptr[s]] to indices[indptr[s + 1] - 1].
        indices: integers ``[indptr[-1]]`` or more: block ids.
        last_page_len: integers ``[num_seqs]``: tokens in the last block, 1 to block_size; 0 where a sequence
            has no block.
        block_size: tokens of one block.
        max_blocks_per_seq: columns; as many as the longest row needs by default.

    Returns:
        block_tables int32 ``[num_seqs, max_blocks_per_seq]``, -1 where unused, seq_lens int32 ``[num_seqs]``.

    Raises:
        ArgumentValueError: arrays that do not belong together, or ids or lengths that 32 bits do not hold.
    """
    size = _block_size(block_size)
    ends, last = _integers("indptr", indptr, 1), _integers("last_page_len", last_page_len, 1)
    blocks = _integers("indices", indices, 1)
    if len(ends) != len(last) + 1:
        raise ArgumentValueError(f"indptr: got {len(ends)} entries, needed are {len(last) + 1}")
    counts = np.diff(ends)
    if ends[0] != 0 or (counts < 0).any() or ends[-1] > len(blocks):
        raise ArgumentValueError(
            f"indptr: got {ends} for {len(blocks)} indices; it must begin with 0, never fall, and end within "
            "them"
        )
    wrong = (last < np.minimum(counts, 1)) | (last > np.where(counts > 0, size, 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArgumentValueError(
            f"last_page_len: got {int(last[at])} for sequence {at} with {int(counts[at])} blocks; allowed is "
            f"1 to {size}, and 0 without blocks"
        )
    lengths = _int32("indptr", np.maximum(counts - 1, 0) * size + last)
    return _padded(counts, _block_ids("indices", blocks[: ends[-1]]), max_blocks_per_seq), lengths


def padded_to_csr(
    block_tables: npt.ArrayLike, seq_lens: npt.ArrayLike, block_size: int
) -> tuple[Int32, Int32, Int32]:
    """The inverse of `csr_to_padded`: indptr, indices and last_page_len, all int32.

    Columns past a sequence's last block are left out, whatever they hold.

    Raises:
        ArgumentValueError: a sequence is longer than the table is wide, or an id that 32 bits do not hold.
    """
    size = _block_size(block_size)
    tables, lengths = _integers("block_tables", block_tables, 2), _integers("seq_lens", seq_lens, 1)
    if len(lengths) != len(tables):
        raise ArgumentValueError(f"seq_lens: got {len(lengths)} sequences, block_tables has {len(tables)}")
    _not_negative("seq_lens", lengths)
    counts = -(-lengths // size)
    if len(counts) and counts.max() > tables.shape[1]:
        at = int(np.argmax(counts))
        raise ArgumentValueError(
            f"seq_lens: got {int(lengths[at])} for sequence {at}, but block_tables has {tables.shape[1]} "
            f"columns of {size}"
        )
    live = np.arange(tables.shape[1]) < counts[:, None]
    indptr = _int32("seq_lens", np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))
    last = lengths - np.maximum(counts - 1, 0) * size
    return indptr, _block_ids("block_tables", tables[live]), _int32("seq_lens", last)


def _int32(name: str, values: Int64) -> Int32:
    """Block ids, lengths or counts as the kernels take them; one that does not fit would become another."""
    if values.size and not (values.min() >= -(2**31) and values.max() < 2**31):
        wrong = int(values.min() if values.min() < -(2**31) else values.max())
        raise ArgumentValueError(f"{name}: got {wrong}, allowed are 32-bit integers")
    return values.astype(np.int32)


def _block_ids(name: str, values: Int64) -> Int32:
    """The same of ids of blocks that hold tokens."""
    ids = _int32(name, values)
    if ids.size and ids.min() < 0:
        raise ArgumentValueError(f"{name}: got {int(ids.min())}, where tokens are; allowed is 0 or more")
    return ids


def _padded(counts: Int64, blocks: Int32, width: int | None) -> Int32:
    """Rows of `counts` blocks each, one after the other, as a table."""
    needed = int(counts.max()) if len(counts) else 0
    columns = needed if width is None else in_range("max_blocks_per_seq", width, 0)
    if columns < needed:
        raise ArgumentValueError(
            f"max_blocks_per_seq: got {columns}, sequence {counts.argmax()} has {needed}"
        )
    table = np.full((len(counts), columns), UNUSED_COLUMN, np.int32)
    table[np.arange(columns) < counts[:, None]] = blocks
    return table


def _integers(name: str, array: npt.ArrayLike, ndim: int | None) -> Int64:
    try:
        result: npt.NDArray[Any] = np.asarray(array)
    except ValueError:
        raise ArgumentValueError(f"{name}: got lists of unequal length") from None
    if result.size == 0:
        result = result.astype(np.int64)
    if result.dtype.kind not in "iu" or result.dtype == np.uint64:
        raise ArgumentTypeError(f"{name}: got dtype {result.dtype}, allowed are integers up to int64")
    if ndim is not None and result.ndim != ndim:
        raise ArgumentValueError(f"{name}: got {result.ndim} dimensions, allowed are {ndim}")
    return result.astype(np.int64)


def _block_size(block_size: int) -> int:
    size = as_integer("block_size", block_size)
    if size < 1:
        raise ArgumentValueError(f"block_size: got {size}, allowed is 1 or more")
    return size


def _not_negative(name: str, values: Int64) -> None:
    if len(values) and values.min() < 0:
        at = int(np.argmin(values))
        raise ArgumentValueError(f"{name}: got {int(values[at])} for sequence {at}, allowed is 0 or more")
