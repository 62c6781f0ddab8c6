"""Decode over contexts larger than GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupaged.decode_kernels import MAX_SEQS
from cupaged.errors import ArgumentTypeError, ArgumentValueError, StreamingCancelledError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer, flag, in_range
from cupaged.ops._checks import check_score_scale
from cupaged.pointers import DevicePtr
from cupaged.streaming.arguments import MOST_BYTES, check_callable, device_rows
from cupaged.streaming.device import device_of
from cupaged.streaming.multi import Communicator, RankMerge
from cupaged.streaming.open_sequences import OpenSequences
from cupaged.streaming.pool import RecordPool, row_span
from cupaged.streaming.progress import Progress, TileProgress
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.sequence import StreamedSequence
from cupaged.streaming.step import States, Step, check_scales
from cupaged.streaming.store import BlockStore
from cupaged.streaming.tables import Tables
from cupaged.streaming.tiles import Tile, plan_tiles
from cupaged.streaming.transfer import Pipeline, Slot, Trace

_MIB = 1 << 20
_MAX_SLOTS = _MAX_THREADS = 1024
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
        self._gpu = gpu
        self._device = device_of(gpu)
        self._shape = RecordLayout(layout)
        self._scales = check_scales(layout.format.name, k_scale, v_scale)
        self._max_seqs = max_seqs = in_range("max_seqs", max_seqs, 1, MAX_SEQS)
        slots = in_range("tiles_in_flight", tiles_in_flight, 2, _MAX_SLOTS)
        threads = in_range("read_threads", read_threads, 1, _MAX_THREADS)
        record = self._shape.record_bytes
        room = in_range("resident_bytes", resident_bytes, 0, MOST_BYTES) // record
        slot_blocks = in_range("scratch_bytes", scratch_bytes, 0, MOST_BYTES) // slots // record
        if slot_blocks < 1:
            raise ArgumentValueError(
                f"scratch_bytes: got {scratch_bytes}, allowed is {slots * record} or more: {slots} blocks of "
                f"K and V, {record} bytes each"
            )
        num_q_heads = as_integer("num_q_heads", num_q_heads)
        self._step = Step(gpu, self._shape.pool, num_q_heads, *self._scales)
        splits = max(1, min(self._step.splits_for(1), _MAX_STATES // max_seqs))
        self._states = States(gpu, max_seqs, splits, num_q_heads, layout.head_dim)
        self._merged = States(gpu, max_seqs, 1, num_q_heads, layout.head_dim)
        self._ranks = None if communicator is None else RankMerge(gpu, communicator, self._merged)
        self._pipeline = Pipeline(gpu, self._device, self._shape, slots, slot_blocks, threads)
        self._pool = RecordPool(gpu, self._device, self._shape, room + max_seqs, self._scales)
        self._tables = Tables(gpu, self._device)
        self._sequences = OpenSequences(
            self._shape, self._scales, self._pool, self._tables, room, self._max_seqs
        )
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
        """Take a sequence in. Its first blocks become resident as far as there is room, which waits for the
        device. After an error the decoder is as it was.

        Raises:
            ArgumentValueError: as many sequences as `max_seqs` are open, the store's layout is another, or
                the store is open in this decoder already.
            StoreDamagedError, StoreError: its blocks cannot be read.
        """
        return self._sequences.take_in(store)

    def close(self, sequence: StreamedSequence, *, keep_tail: bool = True) -> None:
        """Keep a sequence's tail in its store and give its device memory back, which waits for the device.

        The store stays open; a tail that it has already is not written again. After an error the sequence is
        open, as it was.

        Args:
            sequence: an open one.
            keep_tail: False drops the tokens that the store does not have, for a store that cannot take them:
                one that is full, closed or open for reading only.

        Raises:
            StoreError: the store cannot keep the tail.
        """
        keep_tail = flag("keep_tail", keep_tail)
        self._sequences.check(sequence)
        self._gpu.synchronize()
        if keep_tail:
            self._sequences.keep_tail(sequence, self._gpu.null_stream())
        self._sequences.release(sequence)

    # ---- appending

    def append(self, sequences: Sequence[StreamedSequence], key: Any, value: Any, *, stream: Any) -> None:
        """Add one token to each of some sequences. Where a tail is full then, it is written to its store,
        which waits for the stream.

        Args:
            sequences: different ones.
            key, value: BF16 ``[len(sequences), num_kv_heads, head_dim]`` on the device.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.

        Raises:
            StoreFullError: a store has no room. Where a tail was full before, no token is added; else every
                token is in its tail. `num_tokens` tells, and the call may be made again with no sequences,
                which writes all full tails, once there is room.
        """
        sequences = self._sequences.checked(sequences)
        if len({id(s) for s in sequences}) != len(sequences):
            raise ArgumentValueError("sequences: one is named twice; a call adds one token to each")
        handle = self._gpu.stream_handle(stream)
        if not sequences:
            self._sequences.spill_all(self._sequences, handle)
            return
        rows = self._pool.rows(key, value, len(sequences), handle)
        self._sequences.spill_all(sequences, handle)
        slots = [s.tail_record * self.layout.block_size + s.tail_tokens for s in sequences]
        self._pool.write(*rows, self._tables.slots(slots, handle), len(slots), handle)
        for sequence in sequences:
            sequence.tail_tokens += 1
        self._sequences.spill_all(sequences, handle)

    def extend(
        self, sequence: StreamedSequence, key: Any, value: Any, num_tokens: int, *, stream: Any
    ) -> None:
        """Add many tokens to one sequence; as `append`. Each tail that becomes full is written to the store,
        which waits for the stream.

        Args:
            sequence: the sequence.
            key, value: BF16 ``[num_tokens, num_kv_heads, head_dim]`` on the device, contiguous.
            num_tokens: tokens.
            stream: as for `append`.

        Raises:
            StoreFullError: the store has no room. The tokens up to there are kept, the last block of them in
                the tail: `sequence.num_tokens` tells how many there are.
        """
        num_tokens = in_range("num_tokens", num_tokens, 0, MOST_BYTES)
        self._sequences.check(sequence)
        handle = self._gpu.stream_handle(stream)
        keys, values = self._pool.rows(key, value, num_tokens, handle)
        self._sequences.spill(sequence, handle)
        block_size, row_bytes = self.layout.block_size, 2 * self.layout.num_kv_heads * self.layout.head_dim
        done = 0
        while done < num_tokens:
            count = min(num_tokens - done, block_size - sequence.tail_tokens)
            begin = sequence.tail_record * block_size + sequence.tail_tokens
            mapping = self._tables.slots(range(begin, begin + count), handle)
            rows = [row_span(x, row_bytes, done, count) for x in (keys, values)]
            self._pool.write(rows[0], rows[1], mapping, count, handle)
            sequence.tail_tokens += count
            done += count
            self._sequences.spill(sequence, handle)

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
        sequences = self._sequences.checked(sequences)
        handle, rows = self._gpu.stream_handle(stream), len(sequences)
        row = (self._step.num_q_heads, self.layout.head_dim)
        queries = device_rows(self._gpu, "q", q, "bf16", rows, row, handle)
        target = device_rows(self._gpu, "output", output, "bf16", rows, row, handle, writable=True)
        if softmax_scale is not None:
            softmax_scale = check_score_scale("softmax_scale", softmax_scale, self._scales[0])
        check_callable("progress", progress)
        check_callable("cancelled", cancelled)
        if trace is not None and not isinstance(trace, Trace):
            raise ArgumentTypeError(f"trace: got {trace!r}, allowed is a Trace or None")
        if rows == 0:
            return
        try:
            self._accumulate(queries, sequences, handle, softmax_scale, progress, cancelled, trace)
            self._finish(rows, target, handle)
        except BaseException:
            self._pipeline.drain()
            raise

    def _accumulate(
        self,
        queries: DevicePtr,
        sequences: Sequence[StreamedSequence],
        stream: int,
        scale: float | None,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        trace: Trace | None,
    ) -> None:
        """States of all tokens."""
        rows = len(sequences)
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

    def _finish(self, rows: int, output: DevicePtr, stream: int) -> None:
        self._step.merge(self._states, self._merged, rows, stream)
        merged = self._merged
        if self._ranks is not None:
            merged = self._ranks.merge(self._step, merged, rows, stream)
        self._step.finalize(merged, output, rows, stream)

    def shutdown(self) -> None:
        """End the threads that read files; they begin again when needed."""
        self._pipeline.close()
