"""Random cases against float64 on both backends: a few dozen here, thousands by `tests.fuzz.campaign`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.campaign import Campaign
from tests.fuzz.check import check
from tests.fuzz.draws import EMULATED, SPECIALISATIONS, Draw, draws
from tests.rig import Rig

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
