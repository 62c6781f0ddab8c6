"""Pieces of memory that meet, against sets of single bytes."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies

from cupaged.ops._runs import Run, meet

RUNS = strategies.builds(
    Run,
    begin=strategies.integers(0, 60),
    nbytes=strategies.integers(0, 9),
    count=strategies.integers(0, 6),
    stride=strategies.integers(0, 12),
)
SEVERAL = strategies.lists(RUNS, min_size=1, max_size=2)


def covered(runs: list[Run]) -> set[int]:
    return {
        run.begin + piece * run.stride + byte
        for run in runs
        for piece in range(run.count)
        for byte in range(run.nbytes)
    }


@hypothesis.given(SEVERAL, SEVERAL)
@hypothesis.settings(max_examples=2000, deadline=None)
def test_runs_meet_where_they_share_a_byte(first: list[Run], second: list[Run]) -> None:
    shared = not covered(first).isdisjoint(covered(second))
    assert meet(first, second) == meet(second, first) == shared


def test_large_runs_of_one_stride_take_no_memory() -> None:
    k, v = (Run(begin, 4096, 2**40, 8192) for begin in (0, 4096))
    assert not meet([k], [v])
    assert meet([k], [Run(4097, 4096, 2**40, 8192)])
    assert meet([k], [Run(8192 * (2**40 - 1) + 4095, 1)])
    assert not meet([k], [Run(8192 * (2**40 - 1) + 4096, 1)])
