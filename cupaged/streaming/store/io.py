"""Reading and writing whole ranges of a file, with errors that say what happened."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from cupaged.errors import ArgumentValueError, StoreDamagedError, StoreError, StoreFullError
from cupaged.streaming.device import PAGE, Bytes

_BOUNCE_BYTES = 4 << 20  # of a direct read that cannot go straight to its target
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_all(descriptor: int, data: bytes | Bytes, offset: int, name: Path) -> None:
    """Write every byte.

    Raises:
        StoreFullError: the disk, quota or file size limit is exhausted.
        StoreError: anything else that the system reports.
    """
    view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            kind = StoreFullError if error.errno in _NO_ROOM else StoreError
            raise kind(
                f"{name}: writing {len(view)} bytes at {offset} failed after {done}: {error.strerror}"
            ) from error


def flush(descriptor: int, name: Path) -> None:
    """Wait until the disk holds what was written.

    Raises:
        StoreFullError, StoreError: it does not.
    """
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        kind = StoreFullError if error.errno in _NO_ROOM else StoreError
        raise kind(f"{name}: writing to the disk failed: {error.strerror}") from error


def read_some(descriptor: int, size: int, offset: int, name: Path) -> bytes:
    """As many bytes as the file has there, up to a size.

    Raises:
        StoreError: the system reports a failure.
    """
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:
        raise StoreError(f"{name}: reading at {offset} failed: {error.strerror}") from error


def short_read(name: Path, offset: int, wanted: int, got: int) -> StoreDamagedError:
    """The error for a file that ends too early."""
    return StoreDamagedError(
        f"{name}: short read: {got} of {wanted} bytes at {offset}; the file was cut short"
    )


class Reader:
    """Plain reads into a buffer. Once closed, it reads nothing more: its descriptor may be another file's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = self._open(os.O_RDONLY)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self._path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be opened: {error.strerror}") from error

    def read(self, offset: int, target: Bytes) -> None:
        """Fill the target.

        Raises:
            StoreDamagedError: the file ends too early.
            StoreError: the system reports a failure.
        """
        self._check_open()
        self._read_into(target.data, offset)

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StoreError(f"{self._path}: closed")

    def _read_into(self, view: memoryview, offset: int, needed: int | None = None) -> None:
        """Read until `needed` bytes are there; the rest of the view may stay as it is."""
        wanted = len(view) if needed is None else needed
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise StoreError(
                    f"{self._path}: reading at {offset + done} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise short_read(self._path, offset, wanted, done)
            done += count

    def close(self) -> None:
        """Give the descriptor back. Calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DirectReader(Reader):
    """Reads that bypass the page cache (``O_DIRECT``)."""

    def _open(self, flags: int) -> int:
        try:
            return os.open(self._path, flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            raise StoreError(
                f"{self._path}: the file system has no direct I/O ({error.strerror}); use io='read' or 'mmap'"
            ) from error

    def read(self, offset: int, target: Bytes) -> None:
        """Straight into the target where address, offset and size are whole pages; else through a buffer."""
        self._check_open()
        if offset % PAGE == 0 and target.size % PAGE == 0 and target.ctypes.data % PAGE == 0:
            self._read_into(target.data, offset)
            return
        buffer = mmap.mmap(-1, _BOUNCE_BYTES + PAGE)  # page-aligned, of this thread alone
        view = memoryview(buffer)
        done = 0
        while done < target.size:
            start = (offset + done) // PAGE * PAGE
            lead = offset + done - start
            count = min(target.size - done, _BOUNCE_BYTES - lead)
            whole = -(-(lead + count) // PAGE) * PAGE
            self._read_into(view[:whole], start, lead + count)
            target[done : done + count] = np.frombuffer(view, np.uint8, count, lead)
            done += count


class MappedReader(Reader):
    """Reads through a mapping of the file, which grows with it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._map: Bytes | None = None

    def read(self, offset: int, target: Bytes) -> None:
        """Copy out of the mapping. A file that another process cuts short meanwhile kills this one."""
        self._check_open()
        end = offset + target.size
        size = os.fstat(self._descriptor).st_size
        if size < end:
            raise short_read(self._path, offset, target.size, max(0, size - offset))
        mapping = self._map
        if mapping is None or mapping.size < end:
            raw = self._mapped(size)
            raw.madvise(mmap.MADV_SEQUENTIAL)
            mapping = self._map = np.frombuffer(raw, np.uint8)
        np.copyto(target, mapping[offset:end])

    def _mapped(self, size: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise StoreError(f"{self._path}: mapping {size} bytes failed: {error.strerror}") from error

    def close(self) -> None:
        """Give descriptor and mapping back."""
        super().close()
        self._map = None


READERS: dict[str, type[Reader]] = {"read": Reader, "mmap": MappedReader, "direct": DirectReader}


def make_reader(path: Path, io: str) -> Reader:
    """A reader of that kind.

    Raises:
        ArgumentValueError: no such kind.
        StoreError: the file cannot be opened so.
    """
    if not isinstance(io, str) or io not in READERS:
        raise ArgumentValueError(f"io: got {io!r}, allowed are {', '.join(READERS)}")
    return READERS[io](path)
