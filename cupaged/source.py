"""Kernel sources: where they are, what a kernel's parameters are, and a digest of all they include.

Device-free: nothing here needs a GPU, CuPy or a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cupaged.errors import KernelSourceError

_PACKAGE = Path(__file__).resolve().parent

# C++ spelling of a scalar parameter -> kind. Everything with a '*' is a pointer.
_SCALAR_KINDS = {
    "u32": "u32",
    "unsigned": "u32",
    "unsigned int": "u32",
    "uint32_t": "u32",
    "i32": "i32",
    "int": "i32",
    "int32_t": "i32",
    "u64": "u64",
    "unsigned long long": "u64",
    "uint64_t": "u64",
    "i64": "i64",
    "long long": "i64",
    "int64_t": "i64",
    "float": "f32",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel entry.

    Attributes:
        name: as in the source.
        kind: ``"ptr"``, ``"u32"``, ``"i32"``, ``"u64"``, ``"i64"`` or ``"f32"``.
        const: a pointer to const, which the kernel only reads.
    """

    name: str
    kind: str
    const: bool = False


@dataclass(frozen=True)
class KernelSource:
    """Everything a compiler needs to know about one specialisation of one kernel.

    Attributes:
        path: the ``.cu`` file.
        entry: name of the ``extern "C" __global__`` function.
        parameters: its parameters, in order.
        defines: (macro, value) pairs: the compile-time constants.
    """

    path: Path
    entry: str
    parameters: tuple[Parameter, ...]
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """The source's own folder first, then the package's kernels."""
        own, package = self.path.parent, kernels_dir()
        return (own,) if own == package else (own, package)

    def digest(self) -> str:
        """Hex SHA-256 of the source and of every file it includes, directly or not.

        Files of the package are read again when they have changed; others always, because a new file beside
        them may hide one of the package.
        """
        key = (self.path, self.include_dirs)
        own = self.path.parent == kernels_dir()
        known = _digests.get(key) if own else None
        if known is not None and known.stamps == _stamps(known.files):
            return known.digest
        files = tuple(map(str, include_closure(*key)))
        stamps, digest = _stamps(files), hashlib.sha256()
        for file in files:
            content = Path(file).read_bytes()
            digest.update(Path(file).name.encode() + b"\0" + content + b"\0")
        if own and time.time_ns() - max(modified for modified, _ in stamps) > _SETTLED_NS:
            _digests[key] = _Digest(files, stamps, digest.hexdigest())
        return digest.hexdigest()


class _Digest(NamedTuple):
    """What a source and its includes were when they were last read."""

    files: tuple[str, ...]
    stamps: tuple[tuple[int, int], ...]
    digest: str


_digests: dict[tuple[Path, tuple[Path, ...]], _Digest] = {}

# A file changed this lately may change again without its time of change showing it.
_SETTLED_NS = 2_000_000_000


def _stamps(files: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """(nanoseconds of the last change, bytes) of each file; of one that is gone, (0, -1)."""
    found = []
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 - twenty a decoder: a Path takes three times as long
        except OSError:
            found.append((0, -1))
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)


@functools.cache
def kernels_dir() -> Path:
    """Folder of the CUDA sources: inside the installed package, or ``kernels/`` of a checkout."""
    for candidate in (_PACKAGE / "_cuda", _PACKAGE.parent / "kernels"):
        if (candidate / "platform.cuh").is_file():
            return candidate
    raise KernelSourceError(
        f"no CUDA sources found in {_PACKAGE / '_cuda'} nor {_PACKAGE.parent / 'kernels'}: "
        "the installation is incomplete"
    )


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def include_closure(path: Path, include_dirs: tuple[Path, ...]) -> list[Path]:
    """The file and everything it includes with quotes, in first-seen order.

    A quoted name that is in none of ``include_dirs`` is left out: it belongs to the compiler
    or to the emulator, whose own version is part of their cache keys.
    """
    seen: list[Path] = []
    pending = [path]
    while pending:
        current = pending.pop(0)
        if current in seen:
            continue
        seen.append(current)
        for name in _INCLUDE.findall(current.read_text()):
            for folder in (current.parent, *include_dirs):
                if (folder / name).is_file():
                    pending.append((folder / name).resolve())
                    break
    return seen


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


_LINKAGE = re.compile(r'extern\s+"C"\s*(\{)?')
_BRACE_OR_LITERAL = re.compile(r"""[{}]|"(?:\\.|[^"\\\n])*"|'(?:\\.[^'\n]*|[^'\\\n])'""")


def _c_linkage(text: str) -> list[tuple[int, int]]:
    """(begin, end) of what the ``extern "C" { ... }`` blocks of a text without comments enclose."""
    blocks = []
    for opening in _LINKAGE.finditer(text):
        if opening.group(1) is None:
            continue
        depth = 1
        for token in _BRACE_OR_LITERAL.finditer(text, opening.end()):
            depth += {"{": 1, "}": -1}.get(token.group(), 0)
            if depth == 0:
                blocks.append((opening.end(), token.start()))
                break
    return blocks


def parse_parameters(text: str, entry: str) -> tuple[Parameter, ...]:
    """Parameters of ``extern "C" __global__ void ... entry(...)`` in CUDA source text.

    ``extern "C"`` stands before the function, or before braces around it; ``__launch_bounds__`` before or
    after ``void``.

    Raises:
        KernelSourceError: no such entry, or a parameter of a type that launches do not support.
    """
    text = _COMMENT.sub(" ", text)
    bounds = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
    pattern = re.compile(
        rf'(extern\s+"C"\s+)?\b__global__\s+{bounds}void\s+{bounds}{re.escape(entry)}\s*\(([^()]*)\)'
    )
    blocks = _c_linkage(text)
    for match in pattern.finditer(text):
        if match.group(1) or any(begin <= match.start() < end for begin, end in blocks):
            break
    else:
        raise KernelSourceError(f'no entry extern "C" __global__ void {entry}(...) in the source')
    declarations = [d.strip() for d in match.group(2).split(",")]
    return tuple(_parse_parameter(d, entry) for d in declarations if d)


def _parse_parameter(declaration: str, entry: str) -> Parameter:
    words = re.sub(r"\b(__restrict__|__grid_constant__)\b", " ", declaration)
    name_match = re.search(r"(\w+)\s*$", words)
    if name_match is None:
        raise KernelSourceError(f"{entry}: cannot read the parameter {declaration!r}")
    name, type_text = name_match.group(1), words[: name_match.start()]
    if "*" in type_text:
        pointee = type_text.split("*")[-2]  # `const float** x` is a pointer to pointers it may write
        return Parameter(name, "ptr", const=bool(re.search(r"\bconst\b", pointee)))
    spelling = " ".join(re.sub(r"\bconst\b", " ", type_text).split())
    kind = _SCALAR_KINDS.get(spelling)
    if kind is None:
        raise KernelSourceError(
            f"{entry}: parameter {name!r} has type {spelling!r}; "
            f"allowed are pointers and {', '.join(sorted(set(_SCALAR_KINDS)))}"
        )
    return Parameter(name, kind)


@functools.lru_cache(maxsize=256)
def read_parameters(path: Path, entry: str, mtime_ns: int) -> tuple[Parameter, ...]:
    """`parse_parameters` of a file; ``mtime_ns`` is its modification time, part of the cache key."""
    try:
        return parse_parameters(path.read_text(), entry)
    except KernelSourceError as error:
        raise KernelSourceError(f"{path}: {error}") from None
