"""Every kernel of a run compiled first, all processors at work, into the cache on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from benchmarks import cascade, loads
from benchmarks.cases import cases_of
from benchmarks.session import Session
from cupaged.ahead import KernelSet
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.source import KernelSource
from tools.compile_kernels import add_launchers, compile_all, launcher_scalars

# Sets whose kernels are the launchers', at 32/8 heads of 128 and blocks of 16.
LAUNCHER_SETS = {"seed_launchers", "tiled", "writers", "host_cost"}


def sources(arch: str, sets: Iterable[str], formats: Iterable[CacheFormat]) -> list[KernelSource]:
    """What the sets compile for an architecture."""
    chosen, wanted = set(sets), tuple(formats)
    found: list[KernelSource] = []
    for case in cases_of(chosen, wanted):
        found += _of_decoder(case.decoder(_decoder_kernels, None), arch)
    kernels, heads = KernelSet(), loads.BASE.num_q_heads
    for fmt in wanted:
        layout = loads.BASE.layout(fmt)
        if "cascade" in chosen:
            kernels.add_cascade(layout, heads, max_seqs=cascade.NUM_SEQS)
        if chosen & LAUNCHER_SETS:
            add_launchers(kernels, fmt, launcher_scalars(layout, heads))
    return found + kernels.sources(arch)


def _decoder_kernels(
    _: None, layout: CacheLayout, num_q_heads: int, max_seqs: int, **options: Any
) -> KernelSet:
    return KernelSet().add_decoder(layout, num_q_heads, max_seqs=max_seqs, **options)


def _of_decoder(kernels: KernelSet, arch: str) -> list[KernelSource]:
    try:
        return kernels.sources(arch)
    except (ArgumentValueError, ArgumentTypeError):  # refused: its row says so
        return []


def compile_sets(session: Session, sets: Iterable[str]) -> dict[str, Any]:
    """Compile what the sets need on the session's GPU. Returns how many, seconds, and what failed."""
    arch = session.device.gpu.arch
    compiled = compile_all(sources(arch, sets, session.formats), arch)
    for line in (str(compiled), *compiled.failed):
        session.say(line)
    return asdict(compiled)
