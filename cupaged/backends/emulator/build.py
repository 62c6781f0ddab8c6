"""Compiling kernels and the emulator's runtime into shared libraries, kept in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from cupaged.backends.emulator.compiler import Compiler
from cupaged.cache_dir import cache_dir
from cupaged.source import KernelSource

_ROOM = Path(__file__).resolve().parent
INCLUDE = _ROOM / "include"
_RUNTIME = _ROOM / "runtime"

# No contraction: a * b + c must round twice, as it is written. Hidden symbols: static variables of inline
# functions would otherwise be shared between kernels that have some of the same name.
_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-w",
)
_KERNEL_FLAGS = ("-O2", *_COMMON_FLAGS, "-DCUPAGED_EMULATOR=1")
_RUNTIME_FLAGS = ("-O3", *_COMMON_FLAGS)
_LINK_FLAGS = ("-shared", "-pthread")

_locks: dict[Path, threading.Lock] = {}
_locks_lock = threading.Lock()


def runtime_library(compiler: Compiler, defines: tuple[str, ...] = ()) -> Path:
    """Path of the runtime library, compiled if need be.

    Args:
        compiler: what compiles it.
        defines: macros, for example ``CUPAGED_EMULATOR_UCONTEXT``.
    """
    flags = [*_RUNTIME_FLAGS, *_LINK_FLAGS, *(f"-D{name}" for name in defines)]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-fcf-protection=none")  # shadow stacks know nothing of switching between stacks
    key = _key(compiler, flags)
    name = f"libcupaged_emulator_{key}.so"

    def compile_to(output: Path) -> None:
        # The name the library goes by in the process, and by which kernels find it when they are loaded.
        options = [*flags, f"-Wl,-soname,{name}", str(_RUNTIME / "all.cpp"), "-o", str(output)]
        compiler.run(options, "the emulator's runtime", output.parent)

    return _cached(name, compile_to)


def kernel_library(compiler: Compiler, source: KernelSource, runtime: Path) -> Path:
    """Path of a kernel's library, compiled if need be. It is linked to `runtime`, beside it on disk."""
    defines = [f"-D{name}={value}" for name, value in source.defines]
    flags = [*_KERNEL_FLAGS, *_LINK_FLAGS, *defines]
    key = _key(compiler, [*flags, runtime.name, source.path.name, source.entry, source.digest()])
    include_dirs = [f"-I{folder}" for folder in (*source.include_dirs, INCLUDE)]

    def compile_to(output: Path) -> None:
        unit = output.with_suffix(".cpp")
        unit.write_text(f'#include "{source.path}"\nCUPAGED_EMULATOR_EXPORT({source.entry})\n')
        options = [*flags, *include_dirs, "-include", str(INCLUDE / "cupaged_emulator.h"), str(unit)]
        options += ["-o", str(output), str(runtime), "-Wl,-rpath,$ORIGIN", "-Wl,-Bsymbolic"]
        compiler.run(options, f"{source.path.name}: {source.entry}", output.parent)

    return _cached(f"{source.entry}_{key}.so", compile_to)


def _key(compiler: Compiler, parts: list[str]) -> str:
    text = "\0".join((compiler.identity, _sources_digest(), *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _sources_digest() -> str:
    """Digest of the emulator's own C++ sources."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE.rglob("*.h"), *_RUNTIME.iterdir()]):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cached(name: str, compile_to: Callable[[Path], None]) -> Path:
    """The cached file of that name, made in a folder of its own and moved into place as a whole.

    Threads of this process take turns; another process may compile the same at the same time, and the
    last one's file, equal to the others, stays.
    """
    folder = cache_dir() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name
    with _lock_of(final):
        if not final.exists():
            work = Path(tempfile.mkdtemp(prefix=".build-", dir=folder))
            try:
                compile_to(work / "library.so")
                (work / "library.so").replace(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return final


def _lock_of(path: Path) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(path, threading.Lock())
