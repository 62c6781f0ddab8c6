"""The oracle, the poisoned cases and the closed forms, against each other and against hand-made numbers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, block_sections, gather_tokens
from tests import oracle
from tests.closed_form import fixture_d, fixture_h, fixture_p, fixture_u, fixture_x2, lse_of_zero_query
from tests.oracle import E2M1_TABLE, E4M3_TABLE, F64, assert_matches
from tests.poison import Guarded, Options, PagedCase, Poison, Shape, decode_pool, random_case, with_gaps

by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def paged_output(case: PagedCase) -> tuple[F64, F64]:
    """The oracle over the case's own poisoned pools and tables."""
    k_pool = decode_pool(case.k_pool, case.layout, case.k_scale)
    v_pool = decode_pool(case.v_pool, case.layout, case.v_scale)
    return oracle.decode_float64(
        case.q, k_pool, v_pool, case.block_tables, case.seq_lens, case.inv_sqrt_d, case.window
    )


def bf16(values: npt.ArrayLike) -> npt.NDArray[Any]:
    return np.asarray(values, np.float64).astype(ml_dtypes.bfloat16)


class TestTables:
    def test_known_e4m3_values(self) -> None:
        known = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x40: 2.0,
                 0x48: 4.0, 0x7E: 448.0, 0xFE: -448.0, 0xB8: -1.0}  # fmt: skip
        for code, value in known.items():
            assert E4M3_TABLE[code] == value, hex(code)
        assert np.flatnonzero(np.isnan(E4M3_TABLE)).tolist() == [0x7F, 0xFF]
        assert (np.diff(E4M3_TABLE[:0x7F]) > 0).all()

    def test_e2m1_is_one_sign_one_mantissa_bit(self) -> None:
        assert E2M1_TABLE.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
        assert np.signbit(E2M1_TABLE[8])


class TestAttention:
    def test_two_keys_by_hand(self) -> None:
        q = np.array([[1.0, 0.0]])
        k = np.array([[[0.0, 5.0]], [[2.0, -5.0]]])
        v = np.array([[[0.0, 1.0]], [[1.0, 3.0]]])
        out, lse = oracle.attention_float64(q, k, v, 2.0)
        weight = 1 / (1 + math.exp(-4.0))
        np.testing.assert_allclose(out, [[weight, 1 + 2 * weight]])
        np.testing.assert_allclose(lse, [math.log(1 + math.exp(4.0))])

    def test_no_key(self) -> None:
        out, lse = oracle.attention_float64(np.ones((2, 4)), np.ones((0, 1, 4)), np.ones((0, 1, 4)), 1.0)
        assert not out.any()
        assert (lse == -np.inf).all()

    @pytest.mark.parametrize(("window", "mean"), [(4, 18.5), (1, 20.0), (20, 10.5), (99, 10.5), (0, 10.5)])
    def test_window_includes_the_newest_key(self, window: int, mean: float) -> None:
        case, expected = fixture_u(BF16, [20], window=window)
        assert (expected == mean).all()
        for out, lse in (case.expected(), paged_output(case)):
            np.testing.assert_allclose(out, expected, rtol=1e-14)
            np.testing.assert_allclose(lse, lse_of_zero_query(case), rtol=1e-14)

    def test_bad_blocks_and_narrow_tables_are_nan(self) -> None:
        pool = np.ones((3, 16, 1, 2))
        tables = np.array([[1, 99], [1, 2], [1, -1], [0x7FFFFFFF, -1]], np.int32)
        out, lse = oracle.decode_float64(
            np.zeros((4, 1, 2)), pool, pool, tables, np.array([17, 33, 16, 0]), 1.0
        )
        assert np.isnan(out).all((1, 2)).tolist() == [True, True, False, False]
        assert np.isnan(lse[:, 0]).tolist() == [True, True, False, False]
        assert (out[2] == 1.0).all()
        assert not out[3].any()

    def test_blocks_that_the_window_skips_are_not_read(self) -> None:
        pool = np.ones((3, 16, 1, 2))
        tables = np.array([[-1, 2]], np.int32)
        out, _ = oracle.decode_float64(np.zeros((1, 1, 2)), pool, pool, tables, np.array([20]), 1.0, window=4)
        assert (out == 1.0).all()


class TestSplits:
    @given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 64), st.sampled_from([1, 4, 16]))
    def test_ranges_cover_the_attended_keys_once(self, n: int, splits: int, window: int, align: int) -> None:
        ranges = oracle.split_ranges(n, splits, window, align)
        assert len(ranges) == splits
        first = max(0, n - window) if window else 0
        assert [t for b, e in ranges for t in range(b, e)] == list(range(first, n))
        assert all(b % align == 0 for b, e in ranges if first < b < e)

    @settings(max_examples=40)
    @given(st.integers(0, 70), st.integers(1, 9), st.integers(0, 40), st.integers(0, 99))
    def test_merging_any_split_gives_the_whole(self, n: int, splits: int, window: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, k, v = (
            rng.standard_normal((4, 8)) * 5,
            rng.standard_normal((n, 2, 8)),
            rng.standard_normal((n, 2, 8)),
        )
        ranges = oracle.split_ranges(n, splits, window)
        out, lse = oracle.merge_float64(oracle.workspace_float64(q, k, v, 0.3, ranges))
        expected, expected_lse = oracle.attention_float64(q, k, v, 0.3, window)
        np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-11, atol=1e-13)

    def test_empty_split_is_the_contract_s_empty_state(self) -> None:
        workspace = oracle.workspace_float64(
            np.ones((2, 3)), np.ones((1, 1, 3)), np.ones((1, 1, 3)), 1.0, [(1, 1)]
        )
        np.testing.assert_array_equal(workspace, np.broadcast_to([0, 0, 0, -np.inf, 0], (2, 1, 5)))

    def test_merge_with_an_empty_state_is_exact(self) -> None:
        for pair in ([(7.0, 2.0), (0.0, -math.inf)], [(math.nan, -math.inf), (7.0, 2.0)]):
            (out_a, lse_a), (out_b, lse_b) = pair
            out, lse = oracle.merge_lse_float64([[out_a]], [lse_a], [[out_b]], [lse_b])
            assert (float(out[0, 0]), float(lse[0])) == (7.0, 2.0)
        out, lse = oracle.merge_lse_float64([[7.0]], [2.0], [[1.0]], [math.nan])
        assert math.isnan(out[0, 0])
        assert math.isnan(lse[0])

    def test_merge_uses_natural_logarithms(self) -> None:
        out, lse = oracle.merge_lse_float64([[0.0]], [math.log(3072)], [[1.0]], [math.log(64)])
        assert out[0, 0] == pytest.approx(64 / 3136)
        assert lse[0] == pytest.approx(math.log(3136))


class TestAssertMatches:
    def test_accepts_one_rounding(self) -> None:
        expected = np.random.default_rng(0).standard_normal((3, 4, 64))
        assert_matches(bf16(expected), expected)
        assert_matches(bf16(expected).view(np.uint16), expected)

    def test_ulp(self) -> None:
        np.testing.assert_array_equal(oracle.bf16_ulp([1.0, 1.99, 2.0, -0.75]), [2**-7, 2**-7, 2**-6, 2**-8])
        smallest = float(np.array([1], np.uint16).view(ml_dtypes.bfloat16)[0])
        np.testing.assert_array_equal(oracle.bf16_ulp([0.0, smallest, 2.0**-126]), [0.0, smallest, smallest])

    def test_two_ulps_pass_and_three_fail_naming_the_index(self) -> None:
        expected = np.ones((2, 4, 64))
        near = expected.copy()
        near[1, 2, 3] += 2 * 2.0**-7
        assert_matches(bf16(near), expected)
        near[1, 2, 3] += 2.0**-7
        with pytest.raises(AssertionError, match=r"worst at \(1, 2, 3\): got .*1\.0234375.*expected .*1\.0"):
            assert_matches(bf16(near), expected)

    def test_small_errors_everywhere_fail_by_their_norm(self) -> None:
        expected = np.ones((2, 4, 64))
        expected[1] += 2.0**-7
        with pytest.raises(AssertionError, match=r"sequence 1: L2 error"):
            assert_matches(bf16(np.ones((2, 4, 64))), expected)

    @pytest.mark.parametrize(
        ("got", "want"),
        [
            (math.nan, 1.0),
            (1.0, math.nan),
            (math.inf, 1.0),
            (math.inf, -math.inf),
            (0.0, math.inf),
            (math.nan, math.inf),
        ],
    )
    def test_nan_and_infinity_must_agree(self, got: float, want: float) -> None:
        out, expected = np.ones((2, 1, 4)), np.ones((2, 1, 4))
        out[1, 0, 2], expected[1, 0, 2] = got, want
        with pytest.raises(AssertionError, match=r"first at \(1, 0, 2\)"):
            assert_matches(bf16(out), expected)
        out[1, 0, 2] = want
        assert_matches(bf16(out), expected)

    def test_zero_rows_must_be_zero(self) -> None:
        out = np.zeros((1, 1, 4))
        assert_matches(bf16(out), np.zeros((1, 1, 4)))
        out[0, 0, 1] = 1e-38
        with pytest.raises(AssertionError, match=r"\(0, 0, 1\)"):
            assert_matches(bf16(out), np.zeros((1, 1, 4)))

    def test_shapes_must_agree(self) -> None:
        with pytest.raises(AssertionError, match="shape"):
            assert_matches(bf16(np.zeros((1, 4))), np.zeros((1, 1, 4)))
        assert_matches(bf16(np.zeros((0, 2, 4))), np.zeros((0, 2, 4)))


LENGTHS = [1, 0, 15, 16, 17, 33]
MEMORY = [
    Options(),
    Options(seed=5, unused_column=-1, table_width=7, q_gap=8, spare_blocks=0),
    Options(seed=6, block_padding=48, section_padding=16, k_scale=0.5, v_scale=2.0),
]


def memory_for(fmt: CacheFormat, options: Options) -> Options:
    """The options without what a format does not have."""
    return Options(
        seed=options.seed,
        unused_column=options.unused_column,
        table_width=options.table_width,
        spare_blocks=options.spare_blocks,
        q_gap=options.q_gap,
        block_padding=0 if fmt == BF16 else options.block_padding,
        section_padding=options.section_padding if fmt == NVFP4 else 0,
        k_scale=options.k_scale if fmt == FP8 else 1.0,
        v_scale=options.v_scale if fmt == FP8 else 1.0,
    )


@by_format
class TestCases:
    @pytest.mark.parametrize("memory", MEMORY)
    def test_pools_tables_and_dense_arrays_agree(self, fmt: CacheFormat, memory: Options) -> None:
        case = random_case(fmt, LENGTHS, Shape(6, 3, 32, 16), window=0, options=memory_for(fmt, memory))
        for pool, scale, dense in (
            (case.k_pool, case.k_scale, case.k_dense),
            (case.v_pool, case.v_scale, case.v_dense),
        ):
            for seq, n in enumerate(LENGTHS):
                tokens = gather_tokens(pool, case.layout, case.block_tables[seq], n, scale=scale)
                np.testing.assert_allclose(tokens, dense[seq], rtol=1e-7, atol=0)
                assert np.isfinite(tokens).all()
                assert n == 0 or tokens.std() > 0.5
        for got, expected in zip(paged_output(case), case.expected(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12)
        case.assert_guards_intact()

    def test_everything_unowned_is_poison(self, fmt: CacheFormat) -> None:
        case = random_case(fmt, LENGTHS, options=Options(unused_column=-1))
        owned = np.zeros((case.num_blocks, case.layout.block_size), bool)
        for seq, n in enumerate(LENGTHS):
            for token in range(n):
                owned[case.block_tables[seq, token // 16], token % 16] = True
            assert (case.block_tables[seq, -(-n // 16) :] == -1).all()
        assert owned.sum() == sum(LENGTHS)
        assert not owned[0].any()
        for pool in (case.k_pool, case.v_pool):
            nan = np.isnan(decode_pool(pool, case.layout))
            np.testing.assert_array_equal(nan.all((2, 3)), ~owned)
            np.testing.assert_array_equal(nan.any((2, 3)), ~owned)

    @pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF, Poison.STALE])
    def test_twins_share_all_that_is_live(self, fmt: CacheFormat, poison: Poison) -> None:
        loud, quiet = (random_case(fmt, LENGTHS, options=Options(poison=p)) for p in (poison, Poison.QUIET))
        np.testing.assert_array_equal(loud.block_tables, quiet.block_tables)
        for a, b in zip(paged_output(loud), paged_output(quiet), strict=True):
            np.testing.assert_array_equal(a, b)
        sections = zip(
            block_sections(loud.k_pool, loud.layout), block_sections(quiet.k_pool, quiet.layout), strict=True
        )
        assert all((a[0] != b[0]).all() for a, b in sections)

    def test_uniform(self, fmt: CacheFormat) -> None:
        lengths = [0, 1, 15, 16, 17, 31, 33, 127, 129, 255]
        case, expected = fixture_u(fmt, lengths)
        if fmt == BF16:
            assert expected[:, 0, 0].tolist() == [0.0] + [(n + 1) / 2 for n in lengths[1:]]
        else:
            # 1.5 + 3 + 6 + 12 = 22.5 in every four tokens
            assert expected[:4, 0, 0].tolist() == [0.0, 1.5, (3 * 22.5 + 10.5) / 15, 5.625]
        self.check(case, expected)
        np.testing.assert_allclose(paged_output(case)[1], lse_of_zero_query(case), rtol=1e-14)

    @pytest.mark.parametrize("heads", [(9, 3), (28, 4), (24, 4), (5, 1)])
    def test_heads(self, fmt: CacheFormat, heads: tuple[int, int]) -> None:
        case, expected = fixture_h(fmt, [5, 0, 20], Shape(*heads, 32, 16))
        assert len(set(expected[0, :, 0])) == heads[1]
        assert not expected[1].any()
        self.check(case, expected)

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_lanes(self, fmt: CacheFormat, head_dim: int) -> None:
        case, expected = fixture_d(fmt, [5, 0, 40], Shape(4, 2, head_dim, 8))
        assert fmt != BF16 or expected[0, 3].tolist() == list(range(head_dim))
        self.check(case, expected)

    @pytest.mark.parametrize("lane", [0, 63])
    def test_two_keys(self, fmt: CacheFormat, lane: int) -> None:
        case, expected = fixture_x2(fmt, lane)
        if fmt != NVFP4:
            np.testing.assert_allclose(expected, 0.98201, atol=5e-6)
        self.check(case, expected)

    @pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF])
    def test_poison(self, fmt: CacheFormat, poison: Poison) -> None:
        case, expected = fixture_p(fmt, poison)
        assert expected[:, 0, 0].tolist() == ([1.0, 2.0] if fmt == BF16 else [1.5, 3.5])
        self.check(case, expected)

    @staticmethod
    def check(case: PagedCase, expected: F64) -> None:
        np.testing.assert_allclose(paged_output(case)[0], expected, rtol=1e-13)
        assert_matches(bf16(expected), case.expected()[0])


def test_bf16_past_255_uses_exact_values() -> None:
    case, expected = fixture_u(BF16, [256, 1000])
    np.testing.assert_allclose(case.expected()[0], expected, rtol=1e-13)


def test_guards_notice_one_byte() -> None:
    guarded = Guarded.allocate((3, 5), np.uint16)
    assert guarded.array.ctypes.data % 128 == 0
    guarded.array[...] = 0
    guarded.assert_intact()
    copy = guarded.storage.copy()
    guarded.assert_intact(copy)
    for index in (guarded.offset - 1, guarded.offset + guarded.array.nbytes):
        copy = guarded.storage.copy()
        copy[index] ^= 1
        with pytest.raises(AssertionError, match="guard byte"):
            guarded.assert_intact(copy)


def test_gaps_are_nan() -> None:
    rows = bf16(np.arange(12)).reshape(2, 3, 2)
    wide = with_gaps(rows, 9)
    np.testing.assert_array_equal(wide[:, :6].reshape(2, 3, 2), rows)
    assert np.isnan(wide[:, 6:].astype(np.float32)).all()
    case = random_case(BF16, [3, 4], options=Options(q_gap=8))
    assert case.q_storage().shape == (2, case.q_stride) == (2, 4 * 64 + 8)
    assert np.isnan(case.q_storage()[:, -8:].astype(np.float32)).all()
