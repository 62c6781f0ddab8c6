"""Decode attention against closed forms and float64, on every format and every path."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from tests import closed_form
from tests.oracle import assert_matches
from tests.poison import Options, Poison, Shape, build_case, random_case
from tests.rig import Rig, bits, run_decode, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
PATHS = (0, 1, 2, 7)  # 0: single pass; otherwise splits
paths = pytest.mark.parametrize("splits", PATHS, ids=lambda n: f"splits{n}" if n else "single")

BOUNDARY_LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255)


def _check(rig: Rig, case: Any, expected: np.ndarray, splits: int) -> None:
    up = upload_case(rig, case)
    assert_matches(run_decode(up, splits, num_blocks=case.num_blocks), expected)
    up.assert_pools_untouched()


@formats
@paths
def test_mean_of_values(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    case, expected = closed_form.fixture_u(fmt, BOUNDARY_LENGTHS)
    got = run_decode(upload_case(rig, case), splits)
    # Every weight is the same power of two, so nothing but the division and the last rounding is inexact.
    np.testing.assert_array_equal(got.astype(np.float64), _to_bf16(expected))


def _to_bf16(values: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


@formats
@paths
def test_heads_read_their_kv_head(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    for num_q_heads, num_kv_heads in ((9, 3), (28, 4), (24, 4), (5, 1), (4, 4), (16, 1), (32, 2)):
        case, expected = closed_form.fixture_h(fmt, (5, 20), Shape(num_q_heads, num_kv_heads))
        _check(rig, case, expected, splits)


@formats
@paths
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_lanes_are_dims(rig: Rig, fmt: CacheFormat, splits: int, head_dim: int) -> None:
    for block_size in (8, 16):
        case, expected = closed_form.fixture_d(fmt, (64, 5), Shape(4, 2, head_dim, block_size))
        _check(rig, case, expected, splits)


@formats
@paths
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_two_keys(rig: Rig, fmt: CacheFormat, splits: int, head_dim: int) -> None:
    for lane in (0, 1, 7, head_dim // 2 + 3, head_dim - 1):
        case, expected = closed_form.fixture_x2(fmt, lane, Shape(4, 2, head_dim, 16))
        _check(rig, case, expected, splits)


@formats
@paths
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("gqa_ratio", [1, 3, 4, 7, 8, 16])
def test_random_against_float64(
    rig: Rig, fmt: CacheFormat, splits: int, head_dim: int, gqa_ratio: int
) -> None:
    case = random_case(fmt, [1, 100, 37, 260], Shape(2 * gqa_ratio, 2, head_dim, 16))
    _check(rig, case, case.expected()[0], splits)


@formats
@paths
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 17, 32, 48, 100, 256])
def test_block_sizes(rig: Rig, fmt: CacheFormat, splits: int, block_size: int) -> None:
    lengths = [1, block_size, block_size + 1, 3 * block_size + 5, 77]
    case = random_case(fmt, lengths, Shape(4, 2, 64, block_size))
    _check(rig, case, case.expected()[0], splits)


@formats
@pytest.mark.parametrize("splits", [0, 1, 2, 8], ids=str)
def test_empty_sequence_is_a_zero_row(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    case, expected = closed_form.fixture_u(fmt, [4, 0, 7])
    got = run_decode(upload_case(rig, case), splits)
    assert not bits(got[1]).any()
    assert_matches(got, expected)


@formats
@paths
@pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF, Poison.STALE], ids=lambda p: p.value)
@pytest.mark.parametrize("block_size", [16, 24, 64])
def test_dead_bytes_change_no_bit(
    rig: Rig, fmt: CacheFormat, splits: int, poison: Poison, block_size: int
) -> None:
    lengths = [1, 3, 16, 17, 50, 129]
    layout = {"q_gap": 24, "unused_column": -1}
    if fmt != BF16:
        layout["block_padding"] = 64
    if fmt == NVFP4:
        layout["section_padding"] = 32
    results = []
    for fill in (poison, Poison.QUIET):
        case = random_case(fmt, lengths, Shape(8, 2, 64, block_size), options=Options(poison=fill, **layout))
        results.append(run_decode(upload_case(rig, case), splits))
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))
    assert_matches(results[0], case.expected()[0])


@formats
@paths
@pytest.mark.parametrize("window", [1, 4, 16, 20])
def test_sliding_window(rig: Rig, fmt: CacheFormat, splits: int, window: int) -> None:
    lengths = [max(1, window - 1), window, window + 1, window + 16, 4 * window + 3, 200]
    case = random_case(fmt, lengths, window=window)
    _check(rig, case, case.expected()[0], splits)
    case, expected = closed_form.fixture_u(fmt, [20, 50], window=window)
    _check(rig, case, expected, splits)


def test_window_counts_the_newest_key(rig: Rig) -> None:
    case, _ = closed_form.fixture_u(BF16, [20], window=4)
    assert float(run_decode(upload_case(rig, case), 0)[0, 0, 0]) == 18.5
    case, _ = closed_form.fixture_u(BF16, [20], window=1)
    assert float(run_decode(upload_case(rig, case), 0)[0, 0, 0]) == 20.0


@formats
@paths
def test_window_does_not_read_what_it_leaves_out(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    case = random_case(fmt, [100], window=20)
    tables = case.block_tables.copy()
    tables[0, :5] = -1  # tokens 0..79 are outside the window
    _check(rig, dataclasses.replace(case, block_tables=tables), case.expected()[0], splits)


@formats
@paths
@pytest.mark.parametrize("bad", [-1, 99, 0x7FFFFFFF, -(2**31)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_block_outside_the_pool_makes_its_row_nan(
    rig: Rig, fmt: CacheFormat, splits: int, bad: int, block_size: int
) -> None:
    # Finite everywhere, so that another block in its place shows.
    case = random_case(fmt, [40, 40, 33], Shape(4, 2, 64, block_size), options=Options(poison=Poison.QUIET))
    tables = case.block_tables.copy()
    tables[1, 1] = bad
    expected = case.expected()[0]
    expected[1] = np.nan
    _check(rig, dataclasses.replace(case, block_tables=tables), expected, splits)


@formats
@paths
def test_length_beyond_the_table_makes_its_row_nan(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    case = random_case(fmt, [20, 32, 9])
    assert case.max_blocks_per_seq == 2
    expected = case.expected()[0]
    for bad in (33, 2**31 - 1, -1):
        lengths = case.seq_lens.copy()
        lengths[0] = bad
        expected[0] = np.nan
        _check(rig, dataclasses.replace(case, seq_lens=lengths), expected, splits)


@formats
@paths
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**-20, 2.0**30, 2.0**100])
def test_query_magnitude(rig: Rig, fmt: CacheFormat, splits: int, magnitude: float) -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((3, 4, 64)) * magnitude
    q[:, 1] *= 2.0**-20  # heads of one group normalise apart
    keys = [rng.standard_normal((50, 2, 64)).astype(np.float32) for _ in range(3)]
    values = [rng.standard_normal((50, 2, 64)).astype(np.float32) for _ in range(3)]
    case = build_case(fmt, q, keys, values, inv_sqrt_d=0.125 / magnitude)
    _check(rig, case, case.expected()[0], splits)


@paths
def test_fp8_scales_apply_to_their_own_pool(rig: Rig, splits: int) -> None:
    options = Options(k_scale=0.5, v_scale=2.0)
    keys, values = [np.full((9, 2, 64), 2.0, np.float32)], [np.full((9, 2, 64), 3.0, np.float32)]
    case = build_case(FP8, np.ones((1, 4, 64)), keys, values, options=options)
    slot = int(case.block_tables[0, 0])
    assert case.k_pool[slot, 0, 0, 0] == 0x48
    assert case.v_pool[slot, 0, 0, 0] == 0x3C
    _check(rig, case, np.full((1, 4, 64), 3.0), splits)
    case = random_case(FP8, [70, 3], options=Options(k_scale=0.037, v_scale=0.0021))
    _check(rig, case, case.expected()[0], splits)


@formats
@paths
def test_nan_in_the_cache_reaches_only_its_head(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    rng = np.random.default_rng(5)
    keys = [rng.standard_normal((20, 2, 64)).astype(np.float32)]
    values = [rng.standard_normal((20, 2, 64)).astype(np.float32)]
    keys[0][11, 1, 3] = np.nan
    case = build_case(fmt, rng.standard_normal((1, 4, 64)), keys, values)
    got = run_decode(upload_case(rig, case), splits)
    assert np.isnan(got[0, 2:].astype(np.float32)).all()
    assert_matches(got[:, :2], case.expected()[0][:, :2])


@formats
def test_large_scores(rig: Rig, fmt: CacheFormat) -> None:
    rng = np.random.default_rng(6)
    keys = [rng.standard_normal((90, 2, 64)).astype(np.float32) for _ in range(2)]
    values = [rng.standard_normal((90, 2, 64)).astype(np.float32) for _ in range(2)]
    case = build_case(fmt, rng.standard_normal((2, 4, 64)) * 40.0, keys, values, inv_sqrt_d=4.0)
    for splits in PATHS:
        _check(rig, case, case.expected()[0], splits)


@formats
@paths
def test_a_pool_without_a_block_is_refused(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    up = upload_case(rig, random_case(fmt, [5, 3]))
    with pytest.raises(ArgumentValueError, match="num_blocks: got 0"):
        run_decode(up, splits, num_blocks=0)
