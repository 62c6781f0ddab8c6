"""Files where something fails: no descriptor is left, nothing that was stored is lost, closed is closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ArgumentValueError, StoreDamagedError, StoreError
from cupaged.streaming import FileStore, PinnedStore, Tail
from cupaged.streaming.store.format import CHECKPOINT_OFFSET
from tests.rig import Rig
from tests.streaming.contexts import truncate
from tests.streaming.crash import LAYOUT, RECORD, filled, is_right, record


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_writes_that_take_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write fewer bytes than it is given: the rest follows where it belongs."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda where, data, at: write(where, data[:100], at))
    with filled(tmp_path / "f", 3, tail=5) as store:
        store.verify()
        assert is_right(store)
    monkeypatch.undo()
    with FileStore.open(tmp_path / "f") as store:
        assert is_right(store)
        assert store.tail is not None
        np.testing.assert_array_equal(store.tail.record, record(3))


def test_blocks_are_on_the_disk_before_their_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a durable store: record, wait, entry, wait, checkpoint, wait; so the disk cannot swap them."""
    done: list[int | str] = []
    store = FileStore.create(tmp_path / "f", LAYOUT, durable=True)
    write, sync, places = os.pwrite, os.fdatasync, store._places

    def pwrite(where: int, data: Any, at: int) -> int:
        done.append(at)
        return write(where, data, at)

    def fdatasync(where: int) -> None:
        done.append("wait")
        sync(where)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    store.append(record(0).reshape(1, -1))
    assert done == [places.record(0), "wait", places.entry(0), "wait", CHECKPOINT_OFFSET, "wait"]
    store.close()


def test_what_was_recovered_once_opens_without(tmp_path: Path) -> None:
    """Though whoever recovered it died: the file says at once how many blocks are left."""
    path = tmp_path / "f"
    filled(path, 4).close()
    truncate(path, LAYOUT, 2)
    with pytest.warns(RuntimeWarning, match="2 complete blocks"):
        store = FileStore.open(path, writable=True, recover=True)
    os.close(store._descriptor)  # as the process leaves it that dies
    store._reader.close()
    with FileStore.open(path) as again:
        assert again.num_blocks == 2
        assert is_right(again)


@pytest.mark.parametrize("io", ["mmap", "read"])
def test_a_closed_store_reads_no_other_file(tmp_path: Path, io: str) -> None:
    store = filled(tmp_path / "f", 3, io=io)
    target = np.empty(RECORD, np.uint8)
    store.read(0, target)
    store.close()
    (tmp_path / "other").write_bytes(b"\x63" * (1 << 20))
    reused = [os.open(tmp_path / "other", os.O_RDONLY) for _ in range(4)]
    reader = store._reader
    calls: list[Any] = [
        lambda: store.read(0, target),
        lambda: reader.read(0, target),
        lambda: store.pinned(0, 1),
        lambda: store.append(record(3).reshape(1, -1)),
        lambda: store.keep_tail(Tail(record(3), 2)),
        store.sync,
        store.verify,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="f: closed"):
            call()
    store.close()
    for descriptor in reused:
        os.close(descriptor)  # none was closed in the store's place


def test_failing_opens_and_creates_leave_no_descriptor(tmp_path: Path) -> None:
    filled(tmp_path / "f", 5).close()
    truncate(tmp_path / "f", LAYOUT, 2)
    before = descriptors()
    for _ in range(5):
        with pytest.raises(StoreDamagedError):
            FileStore.open(tmp_path / "f")
        with pytest.raises(ArgumentValueError, match="io: got"):
            FileStore.create(tmp_path / "g", LAYOUT, io="tape")
        with pytest.raises(ArgumentValueError, match="io: got"):
            FileStore.open(tmp_path / "f", io=[])  # type: ignore[arg-type]
    assert descriptors() == before
    assert not (tmp_path / "g").exists()


def test_a_close_that_cannot_sync_gives_the_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    store = filled(tmp_path / "f", 5)
    monkeypatch.setattr(os, "fdatasync", _input_output_error)
    with pytest.raises(StoreError, match="f: writing to the disk failed: Input/output error"):
        store.close()
    monkeypatch.undo()
    assert descriptors() == before
    store.close()
    with FileStore.open(tmp_path / "f", writable=True) as again:
        assert again.num_blocks == 5
        assert is_right(again)


def _input_output_error(*_: Any) -> None:
    raise OSError(5, os.strerror(5))


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("fails", range(8))
def test_an_append_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int, durable: bool, fails: int
) -> None:
    """One write or sync fails, whichever it is: the blocks and the tail are those of before."""
    store = filled(tmp_path / "f", 127, tail, durable=durable)
    done = [0]

    def sometimes(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            done[0] += 1
            if done[0] == fails + 1:
                _input_output_error()
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "pwrite", sometimes(os.pwrite))
    monkeypatch.setattr(os, "fdatasync", sometimes(os.fdatasync))
    new = np.stack([record(127), record(128)])
    try:
        store.append(new)
        added = 2
    except StoreError:
        added = 0
    assert (added == 0) == (done[0] > fails)
    monkeypatch.undo()
    assert store.num_blocks == 127 + added
    with FileStore.open(tmp_path / "f") as other:  # as after the death of its process
        assert other.num_blocks == 127 + added
        assert other.dropped_blocks == 0
        assert is_right(other)
        assert (other.tail.num_tokens if other.tail else 0) == (0 if added else tail)
    if not added:
        store.append(new)
    store.close()
    with FileStore.open(tmp_path / "f") as again:
        assert (again.num_blocks, again.tail) == (129, None)
        assert is_right(again)


def test_a_tail_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "f", 4, tail=3)
    real, left = os.pwrite, [1]

    def pwrite(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] == -1:
            _input_output_error()
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match="Input/output"):
        store.keep_tail(Tail(record(9), 7))
    monkeypatch.undo()
    for found in (store, FileStore.open(tmp_path / "f")):
        assert found.tail is not None
        assert found.tail.num_tokens == 3
        np.testing.assert_array_equal(found.tail.record, record(4))


def test_nothing_appended_keeps_the_tail(rig: Rig, tmp_path: Path) -> None:
    stores: list[Any] = [PinnedStore(rig.gpu, LAYOUT, 2), FileStore.create(tmp_path / "f", LAYOUT)]
    for store in stores:
        store.keep_tail(Tail(record(0), 3))
        store.append(np.empty((0, RECORD), np.uint8))
        assert store.tail.num_tokens == 3
    stores[0].reserve(0)
    assert stores[0].tail.num_tokens == 3
