"""Thousands of random cases in one run: `python -m tests.fuzz.campaign --cases 2000 --json F`.

The same seed gives the same cases. The first case that fails is shrunk, printed, and ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError, CupagedError
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.registry import entries
from tests.fake_backend import FakeBackend
from tests.fuzz.check import check
from tests.fuzz.draws import SPECIALISATIONS, Draw, draws
from tests.paths import DECODER_SEQS
from tests.poison import Shape
from tests.rig import Rig

Specialisations = tuple[tuple[CacheFormat, Shape], ...]


class Campaign:
    """Random cases over one backend.

    Args:
        rig: the backend.
        cases: how many must pass.
        seed: of the whole run.
        specialisations: what cases are drawn over.
        most: tokens of a usual sequence.
        phases: of hypothesis.
    """

    def __init__(
        self,
        rig: Rig,
        *,
        cases: int,
        seed: int = 0,
        specialisations: Specialisations = SPECIALISATIONS,
        most: int = 700,
        phases: Sequence[Phase] = (Phase.generate, Phase.shrink),
    ) -> None:
        self._rig, self._cases, self._seed = rig, cases, seed
        self._specialisations, self._most, self._phases = specialisations, most, tuple(phases)
        self._digest = hashlib.sha256()
        self._seen: set[Draw] = set()
        self._formats: Counter[str] = Counter()
        self._classes: set[tuple[str, Shape]] = set()
        self._launches = 0
        self._failing: Draw | None = None

    def run(self) -> dict[str, Any]:
        """Counts, and the failing case if there is one. Runs batches until enough distinct cases passed."""
        begin, batch, message = time.monotonic(), 0, ""
        while len(self._seen) < self._cases and not message:
            # Hypothesis begins each batch with the same simple cases, which count once.
            message = self._run_batch(batch, self._cases - len(self._seen) + 20)
            batch += 1
        return {
            "backend": self._rig.name,
            "seed": self._seed,
            "cases": len(self._seen),
            "specialisations": len(self._classes),
            "formats": dict(self._formats),
            "launches": self._launches,
            "failures": int(bool(message)),
            "failing_case": str(self._failing) if message else "",
            "message": message,
            "seconds": round(time.monotonic() - begin, 1),
            "digest": self._digest.hexdigest()[:16],
        }

    def _run_batch(self, batch: int, cases: int) -> str:
        """The message of a failure, or nothing."""

        @seed(self._seed + 1_000_003 * batch)
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=self._phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(draw=draws(self._specialisations, self._most))
        def one(draw: Draw) -> None:
            self._one(draw)

        try:
            one()
        except (AssertionError, CupagedError) as error:
            print(f"failed: {self._failing}\n{error}")
            return f"{type(error).__name__}: {error}"
        return ""

    def _one(self, draw: Draw) -> None:
        if draw in self._seen or len(self._seen) >= self._cases:
            return
        self._failing = draw
        launches = check(self._rig, draw)
        self._launches += launches
        self._seen.add(draw)
        self._digest.update(repr(draw).encode())
        self._formats[draw.format] += 1
        self._classes.add((draw.format, draw.shape))


def _belongs(entry: str, fmt: str) -> bool:
    """Whether a case of the format launches it."""
    if entry.endswith(("_bf16", "_fp8", "_nvfp4")):
        return entry.endswith(f"_{fmt}") or "reduce" in entry
    return entry.startswith(("paged_decode_attn_tiled", "attention_finalize"))


def compile_ahead(rig: Rig, specialisations: Specialisations, workers: int = 16) -> int:
    """Compile everything the cases need in parallel, into the cache on disk; returns how many kernels."""
    if rig.name != "cupy":
        return 0
    from cupaged.backends.cupy import cubin_cache

    recorder = FakeBackend()
    recorder.limits = rig.gpu.limits
    for fmt, shape in specialisations:
        with contextlib.suppress(ArgumentValueError):  # shapes that no decoder takes
            layout = CacheLayout(fmt, shape.num_kv_heads, shape.head_dim, shape.block_size)
            Decoder(recorder, layout, shape.num_q_heads, DECODER_SEQS)
        names = ("num_q_heads", "num_kv_heads", "head_dim", "block_size")
        scalars = {name: getattr(shape, name) for name in names}
        scalars["gqa_ratio"] = shape.num_q_heads // shape.num_kv_heads
        scalars["data_section_bytes"] = shape.block_size * shape.num_kv_heads * shape.head_dim // 2
        for known in entries():
            launched = _belongs(known.entry, fmt.name) and set(known.scalar_names) <= scalars.keys()
            if launched and known.specialise is not None:
                spec = known.specialise({name: scalars[name] for name in known.scalar_names})
                recorder.kernel(known.module, known.entry).warm(**spec)
    sources = {(source.path, source.defines): source for source in recorder.loads}
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda source: cubin_cache.compiled(source, rig.gpu._target), sources.values()))
    return len(sources)


def main() -> int:
    """Exit status 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["cupy", "emulator"], default="cupy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.backend == "cupy":
        from cupaged.backends.cupy import CupyBackend as Backend
    else:
        from cupaged.backends.emulator import EmulatorBackend as Backend
    rig = Rig(Backend())
    begin = time.monotonic()
    kernels = compile_ahead(rig, SPECIALISATIONS)
    compiling = round(time.monotonic() - begin, 1)
    print(f"{kernels} kernels compiled in {compiling} s", flush=True)
    found = Campaign(rig, cases=options.cases, seed=options.seed).run()
    found |= {"kernels": kernels, "compile_seconds": compiling}
    print(json.dumps({name: value for name, value in found.items() if name != "message"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(found["failures"])


if __name__ == "__main__":
    sys.exit(main())
