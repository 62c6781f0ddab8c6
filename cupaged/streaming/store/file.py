"""Blocks in a file: appended while decoding, whole after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError, StoreDamagedError, StoreError
from cupaged.formats import CacheLayout
from cupaged.launch import flag
from cupaged.streaming.device import PAGE, Bytes
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store import format as file_format
from cupaged.streaming.store.base import Tail, check_range, check_records, check_tail, check_target
from cupaged.streaming.store.format import BLOCKS_PER_EXTENT, ENTRY, Header, Places
from cupaged.streaming.store.io import Reader, flush, make_reader, read_some, write_all


class FileStore:
    """The complete blocks of one sequence in a file. Made by `create` or `open`.

    A block is written before its index entry, so that a process that dies leaves all blocks it had entered.
    Against a failing machine, `sync` (or ``durable=True``) makes the disk keep that order.

    Attributes:
        path: of the file.
        header: what it says about its blocks.
        dropped_blocks: blocks of a torn tail that opening dropped.
    """

    def __init__(
        self, path: Path, header: Header, descriptor: int, reader: Reader, *, durable: bool, writable: bool
    ) -> None:
        self.path = path
        self.header = header
        self.dropped_blocks = 0
        self._shape = RecordLayout(header.layout)
        self._places = Places(self._shape)
        self._descriptor = descriptor
        self._durable = durable
        self._writable = writable
        self._num_blocks = 0
        self._tail: Tail | None = None
        self._reader = reader

    # ---- making and opening

    @classmethod
    def create(
        cls,
        path: str | Path,
        layout: CacheLayout,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        user: Any = None,
        io: str = "mmap",
        durable: bool = False,
    ) -> FileStore:
        """A new file.

        Args:
            path: where; there must be no file yet.
            layout: of a block of K or V.
            k_scale: FP8 dequantisation scale of K.
            v_scale: of V.
            user: kept in the header; anything that JSON can hold, about 3 KB.
            io: how it is read: ``"mmap"``, ``"read"`` or ``"direct"`` (past the page cache).
            durable: wait for the disk at every append.

        Raises:
            StoreError: the file exists or cannot be made. StoreFullError: no room.
            StoreFormatError: `user` is too large.
            ArgumentValueError, ArgumentTypeError: the message names the argument.
        """
        name, durable = _path(path), flag("durable", durable)
        header = Header(layout, k_scale, v_scale, user)
        page = header.pack()
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"{name}: cannot be made: {error.strerror}") from error
        try:
            _lock(descriptor, name)
            write_all(descriptor, page, 0, name)
            return cls(name, header, descriptor, make_reader(name, io), durable=durable, writable=True)
        except BaseException:
            os.close(descriptor)
            name.unlink(missing_ok=True)
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        writable: bool = False,
        io: str = "mmap",
        durable: bool = False,
        recover: bool = False,
    ) -> FileStore:
        """A file that is there. Blocks written after the last `sync` are read and checked; those of a torn
        tail are dropped, with a warning.

        Args:
            path: of the file.
            writable: for appending; only one process at a time.
            io: as for `create`.
            durable: as for `create`.
            recover: open a damaged file with the blocks that are left.

        Raises:
            StoreFormatError: a foreign file, another version, a damaged header.
            StoreDamagedError: blocks are missing that were on the disk for certain.
            StoreError: the file cannot be opened, or is open for writing elsewhere.
        """
        name, writable = _path(path), flag("writable", writable)
        durable, recover = flag("durable", durable), flag("recover", recover)
        flags = os.O_RDWR if writable else os.O_RDONLY
        try:
            descriptor = os.open(name, flags | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{name}: cannot be opened: {error.strerror}") from error
        reader: Reader | None = None
        try:
            if writable:
                _lock(descriptor, name)
            page = read_some(descriptor, PAGE, 0, name)
            header = Header.unpack(page, str(name))
            reader = make_reader(name, io)
            store = cls(name, header, descriptor, reader, durable=durable, writable=writable)
            store._load(file_format.unpack_checkpoint(page), recover)
            return store
        except BaseException:
            os.close(descriptor)
            if reader is not None:
                reader.close()
            raise

    def _load(self, synced: int, recover: bool) -> None:
        """Find the blocks that are there, and drop a torn tail.

        Blocks that were on the disk for certain are taken to be whole; those behind them are read.
        """
        entries = self._read_index()
        size = os.fstat(self._descriptor).st_size
        held = len(entries)
        while held and self._places.record(held - 1) + self._shape.record_bytes > size:
            held -= 1
        first = min(synced, held)
        whole = first + self._intact(first, entries[first:held])
        short = np.flatnonzero(entries["num_tokens"][:whole] != self._shape.block_size)
        self._num_blocks = int(short[0]) if short.size else whole
        if self._num_blocks < synced and not recover:
            raise StoreDamagedError(
                f"{self.path}: had {synced} complete blocks on the disk, only {self._num_blocks} are left: "
                "the file was cut short or its index is damaged; recover=True opens what is left"
            )
        if short.size:
            self._check_tail_tokens(int(entries["num_tokens"][self._num_blocks]))
            record = np.empty(self._shape.record_bytes, np.uint8)
            self._reader.read(self._places.record(self._num_blocks), record)
            self._tail = Tail(record, int(entries["num_tokens"][self._num_blocks]))
        self._drop(whole, len(entries), synced)

    def _check_tail_tokens(self, num_tokens: int) -> None:
        if not 1 <= num_tokens < self._shape.block_size:
            raise StoreDamagedError(
                f"{self.path}: block {self._num_blocks} has {num_tokens} tokens, possible are 1 to "
                f"{self._shape.block_size}"
            )

    def _drop(self, whole: int, entered: int, synced: int) -> None:
        self.dropped_blocks = entered - whole + self._torn_entry()
        if self._writable and self.dropped_blocks:
            self._forget(whole, self.dropped_blocks)
        if self._writable and self._num_blocks < synced:
            self.sync()
        if self.dropped_blocks:
            warnings.warn(
                f"{self.path}: dropped {self.dropped_blocks} blocks of a torn tail; "
                f"{self._num_blocks} complete blocks are whole",
                RuntimeWarning,
                stacklevel=4,
            )

    def _forget(self, first: int, count: int) -> None:
        """Erase entries of what was dropped: they must not come back behind blocks appended later."""
        if self._writable:
            for begin, length in self._places.runs(first, count):
                write_all(
                    self._descriptor, bytes(length * ENTRY.itemsize), self._places.entry(begin), self.path
                )

    def _torn_entry(self) -> int:
        """1 where something that is no whole entry follows the last one."""
        follows = self._num_blocks + (self._tail is not None)
        raw = read_some(self._descriptor, ENTRY.itemsize, self._places.entry(follows), self.path)
        entry = np.frombuffer(raw.ljust(ENTRY.itemsize, b"\0"), ENTRY)
        return int(any(raw) and not file_format.valid_entries(entry, follows))

    def _read_index(self) -> npt.NDArray[np.void]:
        """Entries from the front on as long as they are right."""
        pages = []
        first = 0
        while True:
            raw = read_some(self._descriptor, PAGE, self._places.entry(first), self.path)
            entries = np.frombuffer(raw[: len(raw) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
            right = file_format.valid_entries(entries, first)
            pages.append(entries[:right])
            first += right
            if right < BLOCKS_PER_EXTENT:
                return np.concatenate(pages)

    def _intact(self, first: int, entries: npt.NDArray[np.void]) -> int:
        """How many of these blocks, from the front on, hold what their checksums say."""
        record = np.empty(self._shape.record_bytes, np.uint8)
        for i, entry in enumerate(entries):
            self._reader.read(self._places.record(first + i), record)
            if zlib.crc32(record.data) != int(entry["data_crc"]):
                return i
        return len(entries)

    # ---- what a store offers

    @property
    def layout(self) -> CacheLayout:
        """Of a block of K or V."""
        return self.header.layout

    @property
    def num_blocks(self) -> int:
        """Complete blocks."""
        return self._num_blocks

    @property
    def tail(self) -> Tail | None:
        """The tail that was kept, if any."""
        return self._tail

    def append(self, records: Bytes) -> None:
        """See `BlockStore.append`."""
        check_records(self._shape, records)
        if not len(records):
            return
        self._check_writable()
        try:
            self._write(np.ascontiguousarray(records), self._shape.block_size)
            if self._durable:
                self._sync(self._num_blocks + len(records))
        except BaseException:
            self._undo(len(records))
            raise
        self._num_blocks += len(records)
        self._tail = None

    def keep_tail(self, tail: Tail) -> None:
        """See `BlockStore.keep_tail`."""
        check_tail(self._shape, tail)
        record = np.array(tail.record, np.uint8)
        self._check_writable()
        try:
            self._write(record.reshape(1, -1), tail.num_tokens)
        except BaseException:
            self._undo(1)
            raise
        self._tail = Tail(record, tail.num_tokens)

    def _write(self, records: Bytes, num_tokens: int) -> None:
        """Records behind the complete blocks, then their entries: without these they do not exist."""
        first = self._num_blocks
        entries = file_format.make_entries(first, records, num_tokens)
        runs = self._places.runs(first, len(records))
        for begin, count in runs:
            part = records[begin - first : begin - first + count]
            write_all(self._descriptor, part, self._places.record(begin), self.path)
        if self._durable:
            flush(self._descriptor, self.path)
        for begin, count in runs:
            data = entries[begin - first : begin - first + count].tobytes()
            write_all(self._descriptor, data, self._places.entry(begin), self.path)

    def _undo(self, count: int) -> None:
        """After an error: drop what was written of `count` records, and write the tail again where they lie.

        The error tells what happened; where the disk takes nothing any more, opening drops the rest.
        """
        with contextlib.suppress(StoreError):
            if self._tail is not None:
                self._write(self._tail.record.reshape(1, -1), self._tail.num_tokens)
            kept = int(self._tail is not None)
            self._forget(self._num_blocks + kept, count - kept)
            if self._durable:
                self._write_checkpoint(self._num_blocks)

    def pinned(self, first: int, count: int) -> None:
        """None: blocks of a file must be read."""
        self._check_open()
        check_range(first, count, self._num_blocks)

    def read(self, first: int, target: Bytes) -> None:
        """See `BlockStore.read`. Several threads may read at once.

        Raises:
            StoreDamagedError: the file is shorter than it was.
            StoreError: the store is closed, or the system reports a failure.
        """
        self._check_open()
        size = self._shape.record_bytes
        count = check_target(self._shape, first, target, self._num_blocks)
        for begin, length in self._places.runs(first, count):
            at = (begin - first) * size
            self._reader.read(self._places.record(begin), target[at : at + length * size])

    # ---- upkeep

    def verify(self) -> None:
        """Read every block and compare it with its checksum.

        Raises:
            StoreDamagedError: naming the first block that differs.
        """
        self._check_open()
        whole = self._intact(0, self._read_index()[: self._num_blocks])
        if whole < self._num_blocks:
            raise StoreDamagedError(f"{self.path}: block {whole} does not hold what its checksum says")

    def sync(self) -> None:
        """Wait until the disk holds what was written, and note in the file that it does."""
        self._check_writable()
        self._sync(self._num_blocks)

    def _sync(self, num_blocks: int) -> None:
        flush(self._descriptor, self.path)
        self._write_checkpoint(num_blocks)
        flush(self._descriptor, self.path)

    def _write_checkpoint(self, num_blocks: int) -> None:
        checkpoint = file_format.pack_checkpoint(num_blocks)
        write_all(self._descriptor, checkpoint, file_format.CHECKPOINT_OFFSET, self.path)

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StoreError(f"{self.path}: closed")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise StoreError(f"{self.path}: open for reading only; open it with writable=True")

    def close(self) -> None:
        """Sync what was written and give the file back, even where syncing fails. Calling it again does
        nothing.

        Raises:
            StoreError: the disk may not hold all of what was written; the store is closed.
        """
        if self._descriptor < 0:
            return
        try:
            if self._writable:
                self._sync(self._num_blocks)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            self._reader.close()
            os.close(descriptor)

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _path(path: str | Path) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path: got {path!r}, allowed is a str or a Path")
    if "\0" in os.fspath(path):
        raise ArgumentValueError(f"path: got {path!r}, which has a null character")
    return Path(path)


def _lock(descriptor: int, name: Path) -> None:
    """One writer at a time; the lock goes with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StoreError(f"{name}: open for writing elsewhere ({error.strerror})") from error
