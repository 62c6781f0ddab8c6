"""Loads and their byte model."""

from __future__ import annotations

import pytest

from benchmarks import loads
from benchmarks.loads import Load
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat


def test_bytes_are_those_of_k_and_v() -> None:
    load = loads.equal(64, 8192)
    tokens = 64 * 8192
    assert load.bytes_read(BF16) == tokens * 8 * 128 * 2 * 2
    assert load.bytes_read(FP8) == tokens * 8 * 128 * 2
    assert load.bytes_read(NVFP4) == tokens * 8 * (64 + 8) * 2


def test_a_window_limits_the_bytes() -> None:
    load = Load(8, 2, 64, 16, (5, 100, 1000), sliding_window=100)
    assert load.attended_tokens == 5 + 100 + 100
    assert load.label == "8/2 d64 page 16 3 x 5 window 100"


def test_leveled_lengths_have_as_many_tokens() -> None:
    even = loads.leveled(loads.UNEQUAL)
    assert sum(even.seq_lens) == sum(loads.UNEQUAL.seq_lens)
    assert len(even.seq_lens) == 64
    assert max(even.seq_lens) - min(even.seq_lens) <= 1


def test_unequal_lengths_are_the_same_in_every_run() -> None:
    assert loads.log_uniform(64, 128, 32768, "x") == loads.log_uniform(64, 128, 32768, "x")
    assert all(128 <= n < 32768 for n in loads.UNEQUAL.seq_lens)
    assert len(set(loads.UNEQUAL.seq_lens)) > 50
    assert len(loads.MANY.seq_lens) == 100_000


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_variant_reads_two_gigabytes(fmt: CacheFormat) -> None:
    for variant in loads.variants():
        load = variant.load(fmt)
        assert 2e9 <= load.bytes_read(fmt) <= 2.2e9, variant
        assert load.num_q_heads % load.num_kv_heads == 0


def test_the_variants_are_all_there() -> None:
    shapes = list(loads.variants())
    assert {v.num_q_heads // v.num_kv_heads for v in shapes} >= {1, 3, 4, 7, 8, 16}
    assert {v.head_dim for v in shapes} == {64, 128, 256}
    assert {v.num_kv_heads for v in shapes} == {1, 2, 4, 8}
    assert {v.block_size for v in shapes} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert any(v.windowed for v in shapes)
    assert loads.MILLIONS.seq_lens == (4 * 2**20,)


def test_tables_rotate_as_far_as_the_pool_reaches() -> None:
    assert loads.rotations(10, 1000) == loads.MAX_TABLES
    assert loads.rotations(100, 1000) == 10
    assert loads.rotations(2000, 1000) == 1
    layout = loads.equal(1, 16).layout(BF16)
    assert loads.pool_blocks(layout, 5, 10 * layout.block_stride_bytes) == 10
    assert loads.pool_blocks(layout, 50, 10 * layout.block_stride_bytes) == 50
