"""Compiling kernels and the emulator's runtime into shared libraries, kept in the cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cupaged import cache
from cupaged.backends.emulator.compiler import Compiler
from cupaged.cache_dir import DIR_VARIABLE, cache_dir
from cupaged.errors import BackendUnavailableError
from cupaged.source import KernelSource

_ROOM = Path(__file__).resolve().parent
INCLUDE = _ROOM / "include"
_RUNTIME = _ROOM / "runtime"
_CACHE_ROOM = "emulator"

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
# More optimisation than this costs more time to compile than launches win back.
_KERNEL_FLAGS = ("-O1", *_COMMON_FLAGS, "-DCUPAGED_EMULATOR=1")
CHECK_DEFINE = "CUPAGED_EMULATOR_CHECK"
# The sanitizers' instrumentation, without their libraries: the runtime has the functions that it calls.
_CHECKED_KERNEL_FLAGS = (
    "-O1",
    "-gdwarf-4",  # addr2line of binutils 2.40 and before errs about files in version 5
    *_COMMON_FLAGS,
    "-DCUPAGED_EMULATOR=1",
    f"-D{CHECK_DEFINE}=1",
    "-fno-optimize-sibling-calls",  # a return address must lie in the function that calls
    "-fsanitize=thread",
    "-fsanitize=bounds,alignment,integer-divide-by-zero,null",
)
# Volatile accesses told from others, as GCC and clang spell it.
_VOLATILE_FLAGS = (("--param=tsan-distinguish-volatile=1",), ("-mllvm", "-tsan-distinguish-volatile=1"))
# Large copies, which are not instrumented, go to the runtime too.
_CHECKED_LINK_FLAGS = ("-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset",)
_RUNTIME_FLAGS = ("-O3", *_COMMON_FLAGS)
_LINK_FLAGS = ("-shared", "-pthread")

# Of a co-operative launch, all at once: each has a stack with a guard page, and mappings are limited.
RESIDENT_THREADS = 16 * 1024

_ATTEMPTS = 3  # to get a compiled file loaded, where others remove files from the cache meanwhile

_Loaded = TypeVar("_Loaded")


def runtime_library(compiler: Compiler, defines: tuple[str, ...] = ()) -> Path:
    """Path of the runtime library, compiled if need be.

    Args:
        compiler: what compiles it.
        defines: macros, for example ``CUPAGED_EMULATOR_UCONTEXT``.
    """
    flags = [*_RUNTIME_FLAGS, *_LINK_FLAGS, *(f"-D{name}" for name in defines)]
    flags.append(f"-DCUPAGED_EMULATOR_RESIDENT_THREADS={RESIDENT_THREADS}")
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-fcf-protection=none")  # shadow stacks know nothing of switching between stacks
    key = _key(compiler, flags)
    name = f"libcupaged_emulator_{key}.so"

    def compile_to(output: Path) -> None:
        # The name the library goes by in the process, and by which kernels find it when they are loaded.
        options = [*flags, f"-Wl,-soname,{name}", str(_RUNTIME / "all.cpp"), "-o", str(output)]
        compiler.run(options, "the emulator's runtime", output.parent)

    return _cached(name, compile_to)


def kernel_library(compiler: Compiler, source: KernelSource, runtime: Path, *, check: bool = False) -> Path:
    """Path of a kernel's library, compiled if need be. It is linked to `runtime`, beside it on disk.

    Args:
        compiler: what compiles it.
        source: the kernel.
        runtime: path of the runtime library, of the same mode.
        check: instrumented for check mode, with line numbers.
    """
    flags = _kernel_flags(compiler, source, check)
    parts = [*flags, *_LINK_FLAGS, runtime.name, source.path.name, source.entry, source.digest()]
    # Line numbers name the file where it was when it was compiled.
    key = _key(compiler, [*parts, str(source.path)] if check else parts)
    include_dirs = [f"-I{folder}" for folder in (*source.include_dirs, INCLUDE)]

    def compile_to(output: Path) -> None:
        unit = output.with_suffix(".cpp")
        # Its own copy: the cache may be cleared while the compiler runs.
        linked = Path(shutil.copyfile(runtime, output.parent / runtime.name))
        unit.write_text(f'#include "{source.path}"\nCUPAGED_EMULATOR_EXPORT({source.entry})\n')
        subject = f"{source.path.name}: {source.entry}"
        options = [*flags, *include_dirs, "-include", str(INCLUDE / "cupaged_emulator.h"), str(unit)]
        link = [*_LINK_FLAGS, "-o", str(output), str(linked), "-Wl,-rpath,$ORIGIN", "-Wl,-Bsymbolic"]
        if check:
            # Linked apart: told of -fsanitize, the linker would bring the sanitizers' libraries in.
            object_file = str(output.with_suffix(".o"))
            compiler.run([*options, "-c", "-o", object_file], subject, output.parent)
            options = [object_file, *_CHECKED_LINK_FLAGS]
        compiler.run([*options, *link], subject, output.parent)

    return _cached(f"{source.entry}_{key}.so", compile_to)


def load_or_rebuild(build: Callable[[], Path], load: Callable[[Path], _Loaded]) -> _Loaded:
    """``load(build())``; again, freshly compiled, where a file vanished or the system refuses it.

    Raises:
        BackendUnavailableError: the system refuses fresh ones too.
    """
    for _ in range(_ATTEMPTS - 1):
        path = None
        try:
            path = build()
            return load(path)
        except BackendUnavailableError:
            if path is not None:
                with contextlib.suppress(OSError):  # it cannot be removed from a read-only cache
                    path.unlink(missing_ok=True)
    return load(build())


def _kernel_flags(compiler: Compiler, source: KernelSource, check: bool) -> list[str]:
    defines = [f"-D{name}={value}" for name, value in source.defines]
    if not check:
        return [*_KERNEL_FLAGS, *defines]
    volatile = next((flags for flags in _VOLATILE_FLAGS if compiler.accepts(flags)), ())
    return [*_CHECKED_KERNEL_FLAGS, *volatile, *defines]


def _key(compiler: Compiler, parts: list[str]) -> str:
    text = "\0".join((compiler.identity, _sources_digest(), *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _sources_digest() -> str:
    """Digest of the emulator's own C++ sources."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE.rglob("*.h"), *_RUNTIME.rglob("*")]):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cached(name: str, compile_to: Callable[[Path], None]) -> Path:
    """The cached file of that name, made in a folder of its own and moved into place as a whole.

    One thread of one process compiles it; the others wait. A damaged file is made again.
    """
    for folder in cache.folders():
        found = folder / _CACHE_ROOM / name
        if cache.is_intact(found):
            cache.touch(found)
            return found
    final = cache_dir() / _CACHE_ROOM / name
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with cache.one_at_a_time(final):
            if not cache.is_intact(final):
                _make(final, compile_to)
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot keep compiled kernels in {final.parent} ({error.strerror or error}); make room there, "
            f"or name another folder: export {DIR_VARIABLE}=/some/folder"
        ) from error
    return final


def _make(final: Path, compile_to: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=final.parent))
    try:
        compile_to(work / "library.so")
        cache.seal(work / "library.so")
        (work / "library.so").replace(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    cache.trim(final)
