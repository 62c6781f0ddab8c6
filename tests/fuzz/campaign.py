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
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from cupaged.ahead import KernelSet
from cupaged.errors import ArgumentValueError, CupagedError
from cupaged.formats import NVFP4, CacheFormat, CacheLayout
from cupaged.source import KernelSource
from tests.fuzz.check import check
from tests.fuzz.draws import SPECIALISATIONS, Draw, draws
from tests.paths import DECODER_SEQS
from tests.poison import Shape
from tests.rig import Rig
from tools.compile_kernels import add_launchers, compile_all, launcher_scalars, nothing_compiled

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


def sources(arch: str, specialisations: Specialisations = SPECIALISATIONS) -> list[KernelSource]:
    """Everything that the cases need on an architecture."""
    found: list[KernelSource] = []
    for fmt, shape in specialisations:
        tight = CacheLayout(fmt, shape.num_kv_heads, shape.head_dim, shape.block_size)
        layouts = [tight]
        if fmt == NVFP4:  # whose scales, further on, are not one piece with the data
            layouts.append(replace(tight, data_section_override=tight.data_section_bytes + 16))
        for layout in layouts:
            launchers = KernelSet()
            add_launchers(launchers, fmt, launcher_scalars(layout, shape.num_q_heads))
            found += launchers.sources(arch)
            decoder = KernelSet().add_decoder(layout, shape.num_q_heads, max_seqs=DECODER_SEQS)
            with contextlib.suppress(ArgumentValueError):  # shapes that no decoder takes
                found += decoder.sources(arch)
    return found


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
    compiled, compiling = None, contextlib.nullcontext()
    if options.backend == "cupy":
        compiled = compile_all(sources(rig.gpu.arch), rig.gpu.arch)
        print(compiled, *compiled.failed, sep="\n", flush=True)
        compiling = contextlib.nullcontext() if compiled.failed else nothing_compiled()
    with compiling:
        found = Campaign(rig, cases=options.cases, seed=options.seed).run()
    if compiled is not None:
        found |= {"kernels": compiled.kernels, "compile_seconds": compiled.seconds}
    print(json.dumps({name: value for name, value in found.items() if name != "message"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(found["failures"])


if __name__ == "__main__":
    sys.exit(main())
