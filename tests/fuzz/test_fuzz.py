"""Random cases against float64 on both backends: a few dozen here, thousands by `tests.fuzz.campaign`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, NVFP4
from cupaged.registry import limits_of_capability
from tests.fake_backend import FakeBackend, aligned
from tests.fuzz.campaign import Campaign, sources
from tests.fuzz.check import check
from tests.fuzz.draws import EMULATED, SPECIALISATIONS, Draw, draws
from tests.paths import run_uploaded
from tests.poison import Options, random_case
from tests.rig import Rig, upload_case

CASES = int(os.environ.get("CUPAGED_FUZZ_CASES", "60"))


@settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(draw=draws(EMULATED, most=200))
def test_random_cases(rig: Rig, draw: Draw) -> None:
    check(rig, draw)


def test_few_specialisations() -> None:
    assert len(SPECIALISATIONS) <= 40
    assert set(EMULATED) <= set(SPECIALISATIONS)


class Loading(FakeBackend):
    """A GPU of sm_90a on which nothing runs: it knows what was to be compiled."""

    limits = limits_of_capability(90, 132)

    def asarray(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        copy = aligned(array.shape, array.dtype)
        copy[...] = array
        return copy

    def to_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def null_stream(self) -> int:
        return 0


@pytest.mark.parametrize("padding", [0, 16])
def test_the_campaign_compiles_every_kernel_before(padding: int) -> None:
    """Blocks and scales with room between them are other kernels."""
    gpu = Loading()
    rig = Rig(gpu)
    for fmt, shape in SPECIALISATIONS:
        options = Options(
            block_padding=padding if fmt != BF16 else 0, section_padding=padding if fmt == NVFP4 else 0
        )
        up = upload_case(rig, random_case(fmt, (1, 17, 0, 40), shape, options=options))
        for path in ("single", "splits3", "decoder", "tiled3"):
            with contextlib.suppress(ArgumentValueError):  # no decoder takes the shape
                run_uploaded(up, path)
        kernel = rig.kernel(f"reshape_and_cache_{fmt.name}")
        kernel.warm(head_dim=shape.head_dim, block_size=shape.block_size)
    compiled = {(source.path, source.defines) for source in sources("sm_90a")}
    loaded = {(source.path, source.defines) for source in gpu.loads}
    assert loaded <= compiled
    modules = {path.stem for path, _ in loaded}
    assert len(modules) == 3 + 3 + 1 + 3 + 1, "writers, decode, reduction, tiles, Decoder"


def test_the_campaign_counts_what_it_ran(rig: Rig) -> None:
    found = Campaign(rig, cases=8, seed=5, specialisations=EMULATED, most=60).run()
    assert found["cases"] == 8
    assert found["failures"] == 0
    assert found["launches"] > found["cases"]
    again = Campaign(rig, cases=8, seed=5, specialisations=EMULATED, most=60).run()
    assert again["digest"] == found["digest"], "a seed gives the same cases"
    other = Campaign(rig, cases=8, seed=6, specialisations=EMULATED, most=60).run()
    assert other["digest"] != found["digest"]


def test_the_campaign_prints_a_case_that_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_on_windows(_rig: Rig, draw: Draw) -> int:
        assert draw.window < 5, "window"
        return 1

    monkeypatch.setattr("tests.fuzz.campaign.check", fails_on_windows)
    found = Campaign(
        rig, cases=50, seed=1, specialisations=EMULATED, phases=(Phase.generate, Phase.shrink)
    ).run()
    assert found["failures"] == 1
    assert "window=5," in found["failing_case"], "shrunk to the smallest"
    assert "Draw(" in capsys.readouterr().out
