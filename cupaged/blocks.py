"""Which blocks a sequence owns: a host-side allocator with reference counts and copy-on-write.

It only deals in block ids; the pools may live anywhere. `cupaged.tables` turns what it knows into the arrays
that the launchers take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError
from cupaged.launch import as_integer


class PagedSequence:
    """Tokens of one sequence, in blocks of a `BlockAllocator`; made by it, and changed by it alone.

    Attributes:
        seq_len: tokens.
        blocks: ids of its blocks, in order; those of a fork are shared until one of the two writes.
        is_free: whether it was given back, after which nothing may be done with it.
    """

    __slots__ = ("_allocator", "blocks", "is_free", "seq_len")

    def __init__(self, allocator: BlockAllocator, blocks: list[int], seq_len: int) -> None:
        self._allocator = allocator
        self.blocks = blocks
        self.seq_len = seq_len
        self.is_free = False

    def __repr__(self) -> str:
        state = "freed" if self.is_free else f"{self.seq_len} tokens in blocks {self.blocks}"
        return f"<PagedSequence: {state}>"


@dataclass(frozen=True)
class Appended:
    """Where new tokens go.

    Attributes:
        slots: int64 ``[num_tokens]``, what the writers take as slot_mapping.
        copies: int32 ``[num_copies, 2]`` of (source, target): blocks to copy before the tokens are written,
            as `KVCache.copy_blocks` takes them.
    """

    slots: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int32]


class BlockAllocator:
    """Deals out the blocks of a pool.

    Every method either does all it is asked for, or raises and changes nothing.

    Args:
        num_blocks: blocks of the pool, ids 0 to num_blocks - 1.
        block_size: tokens of one block.

    Raises:
        ArgumentValueError, ArgumentTypeError: a size that is not allowed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = _at_least("num_blocks", num_blocks, 0)
        self._block_size = _at_least("block_size", block_size, 1)
        self._references = [0] * self._num_blocks
        self._free = list(range(self._num_blocks - 1, -1, -1))  # a stack: low ids first, warm ones soon again

    def __repr__(self) -> str:
        return f"<BlockAllocator: {self.num_free} of {self._num_blocks} blocks of {self._block_size} free>"

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Sequences that own a block."""
        block = as_integer("block", block)
        if not 0 <= block < self._num_blocks:
            raise ArgumentValueError(f"block: got {block}, allowed is 0 to {self._num_blocks - 1}")
        return self._references[block]

    def allocate(self, num_tokens: int) -> PagedSequence:
        """A sequence with room for so many tokens, in blocks of its own.

        Raises:
            OutOfBlocksError: too few blocks are free.
        """
        num_tokens = _at_least("num_tokens", num_tokens, 0)
        needed = -(-num_tokens // self._block_size)
        self._require(needed)
        return PagedSequence(self, [self._take() for _ in range(needed)], num_tokens)

    def append(self, sequence: PagedSequence, num_tokens: int = 1) -> Appended:
        """Make room for the next tokens of one sequence; see `append_each`."""
        return self.append_each([sequence], num_tokens)

    def append_each(self, sequences: Sequence[PagedSequence], num_tokens: int = 1) -> Appended:
        """Make room for the next tokens of each sequence.

        A last block that is shared and has room left is replaced by a block of the sequence's own, into which
        what it holds must be copied before anything is written: see `Appended.copies`.

        Args:
            sequences: different ones.
            num_tokens: new tokens of each.

        Returns:
            Slots ``[len(sequences) * num_tokens]``, those of the first sequence first, and blocks to copy.

        Raises:
            OutOfBlocksError: too few blocks are free.
            ArgumentValueError: a sequence that was freed, belongs to another allocator or is given twice.
        """
        num_tokens = _at_least("num_tokens", num_tokens, 0)
        if len({id(sequence) for sequence in sequences}) < len(sequences):
            raise ArgumentValueError("sequences: one is given twice; allowed are different ones")
        for sequence in sequences:
            self._check_own(sequence)
        self._require(self._blocks_needed(sequences, num_tokens))
        copies = [pair for sequence in sequences for pair in self._grow(sequence, num_tokens)]
        slots = [self._newest_slots(sequence, num_tokens) for sequence in sequences]
        return Appended(
            np.concatenate([np.empty(0, np.int64), *slots]), np.array(copies, np.int32).reshape(-1, 2)
        )

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """A second sequence with the same tokens. It shares all blocks, and takes none."""
        self._check_own(sequence)
        for block in sequence.blocks:
            self._references[block] += 1
        return PagedSequence(self, list(sequence.blocks), sequence.seq_len)

    def free(self, sequence: PagedSequence) -> None:
        """Give a sequence back. Blocks that no other sequence owns are free.

        Work on the device that still reads them must be ahead, on the same stream, of what writes them next.

        Raises:
            ArgumentValueError: it was freed before, or belongs to another allocator.
        """
        self._check_own(sequence)
        for block in reversed(sequence.blocks):
            self._release(block)
        sequence.blocks, sequence.seq_len, sequence.is_free = [], 0, True

    def _check_own(self, sequence: PagedSequence) -> None:
        if not isinstance(sequence, PagedSequence):
            raise ArgumentTypeError(f"sequence: got {sequence!r}, allowed is what `allocate` returns")
        if sequence._allocator is not self:
            raise ArgumentValueError(f"sequence: got {sequence!r}, which belongs to another allocator")
        if sequence.is_free:
            raise ArgumentValueError("sequence: it was freed before; allowed is one that is in use")

    def _require(self, needed: int) -> None:
        if needed > len(self._free):
            raise OutOfBlocksError(
                f"{needed} blocks of {self._block_size} tokens are needed, {len(self._free)} of "
                f"{self._num_blocks} are free",
                needed=needed,
                free=len(self._free),
            )

    def _blocks_needed(self, sequences: Sequence[PagedSequence], num_tokens: int) -> int:
        """New blocks and copies; of the owners of one block that all write, the last one keeps it."""
        needed, left = 0, Counter[int]()
        for sequence in sequences:
            held = len(sequence.blocks)
            needed += -(-(sequence.seq_len + num_tokens) // self._block_size) - held
            if num_tokens and sequence.seq_len % self._block_size:
                last = sequence.blocks[-1]
                if self._references[last] - left[last] > 1:
                    needed += 1
                    left[last] += 1
        return needed

    def _grow(self, sequence: PagedSequence, num_tokens: int) -> list[tuple[int, int]]:
        copies = []
        if num_tokens and sequence.seq_len % self._block_size:
            last = sequence.blocks[-1]
            if self._references[last] > 1:
                own = self._take()
                self._release(last)
                sequence.blocks[-1] = own
                copies.append((last, own))
        sequence.seq_len += num_tokens
        while len(sequence.blocks) * self._block_size < sequence.seq_len:
            sequence.blocks.append(self._take())
        return copies

    def _newest_slots(self, sequence: PagedSequence, num_tokens: int) -> npt.NDArray[np.int64]:
        first = sequence.seq_len - num_tokens
        position = np.arange(first, sequence.seq_len, dtype=np.int64)
        used = np.array(sequence.blocks[first // self._block_size :], np.int64)
        column = position // self._block_size - first // self._block_size
        slots: npt.NDArray[np.int64] = used[column] * self._block_size + position % self._block_size
        return slots

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)


def _at_least(name: str, value: int, low: int) -> int:
    number = as_integer(name, value)
    if number < low:
        raise ArgumentValueError(f"{name}: got {number}, allowed is {low} or more")
    return number
