"""Stores: pinned memory and files; crashes, torn tails, foreign and truncated files, full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import (
    ArgumentValueError,
    StoreDamagedError,
    StoreError,
    StoreFormatError,
    StoreFullError,
)
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat, CacheLayout
from cupaged.streaming import FileStore, PinnedStore, Tail
from cupaged.streaming.device import PAGE, device_of
from cupaged.streaming.store.format import BLOCKS_PER_EXTENT, Header, Places
from tests.rig import Rig
from tests.streaming.crash import LAYOUT, RECORD, blocks, filled, is_right, record

ROOT = Path(__file__).resolve().parents[2]
readers = pytest.mark.parametrize("io", ["mmap", "read", "direct"])


@pytest.fixture(autouse=True)
def _direct_io_where_there_is_some(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Some file systems have none."""
    if request.node.name.endswith(("direct]", "test_short_reads")):
        probe = tmp_path / "probe"
        probe.touch()
        try:
            os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"no direct I/O at {tmp_path}: {error.strerror}")


def abandon(store: FileStore) -> None:
    """As its process leaves it that dies: nothing is synced."""
    os.close(store._descriptor)
    store._reader.close()


@readers
@pytest.mark.parametrize("count", [1, 127, 128, 129, 300])
def test_blocks_come_back(tmp_path: Path, io: str, count: int) -> None:
    filled(tmp_path / "f", count).close()
    with FileStore.open(tmp_path / "f", io=io) as store:
        assert (store.num_blocks, store.tail, store.dropped_blocks) == (count, None, 0)
        assert is_right(store)
        store.verify()
        part = np.empty(RECORD, np.uint8)
        store.read(count - 1, part)
        np.testing.assert_array_equal(part, record(count - 1))


@readers
def test_records_that_are_no_whole_pages(tmp_path: Path, io: str) -> None:
    """Direct reads of these go through a buffer."""
    layout = CacheLayout(FP8, 1, 64, 3)
    data = np.random.default_rng(0).integers(0, 255, (500, 2 * layout.block_stride_bytes), np.uint8)
    with FileStore.create(tmp_path / "f", layout, io=io) as store:
        store.append(data)
        found = np.empty_like(data)
        store.read(0, found.reshape(-1))
        np.testing.assert_array_equal(found, data)


@readers
def test_a_reader_follows_what_is_appended(tmp_path: Path, io: str) -> None:
    with filled(tmp_path / "f", 2, io=io) as store:
        for count in (1, 130, 5):
            store.append(blocks(store.num_blocks, count))
            assert is_right(store)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_header_says_the_layout(tmp_path: Path, fmt: CacheFormat) -> None:
    layout = CacheLayout(fmt, 3, 128, 24)
    user = {"layer": 5, "name": "ä"}
    FileStore.create(tmp_path / "f", layout, k_scale=0.5, v_scale=0.25, user=user).close()
    with FileStore.open(tmp_path / "f") as store:
        assert Places(store._shape).extent_bytes % PAGE == 0
        assert store.layout.pool_shape(2) == layout.pool_shape(2)
        assert store.layout.block_stride_bytes == layout.block_stride_bytes
        assert (store.header.k_scale, store.header.v_scale, store.header.user) == (0.5, 0.25, user)
        assert store.num_blocks == 0


def test_a_tail_is_kept_replaced_and_dropped(tmp_path: Path) -> None:
    filled(tmp_path / "f", 130, tail=3).close()
    with FileStore.open(tmp_path / "f", writable=True) as store:
        assert store.num_blocks == 130
        assert store.tail is not None
        assert store.tail.num_tokens == 3
        np.testing.assert_array_equal(store.tail.record, record(130))
        store.keep_tail(Tail(record(131), 9))
    with FileStore.open(tmp_path / "f", writable=True) as store:
        assert store.tail is not None
        assert store.tail.num_tokens == 9
        store.append(blocks(130, 2))
        assert store.tail is None
    with FileStore.open(tmp_path / "f") as store:
        assert (store.num_blocks, store.tail) == (132, None)
        assert is_right(store)


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.streaming.crash", str(tmp_path), "--runs", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["runs"] == 200
    assert found["blocks"] > 200 * 10


@pytest.mark.parametrize("at", [0, RECORD // 2, RECORD - 1])
@pytest.mark.parametrize("count", [1, 128, 200])
def test_a_torn_record_is_dropped(tmp_path: Path, count: int, at: int) -> None:
    path = tmp_path / "f"
    abandon(filled(path, count))
    change(path, Places(shape()).record(count - 1) + at)
    with pytest.warns(RuntimeWarning, match=f"dropped 1 blocks of a torn tail; {count - 1} complete"):
        store = FileStore.open(path, writable=True)
    with store:
        assert (store.num_blocks, store.dropped_blocks) == (count - 1, 1)
        assert is_right(store)
        store.append(blocks(count - 1, 1))
    with FileStore.open(path) as again:
        assert again.num_blocks == count
        assert is_right(again)


@pytest.mark.parametrize("byte", range(32))
def test_a_torn_entry_is_dropped(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "f"
    abandon(filled(path, 9))
    change(path, Places(shape()).entry(8) + byte)
    with pytest.warns(RuntimeWarning, match="dropped 1 blocks"):
        store = FileStore.open(path)
    with store:
        assert store.num_blocks == 8
        assert is_right(store)


def test_a_torn_tail_leaves_the_complete_blocks(tmp_path: Path) -> None:
    path = tmp_path / "f"
    abandon(filled(path, 5, tail=2))
    change(path, Places(shape()).record(5) + 7)
    with pytest.warns(RuntimeWarning, match="5 complete blocks"), FileStore.open(path) as store:
        assert (store.num_blocks, store.tail) == (5, None)


def test_what_was_dropped_does_not_come_back(tmp_path: Path) -> None:
    """Block 6 is torn; 7 to 9 are whole, but must not follow a new block 6."""
    path = tmp_path / "f"
    abandon(filled(path, 10))
    change(path, Places(shape()).record(6))
    with pytest.warns(RuntimeWarning, match="dropped 4"):
        store = FileStore.open(path, writable=True)
    store.append(blocks(6, 1))
    store.close()
    with FileStore.open(path) as again:
        assert again.num_blocks == 7
        assert is_right(again)


@pytest.mark.parametrize("left", [499, 257, 256, 128, 127, 1, 0])
def test_a_file_cut_short(tmp_path: Path, left: int) -> None:
    path = tmp_path / "f"
    filled(path, 500).close()
    os.truncate(path, Places(shape()).record(left) + RECORD - 1)
    with pytest.raises(
        StoreDamagedError, match=f"f: had 500 complete blocks on the disk, only {left} are left"
    ):
        FileStore.open(path)
    with pytest.warns(RuntimeWarning, match=f"dropped .*; {left} complete blocks"):
        store = FileStore.open(path, recover=True, writable=True)
    with store:
        assert store.num_blocks == left
        store.append(blocks(left, 2))
    with FileStore.open(path) as again:
        assert again.num_blocks == left + 2
        assert is_right(again)


def test_a_torn_tail_behind_synced_blocks(tmp_path: Path) -> None:
    path = tmp_path / "f"
    store = filled(path, 5)
    store.sync()
    store.append(blocks(5, 3))
    abandon(store)
    change(path, Places(shape()).record(6))
    with pytest.warns(RuntimeWarning, match="dropped 2 blocks of a torn tail; 6 complete"):
        FileStore.open(path).close()


def test_durable_appends(tmp_path: Path) -> None:
    path = tmp_path / "f"
    abandon(filled(path, 5, durable=True))
    change(path, Places(shape()).entry(4) + 1)
    with pytest.raises(StoreDamagedError, match="had 5 complete blocks on the disk, only 4 are left"):
        FileStore.open(path)


def test_verifying_finds_damage_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path, 500).close()
    change(path, Places(shape()).record(BLOCKS_PER_EXTENT))
    with FileStore.open(path) as store:
        assert store.num_blocks == 500
        with pytest.raises(StoreDamagedError, match="block 128 does not hold"):
            store.verify()


def test_short_reads(tmp_path: Path) -> None:
    for io in ("mmap", "read", "direct"):
        path = tmp_path / io
        filled(path, 20).close()
        with FileStore.open(path, io=io) as store:
            os.truncate(path, Places(shape()).record(10) + 100)
            with pytest.raises(StoreDamagedError, match=f"{io}: short read: .* of .* bytes at"):
                store.read(0, np.empty(20 * RECORD, np.uint8))
            part = np.empty(5 * RECORD, np.uint8)
            store.read(0, part)
            np.testing.assert_array_equal(part.reshape(5, -1), blocks(0, 5))


@pytest.mark.parametrize("content", [b"", b"CUPAGEKV", b"\0" * PAGE, b"GGUF" * 4096])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(StoreFormatError, match="not a file of cache blocks"):
        FileStore.open(path)


def test_damaged_headers(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path, 1).close()
    page = path.read_bytes()[:PAGE]
    for place, message in ((8, "version"), (12, "damaged"), (16, "damaged"), (30, "damaged")):
        wrong = bytearray(page)
        wrong[place] ^= 0x10
        with pytest.raises(StoreFormatError, match=message):
            Header.unpack(bytes(wrong), "f")
    text = Header(LAYOUT).pack().replace(b'"fp8"', b'"fp9"')
    with pytest.raises(StoreFormatError, match="damaged"):
        Header.unpack(text, "f")


def test_headers_that_cannot_be(tmp_path: Path) -> None:
    import zlib

    def page_of(fields: dict[str, Any]) -> bytes:
        text = json.dumps(fields).encode()
        head = b"CUPAGEKV" + (1).to_bytes(4, "little") + len(text).to_bytes(4, "little")
        return (head + zlib.crc32(text).to_bytes(4, "little") + text).ljust(PAGE, b"\0")

    page = Header(LAYOUT).pack()
    fields = json.loads(page[20 : 20 + int.from_bytes(page[12:16], "little")])
    assert Header.unpack(page_of(fields), "f").layout.block_stride_bytes == LAYOUT.block_stride_bytes
    for change_to in ({"format": "int3"}, {"head_dim": 0}, {"block_size": "x"}, {"blocks_per_extent": 7}):
        with pytest.raises(StoreFormatError, match="what cannot be"):
            Header.unpack(page_of(fields | change_to), "f")
    with pytest.raises(StoreFormatError, match="what cannot be"):
        Header.unpack(page_of({}), "f")


def test_files_that_are_there_or_not(tmp_path: Path) -> None:
    filled(tmp_path / "f", 1).close()
    with pytest.raises(StoreError, match="File exists"):
        FileStore.create(tmp_path / "f", LAYOUT)
    with pytest.raises(StoreError, match="No such file"):
        FileStore.open(tmp_path / "g")
    with pytest.raises(StoreError, match="open for reading only"), FileStore.open(tmp_path / "f") as store:
        store.append(blocks(1, 1))
    with pytest.raises(ArgumentValueError, match="io: got 'tape', allowed are read, mmap, direct"):
        FileStore.open(tmp_path / "f", io="tape")
    with pytest.raises(StoreFormatError, match="user: makes a header of"):
        FileStore.create(tmp_path / "h", LAYOUT, user="x" * PAGE)
    assert not (tmp_path / "h").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with filled(tmp_path / "f", 3):
        with pytest.raises(StoreError, match="open for writing elsewhere"):
            FileStore.open(tmp_path / "f", writable=True)
        with FileStore.open(tmp_path / "f") as reader:
            assert reader.num_blocks == 3
    FileStore.open(tmp_path / "f", writable=True).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("writes", range(3))
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, writes: int) -> None:
    """The disk takes some writes, half of the next, and then no more, until there is room again."""
    store = filled(tmp_path / "f", 126)
    real, left = os.pwrite, [writes]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < -1:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data[: len(data) // 2] if left[0] < 0 else data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreFullError, match=f"f: writing .* failed after .*: {os.strerror(code)}"):
        store.append(blocks(126, 5))
    monkeypatch.undo()
    assert store.num_blocks == 126
    assert is_right(store)
    store.append(blocks(126, 5))
    store.close()
    with FileStore.open(tmp_path / "f") as again:
        assert again.num_blocks == 131
        assert is_right(again)


def test_a_pinned_store(rig: Rig) -> None:
    store = PinnedStore(rig.gpu, LAYOUT, 5)
    store.append(blocks(0, 2))
    store.keep_tail(Tail(record(7), 3))
    assert store.tail is not None
    store.append(blocks(2, 3))
    assert (store.num_blocks, store.tail) == (5, None)
    np.testing.assert_array_equal(store.pinned(1, 3).reshape(3, -1), blocks(1, 3))
    with pytest.raises(StoreFullError, match="of 5 blocks has 5; 1 more"):
        store.append(blocks(5, 1))
    with pytest.raises(ArgumentValueError, match="blocks: got 4 to 6, the store has 5"):
        store.pinned(4, 2)
    with pytest.raises(ArgumentValueError, match="capacity_blocks: got 0"):
        PinnedStore(rig.gpu, LAYOUT, 0)
    with pytest.raises(ArgumentValueError, match=r"records: got uint8 \(2, 8\), allowed is uint8 \[n, 4096"):
        store.append(np.zeros((2, 8), np.uint8))
    with pytest.raises(ArgumentValueError, match=r"tail.num_tokens: got 16, allowed is 1 to 15"):
        store.keep_tail(Tail(record(7), 16))


def test_a_pinned_store_in_memory_of_the_callers(rig: Rig) -> None:
    memory = device_of(rig.gpu).pinned(5 * RECORD)
    store = PinnedStore(rig.gpu, LAYOUT, 4, memory=memory)
    store.reserve(2)[...] = blocks(0, 2)
    store.append(blocks(2, 1))
    np.testing.assert_array_equal(memory[: 3 * RECORD].reshape(3, -1), blocks(0, 3))
    with pytest.raises(
        ArgumentValueError, match=r"memory: got uint8 \(20480,\), allowed is uint8 with 24576"
    ):
        PinnedStore(rig.gpu, LAYOUT, 6, memory=memory)


def test_layouts_that_kernels_cannot_read(rig: Rig) -> None:
    with pytest.raises(ArgumentValueError, match="heads_first is True"):
        PinnedStore(rig.gpu, CacheLayout(BF16, 2, 64, 16, heads_first=True), 1)
    with pytest.raises(ArgumentValueError, match="its blocks are 136 bytes apart"):
        PinnedStore(rig.gpu, CacheLayout(BF16, 1, 68, 1), 1)


def change(path: Path, offset: int) -> None:
    """Another byte there."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x55]))


def shape() -> Any:
    from cupaged.streaming.records import RecordLayout

    return RecordLayout(LAYOUT)
