"""Compiled kernels on disk, so that a second process starts without a compiler."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from cupaged import cache
from cupaged.backends.cupy import nvrtc
from cupaged.cache_dir import cache_dir, write_atomically
from cupaged.source import KernelSource

_SCHEMA = "1"  # part of every key: raise it when the file format changes
_DIGEST_BYTES = 32


def key(source: KernelSource, target: nvrtc.Target) -> str:
    """Name of a module's entry: everything the machine code depends on, and nothing else.

    Include folders count through the digest of what is included from them, so a moved installation
    keeps its cache.
    """
    parts = (
        _SCHEMA,
        nvrtc.version_text(),
        target.arch,
        *(f"{name}={value}" for name, value in source.defines),
        *(option for option in nvrtc.options(source, target) if not option.startswith("-I")),
        source.path.name,
        source.digest(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _path(name: str, folder: Path | None = None) -> Path:
    return (folder or cache_dir()) / "cubin" / f"{name}.bin"


def read(name: str) -> bytes | None:
    """The code stored under a key, or None where there is none or it is damaged."""
    for folder in cache.folders():
        path = _path(name, folder)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                cache.touch(path)
                return code
    return None


def write(name: str, code: bytes) -> None:
    """Store code under a key; another process may do so at the same time."""
    path = _path(name)
    write_atomically(path, hashlib.sha256(code).digest() + code)
    cache.trim(path)


def compiled(source: KernelSource, target: nvrtc.Target) -> bytes:
    """Code of a kernel's module, from disk or freshly compiled, by one of the processes that need it."""
    name = key(source, target)
    code = read(name)
    if code is None:
        with cache.one_at_a_time(_path(name)):
            code = read(name)
            if code is None:
                code = nvrtc.compile_source(source, target)
                write(name, code)
    return code
