"""The order of copies and steps: streams as queues that run as late, or as early, as events allow.

On the emulator everything happens at once, so that a missing wait would do no harm. Here a copy, an event or
a kernel is only queued, and runs when something that was waited for needs it, or as soon as it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.formats import FORMATS, FP8, CacheFormat
from cupaged.streaming import decoder as decoder_module
from cupaged.streaming import transfer
from cupaged.streaming.device import Bytes, HostDevice
from cupaged.streaming.step import Step
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import file_store, make_decoder, open_all, pinned_store, random_context

COMPUTE, COPY = 0, 1
EAGER = {"late": (), "copies early": (COPY,), "steps early": (COMPUTE,), "both early": (COPY, COMPUTE)}


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
            COMPUTE: deque(),
            COPY: deque(),
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

    def memset(self, pointer: int, value: int, num_bytes: int, stream: int) -> None:
        self.streams.push(
            stream, None, lambda: EmulatorBackend.memset(self, pointer, value, num_bytes, stream)
        )


def queue_everything(monkeypatch: pytest.MonkeyPatch, policy: str) -> Streams:
    """The streaming decoder's copies, events and kernels go through queues."""
    streams = Streams(EAGER[policy])
    monkeypatch.setattr(decoder_module, "device_of", lambda gpu: QueuedDevice(streams))
    for name in ("fold", "merge", "finalize"):
        real = getattr(Step, name)

        def queued(self: Step, *args: Any, real: Any = real, **kwargs: Any) -> None:
            streams.push(COMPUTE, None, lambda: real(self, *args, **kwargs))

        monkeypatch.setattr(Step, name, queued)
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


def without(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """Slots whose event of that name is never waited for on the host."""
    real = transfer.Slot.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        getattr(self, event).synchronize = lambda: None

    monkeypatch.setattr(transfer.Slot, "__init__", init)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "steps do not wait for copies": lambda m: m.setattr(QueuedEvent, "wait", lambda self, stream: None),
    "slots are filled before their step": lambda m: without(m, "done"),
    "staging is filled before its copy": lambda m: without(m, "copied"),
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
            except AssertionError:
                found.append(policy)
    assert found
