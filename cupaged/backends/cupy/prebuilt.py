"""Kernels that were compiled ahead of time (`cupaged.ahead`): which are loaded, and which of them fits.

Nothing here needs NVRTC.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.errors import ArgumentValueError, BackendUnavailableError, KernelSourceError
from cupaged.source import KernelSource, kernels_dir

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest: raised when a reader of an older one could not read a newer one
ARCH = re.compile(r"sm_(\d+)[af]?")
_READ = ("key", "entry", "arch", "cubin", "sha256")  # of each kernel


@dataclass(frozen=True)
class Prebuilt:
    """A folder of kernels.

    Attributes:
        folder: where it is.
        files: key -> (file name, hex SHA-256 of its content).
        archs: architectures that it has kernels for, as ``sm_90a``.
    """

    folder: Path
    files: dict[str, tuple[str, str]]
    archs: frozenset[str]


_loaded: list[Prebuilt] = []


def key(file: str, digest: str, constants: tuple[tuple[str, str], ...], arch: str) -> str:
    """Name of one module's code: its source, everything that it includes, its macros and its architecture."""
    parts = (file, digest, arch, *(f"{name}={value}" for name, value in sorted(constants)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def key_of(source: KernelSource, arch: str) -> str:
    """`key` of a source."""
    return key(source.path.name, source.digest(), source.defines, arch)


def load(folder: Path) -> Prebuilt:
    """Let this process's backends use a folder's kernels, before any compiler; raises as `read_manifest`."""
    kernels = read_manifest(folder)["kernels"]
    found = Prebuilt(
        folder.resolve(),
        {kernel["key"]: (kernel["cubin"], kernel["sha256"]) for kernel in kernels},
        frozenset(kernel["arch"] for kernel in kernels),
    )
    _loaded.append(found)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest.

    Raises:
        ArgumentValueError: none, or another file of that name, or one of another format.
        KernelSourceError: its kernels come from other sources than this package has.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ArgumentValueError(f"folder: got {folder}, whose {MANIFEST} cannot be read: {error}") from None
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int:
        raise ArgumentValueError(f"folder: got {folder}, whose {MANIFEST} is no manifest of kernels")
    if number != FORMAT:
        raise ArgumentValueError(f"folder: got {folder}, a manifest of format {number}; allowed is {FORMAT}")
    if not _is_whole(manifest):
        raise ArgumentValueError(f"folder: got {folder}, whose {MANIFEST} lacks what kernels are found by")
    _check_sources(folder, manifest)
    return manifest


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Whether all that is read of a manifest here is there: the rest is for other readers."""
    sources, kernels = manifest.get("sources"), manifest.get("kernels")
    return (
        isinstance(manifest.get("cupaged"), str)
        and isinstance(sources, dict)
        and isinstance(kernels, list)
        and all(isinstance(kernel, dict) for kernel in kernels)
        and all(isinstance(kernel.get(name), str) for kernel in kernels for name in _READ)
        and all(ARCH.fullmatch(kernel["arch"]) for kernel in kernels)
    )


def unload(loaded: Prebuilt) -> None:
    """Forget a folder; kernels that are on a device stay there.

    Raises:
        ArgumentValueError: it is not loaded.
    """
    if loaded not in _loaded:
        raise ArgumentValueError(f"loaded: got {loaded!r:.100}, allowed is what `load` returned, once")
    _loaded.remove(loaded)


def _check_sources(folder: Path, manifest: dict[str, Any]) -> None:
    for file, digest in manifest["sources"].items():
        path = kernels_dir() / file
        own = KernelSource(path, "", ()).digest() if path.is_file() else "none"
        if own != digest:
            raise KernelSourceError(
                f"{folder}: its {file} was compiled by cupaged {manifest['cupaged']} from other sources than "
                "this package has; compile it again with this package"
            )


def find(source: KernelSource, arch: str) -> bytes | None:
    """Machine code of a source, or None where no loaded folder has it.

    Raises:
        KernelSourceError: the file is missing or damaged.
    """
    if not _loaded:
        return None
    name = key_of(source, arch)
    for prebuilt in reversed(_loaded):
        if name in prebuilt.files:
            return _read(prebuilt, *prebuilt.files[name])
    return None


def _read(prebuilt: Prebuilt, file: str, sha256: str) -> bytes:
    path = prebuilt.folder / file
    try:
        code = path.read_bytes()
    except OSError as error:
        raise KernelSourceError(
            f"{path}: cannot be read ({error.strerror}), though its manifest names it"
        ) from None
    if hashlib.sha256(code).hexdigest() != sha256:
        raise KernelSourceError(f"{path}: damaged: it has another SHA-256 than its manifest says")
    return code


def code_of(source: KernelSource, target: nvrtc.Target) -> bytes:
    """Code of a source: of a loaded folder, from the disk cache, or compiled.

    Raises:
        CompileError: it does not compile.
        BackendUnavailableError: it would have to be compiled, and there is no NVRTC.
    """
    code = find(source, target.arch)
    if code is not None:
        return code
    try:
        return cubin_cache.compiled(source, target)
    except BackendUnavailableError as error:
        if not _loaded:
            raise
        folders = ", ".join(str(prebuilt.folder) for prebuilt in _loaded)
        constants = ", ".join(f"{name}={value}" for name, value in source.defines) or "no constants"
        raise BackendUnavailableError(
            f"{source.entry} ({constants}) for {target.arch} is not among the kernels of {folders}, and it "
            f"cannot be compiled here: {error}"
        ) from error


def choose_target(capability: tuple[int, int]) -> nvrtc.Target:
    """What kernels are for: as NVRTC can compile it, else the best of the loaded folders.

    Raises:
        BackendUnavailableError: no NVRTC, and nothing loaded that this GPU runs.
    """
    try:
        supported = nvrtc.supported_archs()
    except BackendUnavailableError as error:
        archs = {arch for prebuilt in _loaded for arch in prebuilt.archs if runs_on(arch, capability)}
        if archs:
            return nvrtc.Target(max(archs, key=_specific))
        if not _loaded:
            raise
        held = ", ".join(sorted({arch for prebuilt in _loaded for arch in prebuilt.archs}))
        raise BackendUnavailableError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; the kernels that are loaded "
            f"are for {held}, and none can be compiled here: {error}"
        ) from error
    return nvrtc.choose_target(capability, supported)


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs machine code for an architecture: ``sm_90a``, ``sm_100f`` or ``sm_86``."""
    number = int(arch.removeprefix("sm_").rstrip("af"))
    wanted = capability[0] * 10 + capability[1]
    if arch.endswith("a"):
        return number == wanted
    return number // 10 == wanted // 10 and number <= wanted


def _specific(arch: str) -> tuple[int, str]:
    """Later chips first; of one chip, the code that only it runs."""
    suffix = arch[-1] if arch[-1] in "af" else ""
    return int(arch.removeprefix("sm_").rstrip("af")), {"a": "2", "f": "1"}.get(suffix, "0")


def compiler_text() -> str:
    """Which compiler made the code, for a message."""
    try:
        return f"NVRTC {nvrtc.version_text()}"
    except BackendUnavailableError:
        return "its compiler"
