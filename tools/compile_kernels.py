"""Many kernels compiled at once into the cache on disk, by processes: for benchmarks, random cases, sweeps.

A `cupaged.ahead.KernelSet` says which. Threads, by which a `Decoder` gets its few kernels, would
share one interpreter between hundreds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cupaged import cache
from cupaged.ahead import KernelSet
from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.cache_dir import cache_dir
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.registry import entries
from cupaged.source import KernelSource

Work = tuple[KernelSource, nvrtc.Target]

_SHARED_ENTRIES = ("paged_decode_attn_reduce", "attention_", "bf16_absmax")  # by all formats


@dataclass(frozen=True)
class Compiled:
    """What became of some kernels.

    Attributes:
        kernels: modules asked for, each once.
        compiled: those that were not in the cache.
        processes: that compiled them.
        seconds: that it took, waiting for others included.
        failed: a message for each that did not compile.
    """

    kernels: int
    compiled: int
    processes: int
    seconds: float
    failed: list[str]

    def __str__(self) -> str:
        done = f"{self.compiled} compiled by {self.processes} processes in {self.seconds} s"
        return f"{self.kernels} kernels: {done}, {len(self.failed)} failed"


def compile_all(sources: Iterable[KernelSource], arch: str, workers: int | None = None) -> Compiled:
    """Compile what the cache lacks.

    Of several callers on one machine, one compiles at a time, with all processors.

    Args:
        sources: as `KernelSet.sources` gives them; entries of one module with the same constants are one.
        arch: as ``sm_90a``.
        workers: processes; by default one for each processor.
    """
    begin, target = time.monotonic(), nvrtc.Target(arch)
    wanted = {cubin_cache.key(source, target): (source, target) for source in sources}
    with cache.one_at_a_time(cache_dir() / "together" / "all"):
        missing = [work for name, work in wanted.items() if cubin_cache.read(name) is None]
        count = min(len(missing), workers or os.cpu_count() or 1)
        failed = [message for message in _in_processes(missing, count) if message]
    return Compiled(len(wanted), len(missing), count, round(time.monotonic() - begin, 1), failed)


def _in_processes(missing: list[Work], count: int) -> Iterator[str]:
    """The message of each; empty where it was compiled."""
    if not missing:
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_compile, work) for work in missing]
    yield from map(_outcome, running)


def _compile(work: Work) -> str:
    try:
        cubin_cache.compiled(*work)
    except Exception as error:  # who needs it will fail with the same
        return f"{work[0].entry}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _outcome(running: Future[str]) -> str:
    error = running.exception()  # of a process that died
    return running.result() if error is None else f"{type(error).__name__}: {error}"


def add_launchers(kernels: KernelSet, fmt: CacheFormat, scalars: Mapping[str, int]) -> None:
    """The writer, single pass, split-K, reductions, tiles and maxima of a format, as launches ask for them.

    Args:
        kernels: is added to.
        fmt: of the cache.
        scalars: what the launches are given, by name; kernels that are made for others are left out.
    """
    for known in entries():
        plain = known.entry == "paged_decode_attn_tiled" and fmt.name == "bf16"
        belongs = known.entry.endswith(f"_{fmt.name}") or known.entry.startswith(_SHARED_ENTRIES) or plain
        if belongs and known.specialise is not None and set(known.scalar_names) <= scalars.keys():
            spec = known.specialise({name: scalars[name] for name in known.scalar_names})
            kernels.add_kernel(known.module, known.entry, **spec)


def launcher_scalars(layout: CacheLayout, num_q_heads: int) -> dict[str, int]:
    """What launches over such pools are given."""
    return {
        "num_q_heads": num_q_heads,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "gqa_ratio": num_q_heads // layout.num_kv_heads,
        "data_section_bytes": layout.data_section_bytes,
    }


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails where this process compiles a kernel: what was compiled together was not all that is needed."""

    def refuse(source: KernelSource, *_: Any) -> bytes:
        raise AssertionError(f"{source.path.name} {dict(source.defines)} was not compiled with the others")

    with mock.patch.object(nvrtc, "compile_source", refuse):
        yield
