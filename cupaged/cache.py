"""Upkeep of the cache folder: what is in it, its size cap, clearing it, and damage.

Any number of processes may share the folder. Entries appear whole (they are renamed into place) and may
vanish at any time, so every reader can compile again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cupaged import cache_dir, environment

MAX_BYTES_VARIABLE = environment.CACHE_MAX_BYTES.name
DEFAULT_MAX_BYTES = 1 << 30

# Folder of a backend's entries -> how their names end. Nothing else in the cache folder is ever removed.
_ROOMS = {"cubin": ".bin", "emulator": ".so"}
_LOCK_NAME = ".lock"
_DIGEST_BYTES = 32
_GRACE_S = 60.0  # a process that found an entry so long ago may not have opened it yet
_ABANDONED_S = 3600.0  # unfinished files so old belong to a process that died


@dataclass(frozen=True)
class Entry:
    """A compiled kernel on disk.

    Attributes:
        path: its file.
        num_bytes: size of the file.
        used: when it was last written or found, in seconds since the epoch.
    """

    path: Path
    num_bytes: int
    used: float


@dataclass(frozen=True)
class Cleared:
    """What `clear` did.

    Attributes:
        num_entries: entries removed.
        num_bytes: their size.
        failed: files that could not be removed.
    """

    num_entries: int
    num_bytes: int
    failed: tuple[Path, ...]


def folders() -> Iterator[Path]:
    """Where to look for an entry: first the folder asked for, even if it can only be read (a cache that was
    filled when an image was built), then, if it is another, the one that is written."""
    asked = cache_dir.place()
    if asked.path is not None:
        yield asked.path
    if asked.path is None or asked.problem:
        yield cache_dir.cache_dir()


def entries(folder: Path | None = None) -> list[Entry]:
    """Every compiled kernel in a cache folder (that of `cache_dir` by default), least recently used first."""
    root = cache_dir.cache_dir() if folder is None else folder
    found = []
    for room, suffix in _ROOMS.items():
        for item in _listed(root / room):
            if not item.name.startswith(".") and item.name.endswith(suffix):
                with contextlib.suppress(OSError):  # another process removed it
                    status = item.stat()
                    found.append(Entry(Path(item.path), status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def total_bytes(folder: Path | None = None) -> int:
    """Size of all compiled kernels in a cache folder."""
    return sum(entry.num_bytes for entry in entries(folder))


def max_bytes() -> int:
    """The cap: ``$CUPAGED_CACHE_MAX_BYTES``, else 1 GiB. A value that is no number gives one warning."""
    given = environment.CACHE_MAX_BYTES.get()
    if not given:
        return DEFAULT_MAX_BYTES
    if given.isascii() and given.isdigit():
        return int(given)
    cache_dir.warn_once(
        f"{MAX_BYTES_VARIABLE} is {given!r}, allowed is a number of bytes, as in "
        f"{MAX_BYTES_VARIABLE}={DEFAULT_MAX_BYTES}; {DEFAULT_MAX_BYTES} is used"
    )
    return DEFAULT_MAX_BYTES


def clear(folder: Path | None = None) -> Cleared:
    """Remove every compiled kernel. Processes that use some keep them; those that start compile again."""
    root = cache_dir.cache_dir() if folder is None else folder
    _remove_abandoned(root)
    count = num_bytes = 0
    failed = []
    for entry in entries(root):
        try:
            entry.path.unlink(missing_ok=True)
        except OSError:
            failed.append(entry.path)
        else:
            count += 1
            num_bytes += entry.num_bytes
    return Cleared(count, num_bytes, tuple(failed))


def trim(written: Path) -> None:
    """Remove the least recently used entries beyond the cap, after `written` was written.

    Entries written or found within the last minute stay, whatever the cap: another process may be about
    to open them.

    Args:
        written: an entry, ``<cache folder>/<room>/<name>``; it stays in any case.
    """
    root = written.parent.parent
    _remove_abandoned(root)
    found = entries(root)
    excess = sum(entry.num_bytes for entry in found) - max_bytes()
    newest = time.time() - _GRACE_S
    for entry in found:
        if excess <= 0 or entry.used > newest:
            return
        if entry.path != written:
            excess -= entry.num_bytes
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)


def touch(path: Path) -> None:
    """Note that an entry was used; where it cannot be noted, nothing is."""
    with contextlib.suppress(OSError):
        os.utime(path)


def seal(path: Path) -> None:
    """Append a file's own digest to it. Loaders of shared libraries ignore what follows the last section."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def is_intact(path: Path) -> bool:
    """True for a sealed file that is as it was written.

    To be asked before a library is loaded: one that was cut short would kill the process.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """While one thread of one process holds the lock of an entry, all others that ask for it wait.

    For compiling once what many need. On a file system without locks nobody waits, and the same is
    compiled more than once, which does no harm.
    """
    held = _lock(path)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed.

    One byte of one file, picked by the entry's name: a file for each entry could not be removed safely.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    start = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:4], "little")
    # struct flock of 64-bit Linux: type, whence, start, length, process (0).
    request = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    try:
        # Not lockf: its locks belong to the process, so threads would not wait for each other.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, request)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:
        return []


def _remove_abandoned(root: Path) -> None:
    oldest = time.time() - _ABANDONED_S
    for room in _ROOMS:
        for item in _listed(root / room):
            if not item.name.startswith(".") or item.name == _LOCK_NAME:
                continue
            with contextlib.suppress(OSError):
                if item.stat(follow_symlinks=False).st_mtime > oldest:
                    continue
                if item.is_dir(follow_symlinks=False):
                    shutil.rmtree(item.path, ignore_errors=True)
                else:
                    Path(item.path).unlink(missing_ok=True)
