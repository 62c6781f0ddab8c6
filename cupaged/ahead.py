"""Kernels compiled ahead of time: on a machine with NVRTC and no GPU, for GPUs on machines without NVRTC.

A `KernelSet` collects what will be needed; `KernelSet.save` compiles it into a folder of cubins with a
manifest, which any language can read (``docs/ahead.md``); `load` lets this process's `CupyBackend`s use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.cupy import nvrtc, prebuilt
from cupaged.backends.cupy.prebuilt import FORMAT, MANIFEST, Prebuilt
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError, KernelSourceError
from cupaged.formats import FORMATS, CacheLayout
from cupaged.handle import PARAMETER_BYTES, HandleFactory, ParameterLayout
from cupaged.pointers import DevicePtr
from cupaged.registry import (
    DeviceLimits,
    KernelEntry,
    buffer_expressions,
    entries,
    find,
    limits_of_capability,
)
from cupaged.registry.checks import INPUT_CHECKS
from cupaged.source import KernelSource
from cupaged.version import __version__

__all__ = ["KernelSet", "Prebuilt", "load", "unload"]

unload = prebuilt.unload

# Of the GPU that kernels are shaped for. Grids and residency follow the GPU that runs them, so enough.
_NUM_SMS = 1024


def load(folder: str | os.PathLike[str]) -> Prebuilt:
    """Let this process use the kernels of a folder.

    A `CupyBackend` takes a kernel from there before it looks into the disk cache or compiles; one made from
    now on needs no NVRTC where the folder has kernels for its GPU. What the folder lacks is compiled, or
    raises BackendUnavailableError where that cannot be done.

    Args:
        folder: what `KernelSet.save` wrote.

    Returns:
        What `unload` forgets.

    Raises:
        ArgumentValueError: no manifest, or one of another format.
        KernelSourceError: the kernels come from other sources than this package has.
    """
    return prebuilt.load(_path(folder))


def _path(folder: Any) -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise ArgumentTypeError(f"folder: got {folder!r}, allowed is a path") from None


@dataclass(frozen=True)
class _Code:
    """What the compiling backend gives for a loaded kernel."""

    source: KernelSource


class _Collector(HandleFactory):
    """A backend that runs nothing: it collects the sources of all kernels that are loaded on it."""

    name = "ahead"
    num_sms = _NUM_SMS

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.sources: dict[tuple[object, ...], KernelSource] = {}

    @property
    def limits(self) -> DeviceLimits:
        return limits_of_capability(int(self.arch.removeprefix("sm_").rstrip("af")), _NUM_SMS)

    def load(self, source: KernelSource) -> _Code:
        self.sources[source.path, source.entry, source.defines] = source
        return _Code(source)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Nothing is stored in it: one byte that looks like an array of that shape."""
        if dtype == "bfloat16":
            dtype = np.uint16
        return np.broadcast_to(np.zeros(1, dtype), shape)

    zeros = empty

    def pointer(self, value: Any) -> int:
        return value.address if isinstance(value, DevicePtr) else 0

    def synchronize(self, stream: int | None = None) -> None:
        """Nothing runs."""

    def null_stream(self) -> int:
        return 0


class KernelSet:
    """What is to be compiled ahead of time; each method but `save` returns the set."""

    def __init__(self) -> None:
        self._requests: list[Callable[[Any], object]] = []

    def add_decoder(
        self, layout: CacheLayout, num_q_heads: int, *, max_seqs: int = 512, **features: Any
    ) -> KernelSet:
        """The kernels of ``Decoder(gpu, layout, num_q_heads, max_seqs, **features)``.

        Those for more than 512 sequences are others than those for fewer; ask for both where both are
        needed. With ``checked=True`` also those that look at its inputs.
        """
        if features.get("checked"):
            self.add_checks()
        return self._add(lambda gpu: Decoder(gpu, layout, num_q_heads, max_seqs, **features))

    def add_cascade(
        self, layout: CacheLayout, num_q_heads: int, *, max_seqs: int = 512, **features: Any
    ) -> KernelSet:
        """The kernels of a `CascadeDecoder` of these arguments, and its merge."""
        self._add(lambda gpu: CascadeDecoder(gpu, layout, num_q_heads, max_seqs, **features))
        return self.add_kernel("merge_states", "merge_states_bf16")

    def add_cache(self, layout: CacheLayout) -> KernelSet:
        """What `KVCache` launches over a layout: the writer, gathers and the copy of blocks."""
        writer = f"reshape_and_cache_{layout.format.name}"
        self.add_kernel(writer, writer, head_dim=layout.head_dim, block_size=layout.block_size)
        for entry in ("gather_tokens_f32", "gather_tokens_bf16", "copy_cache_blocks"):
            self.add_kernel("cache_blocks", entry)
        return self

    def add_checks(self) -> KernelSet:
        """The kernels by which `cupaged.checked_mode` looks at the inputs of a launch."""
        for entry in entries():
            if entry.module == INPUT_CHECKS:
                self.add_kernel(entry.module, entry.entry)
        return self

    def add_kernel(self, module: str, entry: str, **constants: int) -> KernelSet:
        """One kernel of the package, with every compile-time constant that its launches ask for.

        Raises:
            KernelSourceError: there is none of that name.
        """
        find(module, entry)
        return self._add(lambda gpu: gpu.kernel(module, entry).warm(**constants))

    def add_model(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        formats: Sequence[str] = ("bf16", "fp8", "nvfp4"),
        max_seqs: int = 512,
        **features: Any,
    ) -> KernelSet:
        """Cache and decoder of a model's attention, for each of some formats, with tight blocks.

        Args:
            num_q_heads: query heads.
            num_kv_heads: KV heads.
            head_dim: of both.
            block_size: tokens of a block.
            formats: names of cache formats.
            max_seqs: as in `add_decoder`.
            **features: as `Decoder` takes them by keyword.

        Raises:
            ArgumentValueError: no such format, or sizes that no layout has.
        """
        known = {fmt.name: fmt for fmt in FORMATS}
        for name in formats:
            if name not in known:
                raise ArgumentValueError(f"formats: got {name!r}, allowed are {', '.join(known)}")
            layout = CacheLayout(known[name], num_kv_heads, head_dim, block_size)
            self.add_cache(layout)
            self.add_decoder(layout, num_q_heads, max_seqs=max_seqs, **features)
        return self

    def _add(self, request: Callable[[Any], object]) -> KernelSet:
        self._requests.append(request)
        return self

    def sources(self, arch: str) -> list[KernelSource]:
        """The specialisations for an architecture, each once; nothing is compiled.

        Raises:
            ArgumentValueError: an unknown architecture, or a request that the package does not support.
        """
        named = prebuilt.ARCH.fullmatch(_named_arch(arch))
        if named is None:
            raise ArgumentValueError(f"arch: got {arch!r}, allowed are sm_NN, sm_NNa and sm_NNf, as sm_90a")
        if int(named[1]) < nvrtc.OLDEST:
            raise ArgumentValueError(f"arch: got {arch!r}, allowed are sm_{nvrtc.OLDEST} and later")
        collector = _Collector(arch)
        for request in self._requests:
            request(collector)
        return list(collector.sources.values())

    def save(
        self,
        folder: str | os.PathLike[str],
        archs: Sequence[str],
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]:
        """Compile for some architectures and write cubins and manifest. Needs NVRTC, and no GPU.

        Args:
            folder: is made where it is missing. Kernels that it has already stay, and equal ones are
                replaced.
            archs: what to compile for, as ``("sm_80", "sm_90a")``; ``CupyBackend.arch`` says what a GPU asks
                for; without NVRTC it also runs code of an earlier chip of its generation.
            progress: called with modules compiled so far and in all.

        Returns:
            The manifest, of all kernels that the folder has now.

        Raises:
            ArgumentValueError: see `sources`; or a folder that cannot be written, or whose kernels come from
                other sources than this package has. Nothing is compiled then.
            CompileError: a kernel does not compile.
            BackendUnavailableError: no NVRTC.
        """
        if isinstance(archs, str) or not isinstance(archs, Sequence):
            raise ArgumentTypeError(f"archs: got {archs!r}, allowed is a sequence of architectures")
        target = _path(folder)
        names = dict.fromkeys(map(_named_arch, archs))
        work = [(source, arch) for arch in names for source in self.sources(arch)]
        _make_folder(target)
        earlier = _earlier_manifest(target)
        codes = _compiled(work, progress)
        for name, code in codes.items():
            (target / f"{name}.cubin").write_bytes(code)
        manifest = _merged(earlier, _manifest(work, codes))
        (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return manifest


def _named_arch(arch: Any) -> str:
    if not isinstance(arch, str):
        raise ArgumentTypeError(f"arch: got {arch!r}, allowed is a name, as 'sm_90a'")
    return arch


def _make_folder(target: Path) -> None:
    """Raise ArgumentValueError unless files can be written there."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise ArgumentValueError(
            f"folder: got {target}, allowed is one that can be made and written ({error.strerror})"
        ) from None


def _earlier_manifest(target: Path) -> dict[str, Any] | None:
    """What a folder has already, or None."""
    if not (target / MANIFEST).exists():
        return None
    try:
        manifest = prebuilt.read_manifest(target)
    except KernelSourceError:
        raise ArgumentValueError(
            f"folder: got {target}, whose kernels come from other sources than this package has; allowed is "
            "a new folder, or one of this package's kernels"
        ) from None
    for kernel in manifest["kernels"]:
        if not (target / kernel["cubin"]).is_file():
            raise ArgumentValueError(
                f"folder: got {target}, whose {MANIFEST} names {kernel['cubin']}, which is not there; "
                "allowed is a folder with all of its kernels, or a new one"
            )
    return manifest


def _merged(earlier: dict[str, Any] | None, manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the kernels of an earlier one in front; of equal kernels those compiled now."""
    if earlier is None:
        return manifest
    replaced = {(kernel["key"], kernel["entry"]) for kernel in manifest["kernels"]}
    digests = {kernel["key"]: kernel["sha256"] for kernel in manifest["kernels"]}
    kept = [
        kernel | {"sha256": digests.get(kernel["key"], kernel["sha256"])}  # entries of one file
        for kernel in earlier["kernels"]
        if (kernel["key"], kernel["entry"]) not in replaced
    ]
    sources = earlier["sources"] | manifest["sources"]
    return manifest | {"sources": sources, "kernels": kept + manifest["kernels"]}


def _compiled(
    work: Iterable[tuple[KernelSource, str]], progress: Callable[[int, int], object] | None
) -> dict[str, bytes]:
    """Key -> machine code; entries of one module with the same constants are compiled together."""
    jobs = {prebuilt.key_of(source, arch): (source, arch) for source, arch in work}
    codes = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: nvrtc.compile_source(job[0], nvrtc.Target(job[1])), jobs.values())
        for name, code in zip(jobs, results, strict=True):
            codes[name] = code
            if progress is not None:
                progress(len(codes), len(jobs))
    return codes


def _manifest(work: Sequence[tuple[KernelSource, str]], codes: dict[str, bytes]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "cupaged": __version__,
        "nvrtc": nvrtc.version_text(),
        "sources": {source.path.name: source.digest() for source, _ in work},
        "kernels": [_described(source, arch, codes) for source, arch in work],
    }


def _described(source: KernelSource, arch: str, codes: dict[str, bytes]) -> dict[str, Any]:
    """One kernel of the manifest."""
    entry = find(source.path.stem, source.entry)
    constants = {name.removeprefix("SPEC_").lower(): int(value) for name, value in source.defines}
    name = prebuilt.key_of(source, arch)
    return {
        "module": entry.module,
        "entry": entry.entry,
        "arch": arch,
        "key": name,
        "cubin": f"{name}.cubin",
        "sha256": hashlib.sha256(codes[name]).hexdigest(),
        "constants": constants,
        **_parameters(source, entry),
        "block": list(entry.block(constants)),
        "grid": list(entry.grid_expressions(constants)),
        "dynamic_shared_bytes": entry.shared_mem(constants),
        "cooperative": entry.cooperative,
        "overlapping": entry.overlapping,
        "buffer_bytes": buffer_expressions(entry, constants),
    }


def _parameters(source: KernelSource, entry: KernelEntry) -> dict[str, Any]:
    """The parameter buffer: where each parameter lies, and what its value must be a multiple of."""
    layout = ParameterLayout(source.parameters)
    return {
        "parameters": [
            {
                "name": parameter.name,
                "kind": parameter.kind,
                "offset": offset,
                "bytes": PARAMETER_BYTES[parameter.kind],
                "multiple": entry.multiples.get(parameter.name, 1),
                **({"holds": entry.holds[parameter.name]} if parameter.name in entry.holds else {}),
            }
            for parameter, offset in zip(source.parameters, layout.offsets, strict=True)
        ],
        "parameter_bytes": layout.size,
    }
