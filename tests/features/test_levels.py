"""The kernels for small batches: other stages, the same results."""

from __future__ import annotations

import dataclasses

import pytest

from cupaged.formats import FORMATS, FP8, NVFP4, CacheFormat
from cupaged.registry.decode import latency_levels, planned_spec
from cupaged.registry.ring import LATENCY_TOKENS
from tests.features.batches import Call, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
LENGTHS = (1, 16, 0, 33, 64, 700, 255)


def _columns_at(setup: Setup, room: int) -> list[int]:
    """Table widths on both sides of a room for tokens, and at it."""
    at = room // (len(LENGTHS) * setup.block_size)
    return [at - 1, at, at + 1]


@formats
def test_table_widths_around_the_levels(rig: Rig, fmt: CacheFormat) -> None:
    """A wide table chooses another kernel, and nothing else: all agree with float64."""
    setup = Setup.of(fmt, heads=(4, 2), head_dim=32, level=None)
    call = Call(lengths=LENGTHS, window=0, sinks=(0.5, -1.0, 2.0, 0.0))
    narrow = make_batch(setup, call)
    needed = narrow.tables.shape[1]
    for room in LATENCY_TOKENS:
        for columns in _columns_at(setup, room):
            batch = make_batch(setup, dataclasses.replace(call, extra_columns=columns - needed))
            assert batch.tables.shape[1] == columns
            batch.check(rig)
    narrow.check(rig)


@formats
@pytest.mark.parametrize("level", [2, 3])
def test_features_at_each_level(rig: Rig, fmt: CacheFormat, level: int) -> None:
    """Query tokens, cap, HND and small blocks, by kernels that other tests of this folder do not use."""
    setup = Setup.of(
        fmt,
        heads=(6, 2),
        head_dim=48,
        block_size=8,
        heads_first=True,
        query_tokens=3,
        soft_cap=9.0,
        level=level,
    )
    for window in (0, 2, 40):
        make_batch(setup, Call(lengths=LENGTHS, window=window, sinks=(0.5,) * 6, q_gap=16)).check(rig)
    zero_query(setup, Call(lengths=(1, 5, 70, 250))).check(rig)


def test_the_levels_differ(rig: Rig) -> None:
    """Or the widths above test one kernel only."""
    for fmt in (FP8, NVFP4):
        spec = planned_spec(
            key_format=FORMATS.index(fmt), value_format=FORMATS.index(fmt), head_dim=32, gqa_ratio=2,
            num_kv_heads=2, block_size=16,
        )  # fmt: skip
        assert len(set(latency_levels(spec, rig.gpu.limits))) > 1
