"""Decode over contexts larger than GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupaged.errors import ArgumentValueError, StreamingCancelledError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer
from cupaged.ops._checks import check_size
from cupaged.pointers import DevicePtr
from cupaged.streaming.device import device_of
from cupaged.streaming.multi import Communicator, RankMerge
from cupaged.streaming.policy import share_room
from cupaged.streaming.pool import RecordPool, rows_of
from cupaged.streaming.progress import Progress, TileProgress
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.sequence import StreamedSequence
from cupaged.streaming.step import States, Step, check_scales
from cupaged.streaming.store import BlockStore, Tail
from cupaged.streaming.tables import Tables
from cupaged.streaming.tiles import Tile, plan_tiles
from cupaged.streaming.transfer import Pipeline, Slot, Trace

_MIB = 1 << 20
_MAX_STATES = 1024  # of all sequences together; a tile holds one long sequence as a rule, which needs many


class StreamingDecoder:
    """Decodes sequences whose blocks live in pinned host memory or in files.

    A sequence's first blocks are kept on the GPU as far as `resident_bytes` go and used in place; the rest
    passes through scratch slots, copied on a stream of its own while the step before computes. New tokens go
    to a tail block on the GPU, which is written to the store when it is full. One decoder serves one thread
    and one stream at a time.

    Args:
        gpu: the backend.
        layout: of a block of K or V.
        num_q_heads: query heads, a multiple of the layout's num_kv_heads.
        max_seqs: the most sequences open at once.
        scratch_bytes: device memory for tiles in flight.
        tiles_in_flight: scratch slots, 2 or more; a tile is scratch_bytes / tiles_in_flight at most.
        resident_bytes: device memory for blocks that stay.
        k_scale, v_scale: dequantisation scales of an FP8 cache; no other format has them.
        read_threads: threads that read files.
        communicator: of the ranks that each have a part of every sequence; all of them call `decode`
            together, and each gets the whole result.

    Attributes:
        device_bytes: device memory that the decoder holds, all told.

    Raises:
        ArgumentValueError: a shape or size that is not supported.
        CompileError: a kernel does not compile.
    """

    def __init__(
        self,
        gpu: Any,
        layout: CacheLayout,
        num_q_heads: int,
        *,
        max_seqs: int = 1,
        scratch_bytes: int = 256 * _MIB,
        tiles_in_flight: int = 4,
        resident_bytes: int = 0,
        k_scale: float | None = None,
        v_scale: float | None = None,
        read_threads: int = 4,
        communicator: Communicator | None = None,
    ) -> None:
        self._shape = RecordLayout(layout)
        self._scales = check_scales(layout.format.name, k_scale, v_scale)
        self._max_seqs = _at_least("max_seqs", max_seqs, 1)
        slots = _at_least("tiles_in_flight", tiles_in_flight, 2)
        record = self._shape.record_bytes
        slot_blocks = _at_least("scratch_bytes", scratch_bytes, 0) // slots // record
        if slot_blocks < 1:
            raise ArgumentValueError(
                f"scratch_bytes: got {scratch_bytes}, allowed is {slots * record} or more: {slots} blocks of "
                f"K and V, {record} bytes each"
            )
        self._gpu = gpu
        self._device = device_of(gpu)
        self._step = Step(gpu, self._shape.pool, as_integer("num_q_heads", num_q_heads), *self._scales)
        splits = max(1, min(self._step.splits_for(1), _MAX_STATES // max_seqs))
        self._states = States(gpu, max_seqs, splits, num_q_heads, layout.head_dim)
        self._merged = States(gpu, max_seqs, 1, num_q_heads, layout.head_dim)
        self._ranks = RankMerge(gpu, communicator, self._merged) if communicator else None
        self._pipeline = Pipeline(
            gpu, self._device, self._shape, slots, slot_blocks, _at_least("read_threads", read_threads, 1)
        )
        self._room = _at_least("resident_bytes", resident_bytes, 0) // record
        self._pool = RecordPool(gpu, self._device, self._shape, self._room + self._max_seqs, self._scales)
        self._sequences: list[StreamedSequence] = []
        self._tables = Tables(gpu, self._device)
        self.device_bytes = (
            self._pool.nbytes
            + slots * slot_blocks * record
            + sum(x.nbytes for s in (self._states, self._merged) for x in (s.m, s.l, s.o))
        )
        gpu.synchronize()

    @property
    def layout(self) -> CacheLayout:
        """Of a block of K or V."""
        return self._shape.layout

    @property
    def tile_blocks(self) -> int:
        """Blocks of a full tile."""
        return self._pipeline.slot_blocks

    # ---- sequences

    def open(self, store: BlockStore) -> StreamedSequence:
        """Take a sequence in. Its first blocks become resident as far as there is room.

        Raises:
            ArgumentValueError: as many sequences as `max_seqs` are open, or the store's layout is another.
        """
        if not RecordLayout(store.layout).agrees_with(self._shape):
            raise ArgumentValueError(f"store: has {store.layout}, this decoder takes {self.layout}")
        self._check_scales(store)
        if len(self._sequences) == self._max_seqs:
            raise ArgumentValueError(f"store: {self._max_seqs} sequences are open, which is max_seqs")
        sequence = StreamedSequence(store, self._pool.take())
        self._sequences.append(sequence)
        if store.tail is not None:
            self._pool.upload(store.tail.record, sequence.tail_record)
            sequence.tail_tokens = store.tail.num_tokens
        self._settle()
        return sequence

    def _check_scales(self, store: BlockStore) -> None:
        header = getattr(store, "header", None)
        if header is not None and (header.k_scale, header.v_scale) != self._scales:
            raise ArgumentValueError(
                f"store: was written with k_scale, v_scale {header.k_scale}, {header.v_scale}; this decoder "
                f"has {self._scales[0]}, {self._scales[1]}"
            )

    def close(self, sequence: StreamedSequence) -> None:
        """Keep a sequence's tail in its store and give its device memory back. The store stays open."""
        self._check_open(sequence)
        self._gpu.synchronize()
        if sequence.tail_tokens:
            record = self._pool.download(sequence.tail_record, self._gpu.null_stream())
            sequence.store.keep_tail(Tail(record, sequence.tail_tokens))
        self._sequences.remove(sequence)
        self._pool.give_back([*sequence.resident, sequence.tail_record])
        sequence.resident, sequence.closed = [], True
        self._settle()

    def _settle(self) -> None:
        """Share the room among the open sequences, and load what became resident."""
        shares = share_room([s.store.num_blocks for s in self._sequences], self._room)
        for sequence, share in zip(self._sequences, shares, strict=True):
            self._pool.give_back(sequence.resident[share:])
            del sequence.resident[share:]
        for sequence, share in zip(self._sequences, shares, strict=True):
            first = len(sequence.resident)
            records = [self._pool.take() for _ in range(share - first)]
            if records:
                self._pool.load(sequence.store, first, records)
            sequence.resident += records
        self._tables.forget()

    def _check_open(self, sequence: StreamedSequence) -> None:
        if sequence not in self._sequences:
            raise ArgumentValueError("sequence: not open in this decoder")

    # ---- appending

    def append(self, sequences: Sequence[StreamedSequence], key: Any, value: Any, *, stream: Any) -> None:
        """Add one token to each of some sequences. Where a tail is full then, it is written to its store,
        which waits for the stream.

        Args:
            sequences: different ones.
            key, value: BF16 ``[len(sequences), num_kv_heads, head_dim]`` on the device.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.

        Raises:
            StoreFullError: a store has no room; the token is in the tail, and the call may be made again with
                no sequences once there is room.
        """
        if len({id(s) for s in sequences}) != len(sequences):
            raise ArgumentValueError("sequences: one is named twice; a call adds one token to each")
        handle = self._gpu.stream_handle(stream)
        for sequence in self._sequences:
            self._spill(sequence, handle)
        for sequence in sequences:
            self._check_open(sequence)
        block_size = self.layout.block_size
        self._pool.check_rows(key, value, len(sequences))
        if sequences:
            slots = [s.tail_record * block_size + s.tail_tokens for s in sequences]
            self._pool.write(key, value, self._tables.slots(slots, handle), len(slots), handle)
        for sequence in sequences:
            sequence.tail_tokens += 1
        for sequence in sequences:
            self._spill(sequence, handle)

    def extend(
        self, sequence: StreamedSequence, key: Any, value: Any, num_tokens: int, *, stream: Any
    ) -> None:
        """Add many tokens to one sequence; as `append`.

        Args:
            sequence: the sequence.
            key, value: BF16 ``[num_tokens, num_kv_heads, head_dim]`` on the device, contiguous.
            num_tokens: tokens.
            stream: as for `append`.
        """
        num_tokens = as_integer("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ArgumentValueError(f"num_tokens: got {num_tokens}, allowed is 0 or more")
        self._check_open(sequence)
        handle = self._gpu.stream_handle(stream)
        self._spill(sequence, handle)
        self._pool.check_rows(key, value, num_tokens)
        block_size, row_bytes = self.layout.block_size, 2 * self.layout.num_kv_heads * self.layout.head_dim
        done = 0
        while done < num_tokens:
            count = min(num_tokens - done, block_size - sequence.tail_tokens)
            begin = sequence.tail_record * block_size + sequence.tail_tokens
            mapping = self._tables.slots(range(begin, begin + count), handle)
            rows = [rows_of(self._gpu, x, row_bytes, done, count) for x in (key, value)]
            self._pool.write(rows[0], rows[1], mapping, count, handle)
            sequence.tail_tokens += count
            done += count
            self._spill(sequence, handle)

    def _spill(self, sequence: StreamedSequence, stream: int) -> None:
        """Write a full tail to the store; keep it on the GPU where there is room."""
        if sequence.tail_tokens < self.layout.block_size:
            return
        record = self._pool.download(sequence.tail_record, stream)
        sequence.store.append(record.reshape(1, -1))
        sequence.tail_tokens = 0
        resident = len(sequence.resident)
        kept = sum(len(s.resident) for s in self._sequences)
        if resident + 1 == sequence.store.num_blocks and kept < self._room:
            sequence.resident.append(sequence.tail_record)
            sequence.tail_record = self._pool.take()
        self._tables.forget()

    # ---- decoding

    def decode(
        self,
        q: Any,
        sequences: Sequence[StreamedSequence],
        output: Any,
        *,
        stream: Any,
        softmax_scale: float | None = None,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Decode one query token of each sequence.

        The host feeds the pipeline and returns when the last tile is queued; the result is ordered on the
        stream. It cannot be captured in a graph.

        Args:
            q: BF16 ``[len(sequences), num_q_heads, head_dim]``, contiguous.
            sequences: of any lengths.
            output: BF16 ``[len(sequences), num_q_heads, head_dim]``, written.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            softmax_scale: factor on q k, 1 / sqrt(head_dim) by default.
            progress: called with (bytes done, bytes in all) as tiles end; with it, the call returns when all
                have.
            cancelled: asked before each tile; the decode ends where it says True.
            trace: filled with the times of each tile.

        Raises:
            StreamingCancelledError: cancelled; nothing is in flight any more, and all can be used again.
            StoreDamagedError, StoreError: a file cannot be read; likewise.
            ArgumentValueError, ArgumentTypeError: the message names the argument.
        """
        handle = self._gpu.stream_handle(stream)
        try:
            self._accumulate(q, sequences, handle, softmax_scale, progress, cancelled, trace)
            self._finish(len(sequences), output, handle)
        except BaseException:
            self._pipeline.drain()
            raise

    def _accumulate(
        self,
        q: Any,
        sequences: Sequence[StreamedSequence],
        stream: int,
        scale: float | None,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        trace: Trace | None,
    ) -> None:
        """States of all tokens."""
        rows = len(sequences)
        for sequence in sequences:
            self._check_open(sequence)
        if rows > self._max_seqs:
            raise ArgumentValueError(f"sequences: got {rows}, this decoder takes {self._max_seqs}")
        self._step.check_query(q, rows)
        if rows == 0:
            return
        queries = rows_of(self._gpu, q, 2 * self._row, 0, rows)
        self._states.clear(rows, stream)
        self._fold_resident(queries, sequences, scale, stream)
        tiles = plan_tiles([s.streamed for s in sequences], self.tile_blocks)
        report = TileProgress(tiles, self._shape.record_bytes, len(self._pipeline.slots), progress)

        def before_tile(number: int) -> None:
            report.tile_begins(number)
            if cancelled is not None and cancelled():
                raise StreamingCancelledError(f"cancelled before tile {number} of {len(tiles)}")

        def compute(tile: Tile, slot: Slot) -> None:
            self._fold_tile(queries, tile, slot, scale, stream)

        self._pipeline.run(tiles, [s.store for s in sequences], compute, stream, before_tile, trace)
        if progress is not None:
            self._pipeline.drain()
            report.finish()

    @property
    def _row(self) -> int:
        """Elements of a row of q."""
        return self._step.num_q_heads * self.layout.head_dim

    def _fold_resident(
        self, q: DevicePtr, sequences: Sequence[StreamedSequence], scale: float | None, stream: int
    ) -> None:
        """Blocks on the GPU, the tail last."""
        found = self._tables.resident(sequences, self.layout.block_size, stream)
        count = self._pool.num_records
        pools = self._shape.pools(self._pool.address, count)
        if found.capacity:
            self._step.fold(
                q, *pools, count, found.table, found.counts, self._states, 0,
                len(sequences), found.capacity, scale, stream, found.valid_slots,
            )  # fmt: skip

    def _fold_tile(self, q: DevicePtr, tile: Tile, slot: Slot, scale: float | None, stream: int) -> None:
        first, rows, count = tile.first_seq, tile.num_seqs, self.tile_blocks
        self._step.fold(
            DevicePtr(q.address + 2 * first * self._row, 2 * rows * self._row),
            *self._shape.pools(slot.records, count), count, slot.table,
            slot.table + 4 * rows * tile.capacity, self._states, first, rows, tile.capacity, scale, stream,
        )  # fmt: skip

    def _finish(self, rows: int, output: Any, stream: int) -> None:
        if rows == 0:
            return
        check_size("output", output, rows * self._row)
        self._step.merge(self._states, self._merged, rows, stream)
        merged = self._merged
        if self._ranks is not None:
            merged = self._ranks.merge(self._step, merged, rows, stream)
        self._step.finalize(merged, output, rows, stream)

    def shutdown(self) -> None:
        """End the threads that read files; they begin again when needed."""
        self._pipeline.close()


def _at_least(name: str, value: int, low: int) -> int:
    number = as_integer(name, value)
    if number < low:
        raise ArgumentValueError(f"{name}: got {number}, allowed is {low} or more")
    return number
