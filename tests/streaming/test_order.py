"""The order of copies and steps: streams as queues that run as late, or as early, as events allow.

On the emulator everything happens at once, so that a missing wait would do no harm. Here a copy, an event or
a kernel is only queued, and runs when something that was waited for needs it, or as soon as it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.formats import FORMATS, FP8, CacheFormat
from cupaged.streaming import PinnedStore, StreamedSequence, transfer
from cupaged.streaming import decoder as decoder_module
from cupaged.streaming import pool as pool_module
from cupaged.streaming.device import Bytes, HostDevice
from cupaged.streaming.pool import RecordPool
from cupaged.streaming.step import Step
from cupaged.streaming.tables import Tables, UploadBuffer
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    Context,
    file_store,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
)
from tests.streaming.crash import LAYOUT

COMPUTE, COPY, NULL = 0, 1, 2  # NULL is what a backend says is its default stream
EAGER = {
    "late": (),
    "copies early": (COPY,),
    "loads early": (NULL,),
    "steps early": (COMPUTE,),
    "all early": (NULL, COPY, COMPUTE),
}


class QueuedEvent:
    """Reached once the last record of it has run."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._recorded = self.reached = 0
        self.recorded_on = COMPUTE

    def record(self, stream: int) -> None:
        self.recorded_on = stream
        self._recorded += 1
        number = self._recorded
        self._streams.push(stream, None, lambda: setattr(self, "reached", number))

    def wait(self, stream: int) -> None:
        self._streams.push(stream, (self, self._recorded), lambda: None)

    def synchronize(self) -> None:
        self._streams.reach(self, self._recorded)

    def milliseconds_since(self, other: Any) -> float:
        return 0.0


Gate = tuple[QueuedEvent, int]


class Streams:
    """Queues of (what must be reached first, what to do)."""

    def __init__(self, eager: tuple[int, ...]) -> None:
        self._queues: dict[int, deque[tuple[Gate | None, Callable[[], object]]]] = {
            stream: deque() for stream in (COMPUTE, COPY, NULL)
        }
        self._eager = eager

    def push(self, stream: int, gate: Gate | None, work: Callable[[], object]) -> None:
        self._queues[stream].append((gate, work))
        self._run_eager()

    def _run_eager(self) -> None:
        moved = True
        while moved:
            moved = False
            for stream in self._eager:
                queue = self._queues[stream]
                while queue and (queue[0][0] is None or queue[0][0][0].reached >= queue[0][0][1]):
                    queue.popleft()[1]()
                    moved = True

    def reach(self, event: QueuedEvent, number: int) -> None:
        """Run what must run for it, and nothing else but what is eager."""
        while event.reached < number:
            self._advance(event.recorded_on)

    def _advance(self, stream: int) -> None:
        """One piece of work of a stream, or of what it waits for."""
        queue = self._queues[stream]
        gate = queue[0][0]
        if gate is not None and gate[0].reached < gate[1]:
            self._advance(gate[0].recorded_on)
            return
        queue.popleft()[1]()
        self._run_eager()

    def finish(self) -> None:
        """Run all there is."""
        while True:
            busy = [stream for stream, queue in self._queues.items() if queue]
            if not busy:
                return
            self._advance(busy[0])


class QueuedDevice(HostDevice):
    """Copies are queued; their source is read when they run."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def stream(self) -> int:
        return COPY

    def event(self, *, timing: bool = False) -> Any:
        return QueuedEvent(self._streams)

    def to_device(self, target: int, source: Bytes, stream: int) -> None:
        self._streams.push(stream, None, lambda: HostDevice.to_device(self, target, source, stream))

    def to_host(self, target: Bytes, source: int, stream: int) -> None:
        self._streams.push(stream, None, lambda: HostDevice.to_host(self, target, source, stream))


class QueuedBackend(EmulatorBackend):
    """Waiting for the device runs the queues."""

    streams: Streams

    def synchronize(self, stream: int | None = None) -> None:
        if hasattr(self, "streams"):
            self.streams.finish()

    def null_stream(self) -> int:
        return NULL

    def memset(self, pointer: int, value: int, num_bytes: int, stream: int) -> None:
        self.streams.push(
            stream, None, lambda: EmulatorBackend.memset(self, pointer, value, num_bytes, stream)
        )


def queue_everything(monkeypatch: pytest.MonkeyPatch, policy: str) -> Streams:
    """The streaming decoder's copies, events and kernels go through queues."""
    streams = Streams(EAGER[policy])
    monkeypatch.setattr(pool_module, "_STAGING_BYTES", 1)  # one record, so that loading uses it again
    monkeypatch.setattr(decoder_module, "device_of", lambda gpu: QueuedDevice(streams))
    for owner, name in ((Step, "fold"), (Step, "merge"), (Step, "finalize"), (RecordPool, "write")):
        real = getattr(owner, name)

        def queued(self: Any, *args: Any, real: Any = real, **kwargs: Any) -> None:
            streams.push(COMPUTE, None, lambda: real(self, *args, **kwargs))

        monkeypatch.setattr(owner, name, queued)
    return streams


def decode_twice(streams: Streams, fmt: CacheFormat, folder: Path | None) -> None:
    gpu = QueuedBackend()
    gpu.streams = streams
    rig = Rig(gpu)
    context = random_context(fmt, [330, 100])
    decoder = make_decoder(rig, context, tile_blocks=2, slots=3, resident_blocks=2)
    stores = [
        pinned_store(rig, context, seq) if folder is None or seq == 1 else file_store(folder, context, seq)
        for seq in range(2)
    ]
    sequences = open_all(decoder, stores)
    q = rig.upload(context.q)
    outputs = [rig.full_bf16(context.q.shape) for _ in range(2)]
    for output in outputs:  # the second is queued while the first may still be under way
        decoder.decode(q, sequences, output, stream=COMPUTE)
    gpu.synchronize()
    for output in outputs:
        assert_matches(rig.download_bf16(output), context.expected())
    decoder.shutdown()


class Growing:
    """Three sequences that grow, go and come, with nothing that waits but the decoder itself."""

    def __init__(self, streams: Streams, fmt: CacheFormat, folder: Path | None) -> None:
        self.gpu = QueuedBackend()
        self.gpu.streams = streams
        self.rig, self.whole = Rig(self.gpu), random_context(fmt, [90, 61, 48])
        self.lengths = [60, 31, 48]  # the last without a tail
        now = first_tokens(self.whole, self.lengths)
        self.stores = [
            pinned_store(self.rig, now, seq) if folder is None or seq == 1 else file_store(folder, now, seq)
            for seq in range(3)
        ]
        self.decoder = make_decoder(self.rig, now, tile_blocks=1, slots=2, resident_blocks=4)
        self.sequences = open_all(self.decoder, self.stores[:2])
        self._arrays: list[Any] = []  # that queued work reads
        self._results: list[tuple[Any, Any]] = []

    def upload(self, array: Any) -> Any:
        self._arrays.append(self.rig.upload(array))
        return self._arrays[-1]

    def decode(self, *which: int) -> None:
        """These sequences, to be compared at the end."""
        sequences, order = [self.sequences[i] for i in which], list(which)
        assert [s.num_tokens for s in sequences] == [self.lengths[i] for i in which]
        q = self.whole.q[order]
        output = self.rig.full_bf16(q.shape)
        self.decoder.decode(self.upload(q), sequences, output, stream=COMPUTE)
        self._results.append((output, first_tokens(self.whole, self.lengths).expected()[order]))

    def append(self) -> None:
        """A token to each of the first two."""
        kinds = (self.whole.keys, self.whole.values)
        key, value = (np.stack([rows[seq][self.lengths[seq]] for seq in range(2)]) for rows in kinds)
        self.decoder.append(self.sequences[:2], self.upload(key), self.upload(value), stream=COMPUTE)
        self.lengths[:2] = [n + 1 for n in self.lengths[:2]]

    def extend(self, seq: int) -> None:
        """To all of its tokens."""
        rows = [self.upload(rows[seq][self.lengths[seq] :]) for rows in (self.whole.keys, self.whole.values)]
        self.decoder.extend(self.sequences[seq], *rows, len(rows[0]), stream=COMPUTE)
        self.lengths[seq] += len(rows[0])

    def compare(self) -> None:
        self.gpu.synchronize()
        for output, exact in self._results:
            assert_matches(self.rig.download_bf16(output), exact)
        self.decoder.shutdown()


def grow_and_settle(streams: Streams, fmt: CacheFormat, folder: Path | None) -> None:
    """Past block ends one by one and many at once; what stays on the GPU changes owners both ways."""
    growing = Growing(streams, fmt, folder)
    growing.decode(0, 1)
    for _ in range(5):
        growing.append()
        growing.decode(0, 1)
    growing.extend(0)
    growing.extend(1)
    growing.decode(0, 1)
    growing.decode(0)  # few tiles: nothing else makes its first step run before the next line
    growing.sequences.append(growing.decoder.open(growing.stores[2]))
    growing.decode(0, 1, 2)
    growing.decode(1)
    growing.decoder.close(growing.sequences[0])
    growing.decode(1)
    growing.sequences[0] = growing.decoder.open(growing.stores[0])
    growing.decode(0, 1, 2)
    growing.compare()


def first_tokens(context: Context, lengths: list[int]) -> Context:
    """Of each sequence."""
    keys, values = (
        [rows[:n] for rows, n in zip(every, lengths, strict=True)] for every in (context.keys, context.values)
    )
    return Context(context.layout, context.q, keys, values)


class LateRead:
    """In place of a thread's future: a read that happens when its result is asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def result(self) -> None:
        self._work()

    def cancel(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return True


class EarlyRead(LateRead):
    """A read that happens at once."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        super().__init__(lambda: None)


class NoThreads:
    """In place of a pool of threads, which could not run the queues."""

    read: type[LateRead] = LateRead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> LateRead:
        return self.read(work)

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ThreadPoolExecutor", NoThreads)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("policy", EAGER)
@pytest.mark.parametrize("kind", ["pinned", "file, late", "file, early"])
def test_nothing_is_used_too_early_or_overwritten(
    fmt: CacheFormat, policy: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoThreads, "read", EarlyRead if kind == "file, early" else LateRead)
    streams = queue_everything(monkeypatch, policy)
    decode_twice(streams, fmt, None if kind == "pinned" else tmp_path)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("policy", EAGER)
@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_tokens_and_blocks_are_where_they_belong(
    fmt: CacheFormat, policy: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = queue_everything(monkeypatch, policy)
    grow_and_settle(streams, fmt, None if kind == "pinned" else tmp_path)


def test_a_table_is_copied_on_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each stream, as long as the same blocks are resident: another one would not wait for it."""
    seen: list[tuple[int, int]] = []
    put = UploadBuffer.put

    def noted(self: UploadBuffer, content: Any, stream: int) -> int:
        seen.append((content.ndim, stream))
        return put(self, content, stream)

    monkeypatch.setattr(UploadBuffer, "put", noted)
    tables = Tables(EmulatorBackend(), HostDevice())
    sequence: Any = StreamedSequence(PinnedStore(EmulatorBackend(), LAYOUT, 1), 3, tail_tokens=2)
    for stream in (COMPUTE, COMPUTE, COPY):
        tables.resident([sequence], 16, stream)
    assert [which for which in seen if which[0] == 2] == [(2, COMPUTE), (2, COPY)]


def without(monkeypatch: pytest.MonkeyPatch, event: str, owner: type = transfer.Slot) -> None:
    """Objects whose event of that name is never waited for on the host."""
    real = owner.__init__  # type: ignore[misc]

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        getattr(self, event).synchronize = lambda: None

    monkeypatch.setattr(owner, "__init__", init)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "steps do not wait for copies": lambda m: m.setattr(QueuedEvent, "wait", lambda self, stream: None),
    "slots are filled before their step": lambda m: without(m, "done"),
    "staging is filled before its copy": lambda m: without(m, "copied"),
    "tails are stored before their copy": lambda m: without(m, "_copied", RecordPool),
    "tables are written before their copy": lambda m: without(m, "_copied", UploadBuffer),
    "blocks change owners while they are read": lambda m: m.setattr(
        QueuedBackend, "synchronize", lambda self, stream=None: None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_left_out_is_found(fault: str, tmp_path: Path) -> None:
    """Under at least one policy."""
    found = []
    for number, policy in enumerate(EAGER):
        (tmp_path / str(number)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NoThreads, "read", EarlyRead)
            streams = queue_everything(patch, policy)
            FAULTS[fault](patch)
            try:
                decode_twice(streams, FP8, tmp_path / str(number))
                grow_and_settle(streams, FP8, None)
            except AssertionError:
                found.append(policy)
    assert found
