"""Lengths, tables and windows, on every path and format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.checked import checked_mode
from cupaged.errors import CheckedModeError
from cupaged.formats import BF16, FORMATS, CacheFormat
from tests import closed_form
from tests.oracle import assert_matches
from tests.paths import PATHS, offers, path_format_pairs, run
from tests.poison import Options, PagedCase, Poison, Shape, random_case
from tests.rig import Rig, bits

edge = pytest.mark.edge
everywhere = pytest.mark.parametrize(
    ("path", "fmt"), path_format_pairs(), ids=[f"{p}-{f.name}" for p, f in path_format_pairs()]
)
windowed = pytest.mark.parametrize(
    ("path", "fmt"),
    [(p, f) for p, f in path_format_pairs() if offers(p, f, window=1)],
    ids=[f"{p}-{f.name}" for p, f in path_format_pairs() if offers(p, f, window=1)],
)
ONE_HEAD = (2, 1, 64)


def around(anchors: Sequence[int], most: int = 4097) -> list[int]:
    """The anchors and both neighbours of each."""
    return sorted({n + d for n in anchors for d in (-1, 0, 1) if 0 <= n + d <= most})


def boundary_lengths(block_size: int) -> list[int]:
    """Around every power of two up to 4096, and around block multiples."""
    multiples = [block_size * m for m in (1, 2, 3, 5, 7, 4096 // block_size)]
    return around([2**k for k in range(13)] + [m for m in multiples if m <= 4096])


@edge("fixture-u")
@edge("lengths-mean")
@everywhere
def test_the_mean_of_everything(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case, expected = closed_form.fixture_u(fmt, [1, 15, 16, 17, 31, 33, 127, 129, 255], Shape(*ONE_HEAD, 16))
    found = run(rig, case, path)
    rounded = expected.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(found.out), bits(rounded))
    if found.lse is not None:
        np.testing.assert_allclose(found.lse, closed_form.lse_of_zero_query(case), atol=1e-5)


@edge("lengths-mean")
@everywhere
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_the_first_and_the_last_token_count(rig: Rig, path: str, fmt: CacheFormat, block_size: int) -> None:
    lengths = boundary_lengths(block_size)
    if block_size == 1:
        lengths = [n for n in lengths if n <= 257]
        if fmt.name == "nvfp4" and path == "decoder":
            pytest.skip("scales of one token are fewer bytes than a copy takes")
    if path.startswith("tiled"):
        lengths = [n for n in lengths if n <= 129 * int(path[5:])]
    case, expected = closed_form.fixture_ends(fmt, lengths, Shape(*ONE_HEAD, block_size))
    assert_matches(run(rig, case, path).out, expected)


@edge("fixture-p")
@edge("lengths-tails")
@everywhere
@pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF, Poison.STALE], ids=lambda p: p.value)
def test_tails_change_no_bit(rig: Rig, path: str, fmt: CacheFormat, poison: Poison) -> None:
    (poisoned, expected), (quiet, _) = (closed_form.fixture_p(fmt, fill) for fill in (poison, Poison.QUIET))
    got = run(rig, poisoned, path)
    np.testing.assert_array_equal(bits(got.out), bits(run(rig, quiet, path).out))
    assert_matches(got.out, expected)
    assert np.isfinite(got.out.astype(np.float32)).all()


@edge("table-block0-nan")
@everywhere
def test_unused_columns_do_not_stand_for_block_0(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case, expected = closed_form.fixture_u(fmt, [10], options=Options(unused_column=-1, table_width=3))
    assert case.block_tables[0, 0] > 0
    assert case.block_tables[0, 1:].tolist() == [-1, -1]
    assert_matches(run(rig, case, path).out, expected)


@edge("empty-row")
@edge("empty-parts")
@pytest.mark.parametrize("path", [*PATHS, "splits8"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_empty_sequences(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case, expected = closed_form.fixture_u(fmt, [4, 0, 7])
    found = run(rig, case, path)
    assert_matches(found.out, expected)
    assert not bits(found.out[1]).any()
    if found.lse is not None:
        assert (found.lse[1] == -np.inf).all()
    if found.workspace is not None:
        assert (found.workspace[1, :, :, -2] == -np.inf).all()
        assert not found.workspace[1, :, :, :-2].any()


@edge("empty-parts")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_more_parts_than_tokens(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [0, 1, 2, 16, 17])
    found = run(rig, case, "splits8")
    assert found.workspace is not None
    assert not np.isnan(found.workspace).any()
    assert_matches(found.out, case.expected()[0])
    assert_matches(found.out, run(rig, case, "single").out.astype(np.float64))


@edge("fixture-d")
@edge("head-dim-256")
@everywhere
@pytest.mark.parametrize("block_size", [8, 16])
def test_wide_heads(rig: Rig, path: str, fmt: CacheFormat, block_size: int) -> None:
    shape = Shape(2, 1, 256, block_size)
    case, expected = closed_form.fixture_d(fmt, (64, 5), shape)
    assert_matches(run(rig, case, path).out, expected)
    case, expected = closed_form.fixture_u(fmt, (64,), shape)
    assert_matches(run(rig, case, path).out, expected)


@edge("fixture-x2")
@everywhere
def test_two_keys(rig: Rig, path: str, fmt: CacheFormat) -> None:
    for head_dim in (64, 128, 256):
        for lane in (0, head_dim - 1):
            case, expected = closed_form.fixture_x2(fmt, lane, Shape(2, 1, head_dim, 16))
            assert_matches(run(rig, case, path).out, expected)


@edge("table-at-end")
@everywhere
@pytest.mark.parametrize("n", [31, 32])
def test_a_table_at_the_end_of_an_allocation(path: str, fmt: CacheFormat, n: int) -> None:
    """The checking emulator knows where an array ends; on a GPU compute-sanitizer runs the same shapes."""
    rig = Rig(EmulatorBackend(check="full"))
    case, expected = closed_form.fixture_u(fmt, [n, n])
    assert case.max_blocks_per_seq * 16 == 32
    assert_matches(run(rig, case, path).out, expected)


@edge("table-too-narrow")
@everywhere
def test_a_table_too_narrow_for_a_length(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case, expected = closed_form.fixture_u(fmt, [9, 32, 20])
    lengths = case.seq_lens.copy()
    lengths[1] = 33
    case, expected = dataclasses.replace(case, seq_lens=lengths), expected.copy()
    expected[1] = np.nan
    assert_matches(run(rig, case, path).out, expected)
    with checked_mode(), pytest.raises(CheckedModeError) as caught:
        run(rig, case, path)
    if not path.startswith("tiled"):
        assert (caught.value.array, caught.value.index, caught.value.value) == ("seq_lens", (1,), 33)


def pool_of_three(fmt: CacheFormat, bad: int) -> tuple[PagedCase, np.ndarray]:
    """Blocks that nobody owns hold finite numbers: standing in for the bad one they would show."""
    case, expected = closed_form.fixture_u(fmt, [20], options=Options(spare_blocks=0, poison=Poison.QUIET))
    assert case.num_blocks == 3
    tables = case.block_tables.copy()
    tables[0, 1] = bad
    return dataclasses.replace(case, block_tables=tables), np.full_like(expected, np.nan)


@edge("pool-of-three")
@everywhere
@pytest.mark.parametrize("bad", [99, 3, -1, 2**31 - 1, -(2**31)])
def test_a_block_outside_a_pool_of_three(rig: Rig, path: str, fmt: CacheFormat, bad: int) -> None:
    case, expected = pool_of_three(fmt, bad)
    assert_matches(run(rig, case, path).out, expected)
    with checked_mode(), pytest.raises(CheckedModeError, match=str(bad)):
        run(rig, case, path)


@edge("window")
@windowed
def test_the_newest_key_counts_in_a_window(rig: Rig, path: str, fmt: CacheFormat) -> None:
    for window, mean in ((4, 18.5), (1, 20.0), (20, 10.5), (10_000, 10.5)):
        case, expected = closed_form.fixture_u(fmt, [20], window=window)
        found = run(rig, case, path).out
        assert_matches(found, expected)
        if fmt == BF16:
            assert (found.astype(np.float32) == mean).all()


@edge("window")
@edge("window-grid")
@windowed
@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, 255])
def test_a_windows_first_and_last_token_count(rig: Rig, path: str, fmt: CacheFormat, window: int) -> None:
    lengths = [n for n in around([1, window, window + 16, 4 * window + 3, 600]) if n > 0]
    case, expected = closed_form.fixture_ends(fmt, lengths, Shape(*ONE_HEAD, 16), window=window)
    assert_matches(run(rig, case, path).out, expected)


@edge("window-grid")
@windowed
@pytest.mark.parametrize("window", [0, 16, 20, 37])
def test_windows_against_float64(rig: Rig, path: str, fmt: CacheFormat, window: int) -> None:
    w = window or 24
    case = random_case(fmt, [w - 1, w, w + 1, w + 16, 4 * w + 3], Shape(4, 2, 64, 16), window=window)
    assert_matches(run(rig, case, path).out, case.expected()[0])


@edge("fixture-h")
@edge("ratio-heads")
@everywhere
@pytest.mark.parametrize("heads", [(9, 3), (28, 4), (24, 4), (5, 1)], ids=str)
def test_each_query_head_reads_its_kv_head(
    rig: Rig, path: str, fmt: CacheFormat, heads: tuple[int, int]
) -> None:
    case, expected = closed_form.fixture_h(fmt, (5, 20), Shape(*heads))
    assert_matches(run(rig, case, path).out, expected)


@edge("long-and-many-splits")
@pytest.mark.parametrize("n", [65_536, 1_048_576])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_long_sequences(rig: Rig, fmt: CacheFormat, n: int) -> None:
    case, expected = closed_form.fixture_ends(fmt, [n], Shape(*ONE_HEAD, 64))
    paths = ("single", "splits33", "splits16384", "decoder") if n < 100_000 else ("splits16384", "decoder")
    for path in paths:
        assert_matches(run(rig, case, path).out, expected)
