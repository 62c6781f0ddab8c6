"""What is left behind where something in the middle fails: everything is given back, or stays usable."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import (
    ArgumentValueError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StreamingCancelledError,
)
from cupaged.formats import BF16, FP8, CacheLayout
from cupaged.streaming import FileStore, PinnedStore, StreamingDecoder, Tail, Trace
from cupaged.streaming.device import HostDevice, device_of
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.tables import UploadBuffer
from cupaged.streaming.tiles import Run, Tile
from cupaged.streaming.transfer import Pipeline
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    Context,
    cut,
    decode,
    file_store,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
    truncate,
)
from tests.streaming.crash import LAYOUT, RECORD


def test_an_open_that_fails_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    """The room of the first sequence comes back too."""
    context = random_context(FP8, [160, 163])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=10)
    first = decoder.open(pinned_store(rig, context, 0))
    file = file_store(tmp_path, context, 1)
    whole = truncate(file.path, context.layout, 2)
    for _ in range(3):
        with pytest.raises(StoreDamagedError, match="short read"):
            decoder.open(file)
        assert len(first.resident) == 10
    file.path.write_bytes(whole)
    second = decoder.open(file)
    assert [len(s.resident) for s in (first, second)] == [5, 5]
    assert_matches(decode(rig, decoder, context, [first, second]), context.expected())


def test_a_store_with_a_tail_that_cannot_be(rig: Rig) -> None:
    context = random_context(FP8, [20])
    decoder = make_decoder(rig, context, tile_blocks=2)
    store = pinned_store(rig, context, 0)
    right, store._tail = store._tail, Tail(np.zeros(8, np.uint8), 3)
    with pytest.raises(ArgumentValueError, match=r"tail\.record: got shape \(8,\)"):
        decoder.open(store)
    store._tail = right
    assert_matches(decode(rig, decoder, context, [decoder.open(store)]), context.expected())


def test_closing_what_was_only_read(rig: Rig, tmp_path: Path) -> None:
    context = random_context(FP8, [41])
    file_store(tmp_path, context, 0).close()
    content = (tmp_path / "0.kv").read_bytes()
    decoder = make_decoder(rig, context, tile_blocks=2)
    for _ in range(2):
        with FileStore.open(tmp_path / "0.kv") as store:
            sequence = decoder.open(store)
            assert_matches(decode(rig, decoder, context, [sequence]), context.expected())
            decoder.close(sequence)
    assert (tmp_path / "0.kv").read_bytes() == content


@pytest.mark.parametrize("kind", ["read only", "closed", "full"])
def test_a_tail_that_the_store_does_not_take(rig: Rig, tmp_path: Path, kind: str) -> None:
    """The sequence stays open and whole, until the caller gives the tail up."""
    whole = random_context(FP8, [48])
    start = cut(whole, [41])
    if kind == "full":
        store: Any = PinnedStore(rig.gpu, whole.layout, 2)
        store.append(start.records(0)[0])
        store.keep_tail(start.records(0)[1])
    else:
        file_store(tmp_path, start, 0).close()
        store = FileStore.open(tmp_path / "0.kv", writable=kind == "closed")
    decoder = make_decoder(rig, whole, tile_blocks=2)
    sequence = decoder.open(store)
    count = 7 if kind == "full" else 1
    rows = [rig.upload(x[0][41 : 41 + count]) for x in (whole.keys, whole.values)]
    if kind == "full":
        with pytest.raises(StoreFullError):
            decoder.extend(sequence, *rows, count, stream=rig.stream)
    else:
        decoder.extend(sequence, *rows, count, stream=rig.stream)
    if kind == "closed":
        store.close()
    with pytest.raises(StoreError):
        decoder.close(sequence)
    assert sequence.num_tokens == 41 + count
    if kind != "closed":
        now = cut(whole, [41 + count])
        assert_matches(decode(rig, decoder, now, [sequence]), now.expected())
    decoder.close(sequence, keep_tail=False)
    assert sequence.closed
    decoder.open(PinnedStore(rig.gpu, whole.layout, 1))
    if kind != "full":
        store.close()
        store = FileStore.open(tmp_path / "0.kv")
    assert (store.num_blocks, store.tail.num_tokens) == (2, 9)


def test_closing_beside_a_damaged_file(rig: Rig, tmp_path: Path) -> None:
    """The room goes to the other sequence, which cannot take it: its own decode says why."""
    context = random_context(FP8, [160, 160])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=10)
    file = file_store(tmp_path, context, 1)
    first, second = open_all(decoder, [pinned_store(rig, context, 0), file])
    whole = truncate(file.path, context.layout, 6)
    decoder.close(first)
    assert first.closed
    alone = Context(context.layout, context.q[1:], context.keys[1:], context.values[1:])
    with pytest.raises(StoreDamagedError):
        decode(rig, decoder, alone, [second])
    file.path.write_bytes(whole)
    assert_matches(decode(rig, decoder, alone, [second]), alone.expected())
    decoder.open(pinned_store(rig, context, 0))
    assert [len(second.resident)] == [5]


def test_a_full_store_does_not_hold_up_the_others(rig: Rig) -> None:
    context = random_context(BF16, [16, 17], block_size=4)
    decoder = make_decoder(rig, context, tile_blocks=2)
    full, other = open_all(
        decoder, [PinnedStore(rig.gpu, context.layout, 1), PinnedStore(rig.gpu, context.layout, 9)]
    )
    keys, values = (rig.upload(x[0][:8]) for x in (context.keys, context.values))
    with pytest.raises(StoreFullError):
        decoder.extend(full, keys, values, 8, stream=rig.stream)
    for step in range(17):
        rows = [rig.upload(x[1][step : step + 1]) for x in (context.keys, context.values)]
        decoder.append([other], *rows, stream=rig.stream)
    assert (full.num_tokens, other.num_tokens, other.store.num_blocks) == (8, 17, 4)
    rows = [rig.upload(np.stack([x[0][8], x[1][0]])) for x in (context.keys, context.values)]
    with pytest.raises(StoreFullError):
        decoder.append([full, other], *rows, stream=rig.stream)
    assert (full.num_tokens, other.num_tokens) == (8, 17)
    with pytest.raises(StoreFullError):
        decoder.append([], None, None, stream=rig.stream)


def test_a_full_tail_takes_no_tokens(rig: Rig) -> None:
    """Neither of a second call: it raises again at once, and the tail holds what it held."""
    layout = CacheLayout(BF16, 2, 64, 16)
    decoder = StreamingDecoder(rig.gpu, layout, 4, scratch_bytes=1 << 20)
    sequence = decoder.open(PinnedStore(rig.gpu, layout, 1))
    tokens, raised = rig.full_bf16((32, 2, 64), 0), []
    with pytest.raises(StoreFullError):
        decoder.extend(sequence, tokens, tokens, 32, stream=rig.stream)

    def again() -> None:
        try:
            decoder.extend(sequence, tokens, tokens, 1, stream=rig.stream)
        except StoreFullError as error:
            raised.append(error)

    thread = threading.Thread(target=again, daemon=True)  # where no token is ever taken, it would not end
    thread.start()
    thread.join(20)
    assert raised
    assert sequence.num_tokens == 32


def test_a_store_is_open_once(rig: Rig) -> None:
    context = random_context(BF16, [16, 16])
    decoder = make_decoder(rig, context, tile_blocks=2)
    store = pinned_store(rig, context, 0)
    sequence = decoder.open(store)
    with pytest.raises(ArgumentValueError, match="store: is open in this decoder"):
        decoder.open(store)
    decoder.close(sequence)
    decoder.open(store)


def test_scales_are_compared_as_kernels_take_them(rig: Rig, tmp_path: Path) -> None:
    layout = CacheLayout(FP8, 2, 64, 16)
    store = FileStore.create(tmp_path / "f", layout, k_scale=0.1, v_scale=np.float32(0.2))
    k_scale: Any = np.float32(0.1)
    StreamingDecoder(rig.gpu, layout, 4, scratch_bytes=1 << 16, k_scale=k_scale, v_scale=0.2).open(store)


def test_a_trace_of_a_step_that_was_cancelled(rig: Rig) -> None:
    context = random_context(FP8, [160])
    decoder = make_decoder(rig, context, tile_blocks=2)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])
    trace, asked = Trace(), iter([False, False, True])
    with pytest.raises(StreamingCancelledError):
        decode(rig, decoder, context, sequences, trace=trace, cancelled=lambda: next(asked))
    assert len(trace.rows()) == 2
    trace = Trace()
    store: Any = sequences[0].store
    store.pinned = lambda first, count: _pinned_or_fail(store, first, count)
    with pytest.raises(ZeroDivisionError):
        decode(rig, decoder, context, sequences, trace=trace)
    assert [tile.num_bytes for tile in trace.tiles] == [2 * 2 * context.layout.block_stride_bytes]


def _pinned_or_fail(store: PinnedStore, first: int, count: int) -> Any:
    """The pipeline looks at the first tiles' memory before it copies; the copy of the second tile fails."""
    found = PinnedStore.pinned(store, first, count)
    looked = store.__dict__.setdefault("looked", [])
    looked.append(first)
    if first == 2 and looked.count(2) > 1:
        raise ZeroDivisionError
    return found


# ---- the pipeline


class CountedEvent:
    """Knows how often it was recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, stream: int) -> None:
        self.recorded += 1

    def wait(self, stream: int) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CountingDevice(HostDevice):
    def event(self, *, timing: bool = False) -> Any:
        return CountedEvent()


class SlowStore:
    """Its blocks must be read, which takes until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Event()
        self.ended = False

    def pinned(self, first: int, count: int) -> None:
        """They must be read."""

    def read(self, first: int, target: Any) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        self.ended = True


class FailingStore:
    """Fails where it is asked for the nth time."""

    def __init__(self, at: int, before: Any = None) -> None:
        self._left = at
        self._before = before

    def pinned(self, first: int, count: int) -> Any:
        self._left -= 1
        if self._left < 0:
            if self._before:
                self._before()
            raise ZeroDivisionError
        return np.zeros(count * RECORD, np.uint8)


def pipeline(rig: Rig) -> Pipeline:
    return Pipeline(rig.gpu, CountingDevice(), RecordLayout(LAYOUT), 2, 4, 1)


def run(pipe: Pipeline, stores: list[Any]) -> None:
    tile = Tile(tuple(Run(seq, 0, 1) for seq in range(len(stores))))
    pipe.run([tile], stores, lambda *_: None, 0, lambda _: None, None)


@pytest.fixture
def emulated(rig: Rig) -> Rig:
    if rig.name != "emulator":
        pytest.skip("copies of a fake device")
    return rig


def test_reads_that_had_begun_are_waited_for(emulated: Rig) -> None:
    """Else they would write into staging memory that the next step uses."""
    slow = SlowStore()
    pipe = pipeline(emulated)

    def release_soon() -> None:
        assert slow.begun.wait(60)
        threading.Timer(0.2, slow.may_end.set).start()

    with pytest.raises(ZeroDivisionError):
        run(pipe, [slow, FailingStore(0, release_soon)])
    assert slow.ended
    pipe.close()


def test_copies_that_were_queued_are_waited_for(emulated: Rig) -> None:
    pipe = pipeline(emulated)
    with pytest.raises(ZeroDivisionError):
        run(pipe, [FailingStore(9), FailingStore(1)])
    copied: Any = pipe.slots[0].copied
    assert copied.recorded == 1


def test_a_buffer_that_cannot_grow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device memory grow together, or neither."""
    buffer = UploadBuffer(rig.gpu, device_of(rig.gpu))
    small, large = np.arange(8, dtype=np.int32), np.arange(5000, dtype=np.int32)
    buffer.put(small, rig.stream)
    monkeypatch.setattr(rig.gpu, "empty", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            buffer.put(large, rig.stream)
    buffer.put(small, rig.stream)
    monkeypatch.undo()
    address = buffer.put(large, rig.stream)
    assert address == int(rig.gpu.pointer(buffer._memory))
    assert buffer._memory.nbytes >= large.nbytes
    rig.gpu.synchronize()
    found = rig.download(buffer._memory)[: large.nbytes].view(np.int32)
    np.testing.assert_array_equal(found, large)
