"""The sequences that are open in a streaming decoder, and the GPU memory that each of them has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cupaged.errors import ArgumentTypeError, ArgumentValueError, StoreError
from cupaged.formats import CacheLayout
from cupaged.streaming.arguments import items
from cupaged.streaming.policy import share_room
from cupaged.streaming.pool import RecordPool
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.sequence import StreamedSequence
from cupaged.streaming.step import same_scales
from cupaged.streaming.store import BlockStore, Tail
from cupaged.streaming.store.base import check_tail
from cupaged.streaming.tables import Tables


class OpenSequences:
    """Takes sequences in and gives them up. A record of the pool belongs to one sequence, or is free.

    Args:
        shape: of the records.
        scales: FP8 dequantisation scales of K and V.
        pool: of the tails and of the blocks that stay.
        tables: told when what is resident changes.
        room: blocks that may stay.
        max_seqs: the most at once.
    """

    def __init__(
        self,
        shape: RecordLayout,
        scales: tuple[float, float],
        pool: RecordPool,
        tables: Tables,
        room: int,
        max_seqs: int,
    ) -> None:
        self._shape = shape
        self._scales = scales
        self._pool = pool
        self._tables = tables
        self._room = room
        self._max_seqs = max_seqs
        self._open: list[StreamedSequence] = []

    def __iter__(self) -> Iterator[StreamedSequence]:
        return iter(self._open)

    def take_in(self, store: BlockStore) -> StreamedSequence:
        """A sequence of what a store holds; after an error all is as it was."""
        self._check_store(store)
        sequence = StreamedSequence(store, self._pool.take())
        self._open.append(sequence)
        try:
            if store.tail is not None:
                check_tail(self._shape, store.tail)
                self._pool.upload(store.tail.record, sequence.tail_record)
                sequence.tail_tokens = sequence.kept_tokens = store.tail.num_tokens
            self._settle(sequence)
        except BaseException:
            self.release(sequence)
            raise
        return sequence

    def _check_store(self, store: BlockStore) -> None:
        layout = getattr(store, "layout", None)
        if not isinstance(layout, CacheLayout):
            raise ArgumentTypeError(f"store: got {store!r}, allowed is a BlockStore")
        if not RecordLayout(layout).agrees_with(self._shape):
            raise ArgumentValueError(f"store: has {layout}, this decoder takes {self._shape.layout}")
        header = getattr(store, "header", None)
        if header is not None and not same_scales((header.k_scale, header.v_scale), self._scales):
            raise ArgumentValueError(
                f"store: was written with k_scale, v_scale {header.k_scale}, {header.v_scale}; this decoder "
                f"has {self._scales[0]}, {self._scales[1]}"
            )
        if any(sequence.store is store for sequence in self._open):
            raise ArgumentValueError("store: is open in this decoder; a store holds one sequence")
        if len(self._open) == self._max_seqs:
            raise ArgumentValueError(f"store: {self._max_seqs} sequences are open, which is max_seqs")

    def check(self, sequence: StreamedSequence) -> None:
        """Raise ArgumentValueError unless this sequence is open here."""
        if not any(sequence is other for other in self._open):
            raise ArgumentValueError("sequence: not open in this decoder")

    def checked(self, sequences: Sequence[StreamedSequence]) -> list[StreamedSequence]:
        """These sequences, which must be open, and no more than there may be."""
        found = items("sequences", sequences, "what `open` returned")
        for sequence in found:
            self.check(sequence)
        if len(found) > self._max_seqs:
            raise ArgumentValueError(f"sequences: got {len(found)}, this decoder takes {self._max_seqs}")
        return found

    def spill(self, sequence: StreamedSequence, stream: int) -> None:
        """Write a full tail to the store; keep it on the GPU where there is room."""
        if sequence.tail_tokens < self._shape.block_size:
            return
        record = self._pool.download(sequence.tail_record, stream)
        sequence.store.append(record.reshape(1, -1))
        sequence.tail_tokens = sequence.kept_tokens = 0
        self._tables.forget()
        resident = len(sequence.resident)
        kept = sum(len(s.resident) for s in self._open)
        if resident + 1 == sequence.store.num_blocks and kept < self._room:
            sequence.resident.append(sequence.tail_record)
            sequence.tail_record = self._pool.take()

    def spill_all(self, sequences: Iterable[StreamedSequence], stream: int) -> None:
        """`spill` each of them; a store that cannot take its block does not hold up the others."""
        error: StoreError | None = None
        for sequence in sequences:
            try:
                self.spill(sequence, stream)
            except StoreError as found:
                error = error or found
        if error is not None:
            raise error

    def keep_tail(self, sequence: StreamedSequence, stream: int) -> None:
        """Have the store keep what it does not have yet."""
        self.spill(sequence, stream)
        if sequence.tail_tokens != sequence.kept_tokens:
            record = self._pool.download(sequence.tail_record, stream)
            sequence.store.keep_tail(Tail(record, sequence.tail_tokens))
            sequence.kept_tokens = sequence.tail_tokens

    def release(self, sequence: StreamedSequence) -> None:
        """Give a sequence's records back, to the others as far as they can use them."""
        self._open.remove(sequence)
        self._pool.give_back([*sequence.resident, sequence.tail_record])
        sequence.resident, sequence.closed = [], True
        self._settle()

    def _settle(self, opened: StreamedSequence | None = None) -> None:
        """Share the room among the open sequences, and load what became resident.

        A store that cannot be read is an error where it is being opened. Elsewhere its blocks stay where they
        are: the next decode of its sequence reads them, and raises.
        """
        self._tables.forget()
        shares = share_room([s.store.num_blocks for s in self._open], self._room)
        for sequence, share in zip(self._open, shares, strict=True):
            self._pool.give_back(sequence.resident[share:])
            del sequence.resident[share:]
        for sequence, share in zip(self._open, shares, strict=True):
            try:
                self._load(sequence, share - len(sequence.resident))
            except StoreError:
                if sequence is opened:
                    raise

    def _load(self, sequence: StreamedSequence, count: int) -> None:
        """Make so many more blocks resident: all of them, or none where one cannot be read."""
        if count == 0:
            return
        records = [self._pool.take() for _ in range(count)]
        try:
            self._pool.load(sequence.store, len(sequence.resident), records)
        except BaseException:
            self._pool.give_back(records)
            raise
        sequence.resident += records
