"""The pipeline: tiles travel through scratch slots, copied on one stream while another computes.

    read (threads)   | tile 2 -> staging 2 | tile 3 -> staging 3 | ...          only for blocks in files
    copy stream      | tile 1 -> slot 1    | tile 2 -> slot 2    | ...
    compute stream   | step on slot 0      | step on slot 1      | ...

A slot is filled again only after its step has ended, and its staging memory only after its copy has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupaged.streaming.device import Bytes, Device, Event
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store import BlockStore
from cupaged.streaming.tiles import Tile, table_entries

_READ_BYTES = 4 << 20  # what one thread reads at once


@dataclass
class TileTimes:
    """Events around one tile's copy and step."""

    num_bytes: int
    copy_begin: Event
    copy_end: Event
    step_begin: Event
    step_end: Event


@dataclass
class Trace:
    """When each tile was copied and computed; pass an empty one to `StreamingDecoder.decode`.

    Attributes:
        tiles: one entry for each tile, in order.
    """

    tiles: list[TileTimes] = field(default_factory=list)

    def rows(self) -> list[dict[str, float]]:
        """Milliseconds since the first copy began, after waiting for the last step: for each tile `bytes`,
        `copy_begin`, `copy_end`, `step_begin`, `step_end`."""
        if not self.tiles:
            return []
        self.tiles[-1].step_end.synchronize()
        start = self.tiles[0].copy_begin
        return [
            {
                "bytes": float(tile.num_bytes),
                "copy_begin": tile.copy_begin.milliseconds_since(start),
                "copy_end": tile.copy_end.milliseconds_since(start),
                "step_begin": tile.step_begin.milliseconds_since(start),
                "step_end": tile.step_end.milliseconds_since(start),
            }
            for tile in self.tiles
        ]


class Slot:
    """Scratch memory for one tile on the device, and what goes with it.

    Attributes:
        records: address of the records.
        table: address of the tile's table; the counts follow it.
        copied: the tile has arrived.
        done: the step has ended.
    """

    def __init__(self, gpu: Any, device: Device, shape: RecordLayout, num_blocks: int) -> None:
        self._memory = gpu.empty(num_blocks * shape.record_bytes, "uint8")
        self._table = gpu.empty(table_entries(num_blocks), "int32")
        self.records = int(gpu.pointer(self._memory))
        self.table = int(gpu.pointer(self._table))
        self.host_table = device.pinned(4 * table_entries(num_blocks))
        self.staging: Bytes | None = None  # made when blocks of a file first need it
        self.copied = device.event()
        self.done = device.event()


class Pipeline:
    """Scratch slots and the streams and threads that feed them.

    Args:
        gpu: the backend.
        device: its memory and streams.
        shape: of the records.
        num_slots: tiles in flight.
        slot_blocks: records of a slot.
        read_threads: that read files.
    """

    def __init__(
        self,
        gpu: Any,
        device: Device,
        shape: RecordLayout,
        num_slots: int,
        slot_blocks: int,
        read_threads: int,
    ) -> None:
        self._device = device
        self._shape = shape
        self.slot_blocks = slot_blocks
        self.slots = [Slot(gpu, device, shape, slot_blocks) for _ in range(num_slots)]
        self._copy_stream = device.stream()
        self._read_threads = read_threads
        self._threads: ThreadPoolExecutor | None = None

    def run(
        self,
        tiles: Sequence[Tile],
        stores: Sequence[BlockStore],
        compute: Callable[[Tile, Slot], None],
        stream: int,
        before_tile: Callable[[int], None],
        trace: Trace | None,
    ) -> None:
        """Queue the copy and the step of every tile.

        Args:
            tiles: in order.
            stores: of each row.
            compute: queues the step of a tile that lies in a slot.
            stream: that the steps run on.
            before_tile: called with a tile's number once the tile that used its slot before has ended; what
                it raises ends the run.
            trace: filled with times, where given.
        """
        slots = len(self.slots)
        reads: dict[int, list[Future[None]]] = {}
        try:
            for number in range(min(slots, len(tiles))):
                self._read_ahead(reads.setdefault(number, []), tiles[number], self.slots[number], stores)
            for number, tile in enumerate(tiles):
                slot = self.slots[number % slots]
                slot.done.synchronize()
                before_tile(number)
                for read in reads[number]:
                    read.result()
                del reads[number]
                times = None if trace is None else self._times(tile)
                self._copy(tile, slot, stores, times)
                slot.copied.wait(stream)
                if times:
                    times.step_begin.record(stream)
                compute(tile, slot)
                slot.done.record(stream)
                if times and trace is not None:
                    times.step_end.record(stream)
                    trace.tiles.append(times)  # whole: events that were never recorded have no time
                if number + slots < len(tiles):
                    self._read_ahead(
                        reads.setdefault(number + slots, []), tiles[number + slots], slot, stores
                    )
        finally:
            for futures in reads.values():
                for future in futures:
                    future.cancel()
            for futures in reads.values():
                _finish(futures)

    def drain(self) -> None:
        """Wait until all slots are free."""
        for slot in self.slots:
            slot.copied.synchronize()
            slot.done.synchronize()

    def close(self) -> None:
        """End the threads."""
        if self._threads:
            self._threads.shutdown()
            self._threads = None

    def _times(self, tile: Tile) -> TileTimes:
        begin, end, first, last = (self._device.event(timing=True) for _ in range(4))
        return TileTimes(tile.num_blocks * self._shape.record_bytes, begin, end, first, last)

    def _copy(self, tile: Tile, slot: Slot, stores: Sequence[BlockStore], times: TileTimes | None) -> None:
        device, stream = self._device, self._copy_stream
        if times:
            times.copy_begin.record(stream)
        table, counts = tile.table()
        host = slot.host_table[: 4 * (table.size + counts.size)]
        host.view(np.int32)[: table.size] = table.reshape(-1)
        host.view(np.int32)[table.size :] = counts
        try:
            device.to_device(slot.table, host, stream)
            self._copy_runs(tile, slot, stores)
        finally:
            slot.copied.record(stream)  # after an error too: `drain` must wait for what is queued
        if times:
            times.copy_end.record(stream)

    def _copy_runs(self, tile: Tile, slot: Slot, stores: Sequence[BlockStore]) -> None:
        size = self._shape.record_bytes
        begin = 0
        for run in tile.runs:
            source = stores[run.seq].pinned(run.first, run.count)
            if source is None:
                assert slot.staging is not None
                source = slot.staging[begin * size : (begin + run.count) * size]
            self._device.to_device(slot.records + begin * size, source, self._copy_stream)
            begin += run.count

    def _read_ahead(
        self, futures: list[Future[None]], tile: Tile, slot: Slot, stores: Sequence[BlockStore]
    ) -> None:
        """Begin to read what is in files, into the slot's staging memory. Where this raises, `futures` has
        the reads that had begun."""
        size = self._shape.record_bytes
        step = max(1, _READ_BYTES // size)
        begin = 0
        for run in tile.runs:
            store = stores[run.seq]
            if store.pinned(run.first, run.count) is None:
                if slot.staging is None:
                    slot.staging = self._device.pinned(self.slot_blocks * size)
                for at in range(0, run.count, step):
                    count = min(step, run.count - at)
                    target = slot.staging[(begin + at) * size : (begin + at + count) * size]
                    futures.append(self._submit(store, run.first + at, target, slot.copied))
            begin += run.count

    def _submit(self, store: BlockStore, first: int, target: Bytes, free: Event) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._read_threads, thread_name_prefix="cupaged-read")

        def read() -> None:
            with self._device.current():
                free.synchronize()
            store.read(first, target)

        return self._threads.submit(read)


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for reads that had begun; what they raise no longer matters."""
    for future in futures:
        if not future.cancelled():
            future.exception()
