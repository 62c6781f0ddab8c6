"""The block allocator against a model that copies everything and shares nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from cupaged.blocks import BlockAllocator, PagedSequence
from cupaged.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError

UNWRITTEN = -1


class AllocatorMachine(RuleBasedStateMachine):
    """Tokens are numbers that never repeat. A pool of slots stands for the device.

    The model is one plain list of tokens for each sequence; what a sequence reads through its blocks must be
    that list, whatever the others wrote.
    """

    sequences: Bundle[PagedSequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, tuple[PagedSequence, list[int]]] = {}
        self.next_token = 0

    @initialize(num_blocks=st.integers(0, 12), block_size=st.integers(1, 4))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.pool = np.full((num_blocks, block_size), UNWRITTEN)

    def _new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _read(self, sequence: PagedSequence) -> list[int]:
        held = [int(token) for block in sequence.blocks for token in self.pool[block]]
        return held[: sequence.seq_len]

    def _blocks_for(self, chosen: list[PagedSequence], num_tokens: int) -> int:
        """Blocks an append takes: new ones, and copies for all writers of a shared block but the last."""
        size = self.allocator.block_size
        new = sum(-(-(s.seq_len + num_tokens) // size) - len(s.blocks) for s in chosen)
        writers = Counter(s.blocks[-1] for s in chosen if num_tokens and s.seq_len % size)
        return new + sum(min(n, self.allocator.references(block) - 1) for block, n in writers.items())

    def _state(self) -> tuple[object, ...]:
        owned = [(list(s.blocks), s.seq_len) for s, _ in self.model.values()]
        references = [self.allocator.references(b) for b in range(self.allocator.num_blocks)]
        return owned, references, self.allocator.num_free

    @rule(target=sequences, num_tokens=st.integers(0, 9))
    def allocate(self, num_tokens: int) -> object:
        needed = -(-num_tokens // self.allocator.block_size)
        before = self._state()
        if needed > self.allocator.num_free:
            with pytest.raises(OutOfBlocksError) as caught:
                self.allocator.allocate(num_tokens)
            assert (caught.value.needed, caught.value.free) == (needed, self.allocator.num_free)
            assert self._state() == before
            return multiple()
        sequence = self.allocator.allocate(num_tokens)
        tokens = self._new_tokens(num_tokens)
        for position, token in enumerate(tokens):
            block = sequence.blocks[position // self.allocator.block_size]
            self.pool[block, position % self.allocator.block_size] = token
        self.model[id(sequence)] = (sequence, tokens)
        return sequence

    @rule(chosen=st.lists(sequences, max_size=4, unique_by=id), num_tokens=st.integers(0, 6))
    def append(self, chosen: list[PagedSequence], num_tokens: int) -> None:
        before, needed = self._state(), self._blocks_for(chosen, num_tokens)
        if needed > self.allocator.num_free:
            with pytest.raises(OutOfBlocksError) as caught:
                self.allocator.append_each(chosen, num_tokens)
            assert (caught.value.needed, caught.value.free) == (needed, self.allocator.num_free)
            assert self._state() == before
            return
        free = self.allocator.num_free
        appended = self.allocator.append_each(chosen, num_tokens)
        assert self.allocator.num_free == free - needed
        # What the device would do: copies first, in no order, then the new tokens.
        copied = self.pool[appended.copies[:, 0]].copy()
        self.pool[appended.copies[:, 1]] = copied
        assert len(set(appended.copies[:, 1].tolist())) == len(appended.copies)
        assert not set(appended.copies[:, 0].tolist()) & set(appended.copies[:, 1].tolist())
        assert appended.slots.shape == (len(chosen) * num_tokens,)
        tokens = self._new_tokens(len(appended.slots))
        assert len(set(appended.slots.tolist())) == len(tokens), "a slot is given twice"
        self.pool.reshape(-1)[appended.slots] = tokens
        for i, sequence in enumerate(chosen):
            self.model[id(sequence)][1].extend(tokens[i * num_tokens : (i + 1) * num_tokens])

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: PagedSequence) -> PagedSequence:
        free = self.allocator.num_free
        twin = self.allocator.fork(sequence)
        assert self.allocator.num_free == free
        self.model[id(twin)] = (twin, list(self.model[id(sequence)][1]))
        return twin

    @rule(sequence=consumes(sequences))
    def free(self, sequence: PagedSequence) -> None:
        self.allocator.free(sequence)
        del self.model[id(sequence)]
        assert sequence.is_free
        for action in (self.allocator.free, self.allocator.fork, self.allocator.append):
            with pytest.raises(ArgumentValueError, match="freed before"):
                action(sequence)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, tokens in self.model.values():
            assert self._read(sequence) == tokens

    @invariant()
    def references_are_the_owners(self) -> None:
        if not hasattr(self, "allocator"):
            return
        owners = Counter(block for sequence, _ in self.model.values() for block in sequence.blocks)
        for block in range(self.allocator.num_blocks):
            assert self.allocator.references(block) == owners[block]
        assert self.allocator.num_free == self.allocator.num_blocks - len(owners)

    @invariant()
    def sequences_hold_no_more_blocks_than_they_need(self) -> None:
        for sequence, _ in self.model.values():
            assert len(sequence.blocks) == -(-sequence.seq_len // self.allocator.block_size)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for sequence, _ in self.model.values():
            self.allocator.free(sequence)
        assert self.allocator.num_free == self.allocator.num_blocks


AllocatorMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestAllocator = AllocatorMachine.TestCase


def test_a_shared_block_is_copied_once_for_all_but_its_last_writer() -> None:
    allocator = BlockAllocator(8, 4)
    first = allocator.allocate(6)
    second, third = allocator.fork(first), allocator.fork(first)
    shared = first.blocks[1]
    appended = allocator.append_each([first, second, third])
    assert appended.copies.dtype == np.int32
    assert appended.slots.dtype == np.int64
    assert appended.copies.tolist() == [[shared, first.blocks[1]], [shared, second.blocks[1]]]
    assert third.blocks[1] == shared
    assert appended.slots.tolist() == [s.blocks[1] * 4 + 2 for s in (first, second, third)]
    assert first.blocks[0] == second.blocks[0] == third.blocks[0]


def test_full_shared_blocks_are_never_copied() -> None:
    allocator = BlockAllocator(8, 4)
    first = allocator.allocate(8)
    second = allocator.fork(first)
    assert allocator.append_each([first, second], 5).copies.shape == (0, 2)
    assert first.blocks[:2] == second.blocks[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])


def test_an_append_that_fits_exactly() -> None:
    allocator = BlockAllocator(3, 4)
    first = allocator.allocate(5)
    second = allocator.fork(first)
    with pytest.raises(OutOfBlocksError, match="3 blocks of 4 tokens are needed, 1 of 3 are free"):
        allocator.append_each([first, second], 4)
    assert allocator.append_each([first, second], 3).copies.tolist() == [[1, 2]]


def test_what_is_refused() -> None:
    allocator, other = BlockAllocator(4, 4), BlockAllocator(4, 4)
    sequence = allocator.allocate(3)
    with pytest.raises(ArgumentValueError, match="belongs to another allocator"):
        other.append(sequence)
    with pytest.raises(ArgumentTypeError, match="allowed is what `allocate` returns"):
        allocator.free([0])  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="given twice"):
        allocator.append_each([sequence, sequence])
    for bad in (-1, -(2**40)):
        with pytest.raises(ArgumentValueError, match=f"num_tokens: got {bad}, allowed is 0 or more"):
            allocator.allocate(bad)
        with pytest.raises(ArgumentValueError, match=f"num_tokens: got {bad}, allowed is 0 or more"):
            allocator.append(sequence, bad)
    with pytest.raises(ArgumentTypeError, match=r"num_tokens: got 1\.0"):
        allocator.allocate(1.0)  # type: ignore[arg-type]
    for sizes in ((-1, 4), (4, 0), (4, -2)):
        with pytest.raises(ArgumentValueError, match=r"num_blocks|block_size"):
            BlockAllocator(*sizes)
    for block in (-1, 4):
        with pytest.raises(ArgumentValueError, match=f"block: got {block}, allowed is 0 to 3"):
            allocator.references(block)
    assert allocator.num_free == 3
