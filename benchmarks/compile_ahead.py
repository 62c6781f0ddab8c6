"""Every kernel of a run compiled first, all processors at work, into the cache on disk.

A backend that only records says which sources the decoders and launchers would compile; processes compile
them. (Threads would wait for each other: loading a kernel is locked, and so is part of NVRTC.)
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from benchmarks import cascade, loads
from benchmarks.cases import Case, cases_of
from benchmarks.session import Session
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheFormat
from cupaged.registry import entries
from cupaged.source import KernelSource
from tests.fake_backend import FakeBackend

# Sets whose kernels are the launchers', at 32/8 heads of 128 and blocks of 16.
LAUNCHER_SETS = {"seed_launchers", "tiled", "writers", "host_cost"}
SHARED_ENTRIES = ("paged_decode_attn_reduce", "attention_", "bf16_absmax")


def sources(limits: Any, sets: Iterable[str], formats: Iterable[CacheFormat]) -> list[KernelSource]:
    """What the sets compile on a device of these limits, each source once."""
    recorder = FakeBackend()
    recorder.limits = limits
    chosen = set(sets)
    for case in cases_of(chosen, formats):
        _record_decoder(recorder, case)
    if "cascade" in chosen:
        for fmt in formats:
            CascadeDecoder(
                recorder, loads.BASE.layout(fmt), loads.BASE.num_q_heads, cascade.NUM_SEQS
            )  # its merge is compiled when it is first used
    if chosen & LAUNCHER_SETS:
        for fmt in formats:
            _record_launchers(recorder, fmt)
    return list({(source.path, source.defines): source for source in recorder.loads}.values())


def _record_decoder(recorder: FakeBackend, case: Case) -> None:
    try:
        case.decoder(Decoder, recorder)
    except (ArgumentValueError, ArgumentTypeError):  # refused: its row says so
        return


def _record_launchers(recorder: FakeBackend, fmt: CacheFormat) -> None:
    load = loads.BASE
    layout = load.layout(fmt)
    scalars = {
        "num_q_heads": load.num_q_heads,
        "num_kv_heads": load.num_kv_heads,
        "head_dim": load.head_dim,
        "block_size": load.block_size,
        "gqa_ratio": load.num_q_heads // load.num_kv_heads,
        "data_section_bytes": layout.data_section_bytes,
    }
    for known in entries():
        plain = known.entry == "paged_decode_attn_tiled" and fmt.name == "bf16"
        belongs = known.entry.endswith(f"_{fmt.name}") or known.entry.startswith(SHARED_ENTRIES) or plain
        if belongs and known.specialise is not None and set(known.scalar_names) <= scalars.keys():
            spec = known.specialise({name: scalars[name] for name in known.scalar_names})
            recorder.kernel(known.module, known.entry).warm(**spec)


def _compile(work: tuple[KernelSource, Any]) -> str:
    """Compile one source into the cache; what went wrong, or nothing."""
    from cupaged.backends.cupy import cubin_cache

    try:
        cubin_cache.compiled(*work)
    except Exception as error:  # the row that needs it will fail with the same
        return f"{work[0].entry}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _outcome(running: Future[str]) -> str:
    error = running.exception()  # of a process that died
    return running.result() if error is None else f"{type(error).__name__}: {error}"


def compile_all(
    needed: list[KernelSource], target: Any, say: Callable[[str], None], workers: int | None = None
) -> dict[str, Any]:
    """Compile the sources in processes. Returns how many, seconds, and what failed."""
    begin = time.monotonic()
    count = max(1, min(len(needed), workers or os.cpu_count() or 1))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_compile, (source, target)) for source in needed]
    failed = [message for message in map(_outcome, running) if message]
    seconds = round(time.monotonic() - begin, 1)
    say(f"{len(needed)} kernels compiled by {count} processes in {seconds} s, {len(failed)} failed")
    for message in failed:
        say(message)
    return {"kernels": len(needed), "processes": count, "seconds": seconds, "failed": failed}


def compile_sets(session: Session, sets: Iterable[str]) -> dict[str, Any]:
    """Compile what the sets need on the session's GPU."""
    gpu = session.device.gpu
    return compile_all(sources(gpu.limits, sets, session.formats), gpu._target, session.say)
