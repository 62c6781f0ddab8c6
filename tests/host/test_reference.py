"""`step_tile_ref` and `finalize_ref` against the float64 oracle, however the keys are cut into tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, ElementStrides, paged_strides, scratch_strides
from cupaged.reference import AttnState, finalize_ref, step_tile_ref
from tests.closed_form import fixture_d, fixture_h, fixture_u, fixture_x2
from tests.oracle import assert_matches, decode_bf16_float64
from tests.poison import Options, PagedCase, Poison, Shape, random_case


def scratch_pool(case: PagedCase) -> tuple[npt.NDArray[Any], npt.NDArray[Any], ElementStrides]:
    """The case's pools as one scratch pool ``[slot, K|V, kv_head, block_size, head_dim]``: K, V, strides."""
    layout = case.layout
    both = np.stack([case.k_pool.view(np.uint16), case.v_pool.view(np.uint16)], axis=1)
    flat = np.ascontiguousarray(both.transpose(0, 1, 3, 2, 4)).reshape(-1)
    v_begin = layout.num_kv_heads * layout.block_size * layout.head_dim
    return flat, flat[v_begin:], scratch_strides(layout.num_kv_heads, layout.head_dim, layout.block_size)


def run_tiles(
    case: PagedCase, tiles: Sequence[int], *, scratch: bool = False, capacity: int | None = None
) -> AttnState:
    """Fold a case in: ``tiles`` are blocks per tile and must cover the longest sequence."""
    layout, num_seqs = case.layout, case.num_seqs
    state = AttnState(num_seqs, case.num_q_heads, layout.head_dim)
    k_pool, v_pool = case.k_pool, case.v_pool
    strides = paged_strides(layout.num_kv_heads, layout.head_dim, layout.block_size)
    if scratch:
        k_pool, v_pool, strides = scratch_pool(case)
    capacity = max([1, *tiles]) if capacity is None else capacity
    needed = -(-case.seq_lens // layout.block_size)
    begin = 0
    for size in tiles:
        counts = np.clip(needed - begin, 0, size).astype(np.int32)
        blocks = np.full((num_seqs, capacity), 0x7FFFFFFF, np.int32)
        for seq, count in enumerate(counts):
            blocks[seq, :count] = case.block_tables[seq, begin : begin + count]
        ends = np.minimum((begin + counts) * layout.block_size, case.seq_lens)
        valid = (ends - (begin + counts - 1) * layout.block_size) * (counts > 0)
        step_tile_ref(
            state, case.q, k_pool, v_pool, blocks, counts, layout.num_kv_heads, layout.block_size, capacity,
            case.num_q_heads // layout.num_kv_heads, *strides, layout.block_size,
            inv_sqrt_d=case.inv_sqrt_d, last_block_valid_slots_per_seq=valid.astype(np.int32),
        )  # fmt: skip
        begin += size
    assert begin >= needed.max(initial=0)
    return state


def lse(state: AttnState) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return state.m.astype(np.float64) + np.log(state.l.astype(np.float64))


def test_state_begins_empty() -> None:
    state = AttnState(2, 4, 8)
    assert (state.m.shape, state.l.shape, state.o.shape) == ((2, 4), (2, 4), (2, 4, 8))
    assert {a.dtype for a in (state.m, state.l, state.o)} == {np.dtype(np.float32)}
    assert (state.m == -np.inf).all()
    assert not state.l.any()
    assert not state.o.any()
    output = finalize_ref(state)
    assert output.dtype == ml_dtypes.bfloat16
    assert not output.view(np.uint16).any()


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 64, 16), Shape(9, 3, 16, 8), Shape(5, 1, 46, 4), Shape(2, 2, 128, 1)]
)
def test_equals_the_oracle_with_both_stride_sets(shape: Shape, scratch: bool) -> None:
    case = random_case(BF16, [33, 0, 1, 16, 50], shape)
    needed = -(-50 // shape.block_size)
    state = run_tiles(case, [2] * -(-needed // 2), scratch=scratch)
    out, expected_lse = case.expected()
    assert_matches(finalize_ref(state), out)
    np.testing.assert_allclose(lse(state), expected_lse, rtol=1e-5)


@settings(max_examples=30)
@given(st.data())
def test_any_tile_split_equals_the_oracle(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3), label="seq_lens")
    tiles, left = [], -(-max(lengths) // 4)
    while left > 0:
        tiles.append(data.draw(st.integers(0, left), label="blocks of the tile"))
        left -= tiles[-1]
    seed = data.draw(st.integers(0, 1000), label="seed")
    case = random_case(BF16, lengths, Shape(4, 2, 16, 4), options=Options(seed=seed))
    assert_matches(finalize_ref(run_tiles(case, tiles, scratch=data.draw(st.booleans()))), case.expected()[0])


@pytest.mark.parametrize("tiles", [[0, 2, 3], [2, 0, 3], [2, 3, 0], [0, 0, 5, 0], [0, 1, 0, 0, 4]])
def test_an_empty_tile_changes_no_bit(tiles: list[int]) -> None:
    case = random_case(BF16, [37, 40], Shape(4, 2, 16, 8))
    with_empty = run_tiles(case, tiles)
    without = run_tiles(case, [t for t in tiles if t])
    for name in ("m", "l", "o"):
        np.testing.assert_array_equal(getattr(with_empty, name), getattr(without, name))
    assert_matches(finalize_ref(with_empty), case.expected()[0])


@pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF, Poison.STALE])
def test_poison_changes_no_bit(poison: Poison) -> None:
    shape = Shape(4, 2, 16, 8)
    states = [
        run_tiles(random_case(BF16, [3, 17, 8], shape, options=Options(poison=p)), [1, 2])
        for p in (poison, Poison.QUIET)
    ]
    for name in ("m", "l", "o"):
        np.testing.assert_array_equal(getattr(states[0], name), getattr(states[1], name))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 33, 127, 129, 255])
def test_uniform(n: int) -> None:
    case, expected = fixture_u(BF16, [n], Shape(2, 1, 8, 16))
    output = finalize_ref(run_tiles(case, [3] * 6))
    np.testing.assert_array_equal(decode_bf16_float64(output), expected)
    assert (expected == (n + 1) / 2).all()


def test_heads_lanes_and_scores() -> None:
    for heads in [(9, 3), (28, 4), (24, 4), (5, 1)]:
        case, expected = fixture_h(BF16, shape=Shape(*heads, 16, 4))
        np.testing.assert_array_equal(decode_bf16_float64(finalize_ref(run_tiles(case, [2]))), expected)
    case, expected = fixture_d(BF16, shape=Shape(2, 1, 256, 4))
    np.testing.assert_array_equal(decode_bf16_float64(finalize_ref(run_tiles(case, [1, 1]))), expected)
    for lane in (0, 63):
        case, expected = fixture_x2(BF16, lane)
        assert_matches(finalize_ref(run_tiles(case, [1])), expected)


def small_call(**changes: Any) -> AttnState:
    """One sequence, q = 0, two blocks of four tokens with V = 1 to 8, with changes to the arguments."""
    state = changes.pop("state", None) or AttnState(1, 2, 4)
    tokens = np.arange(1, 9, dtype=np.float32).reshape(2, 4, 1, 1)
    arguments: dict[str, Any] = {
        "q": np.zeros((1, 2, 4), ml_dtypes.bfloat16),
        "k_pool": np.ones((2, 4, 1, 4), ml_dtypes.bfloat16),
        "v_pool": np.broadcast_to(tokens, (2, 4, 1, 4)).astype(ml_dtypes.bfloat16),
        "tile_blocks": np.array([[0, 1]], np.int32),
        "tile_block_counts": np.array([2], np.int32),
        "num_kv_heads": 1,
        "block_size": 4,
        "tile_capacity": 2,
        "gqa_ratio": 2,
        "blk_stride": 16,
        "tok_stride": 4,
        "kvh_stride": 4,
        "last_block_valid_slots": 4,
    }
    step_tile_ref(state, **(arguments | changes))
    return state


@pytest.mark.parametrize(("valid", "mean"), [(4, 4.5), (3, 4.0), (1, 3.0), (0, 2.5)])
def test_only_the_last_block_honours_valid_slots(valid: int, mean: float) -> None:
    assert (finalize_ref(small_call(last_block_valid_slots=valid)).astype(float) == mean).all()
    per_seq = small_call(last_block_valid_slots=4, last_block_valid_slots_per_seq=np.array([valid], np.int32))
    assert (finalize_ref(per_seq).astype(float) == mean).all()


def test_inv_sqrt_d_defaults_to_head_dim() -> None:
    q = np.full((1, 2, 4), 0.5, ml_dtypes.bfloat16)
    assert (small_call(q=q).m == 1.0).all()  # 4 lanes of 0.5 * 1, times 1/sqrt(4)
    assert (small_call(q=q, inv_sqrt_d=0.25).m == 0.5).all()


def test_repeated_steps_on_one_state_accumulate() -> None:
    state = small_call(tile_blocks=np.array([[0, -1]], np.int32), tile_block_counts=np.array([1], np.int32))
    assert (finalize_ref(state).astype(float) == 2.5).all()
    small_call(
        state=state, tile_blocks=np.array([[1, -1]], np.int32), tile_block_counts=np.array([1], np.int32)
    )
    assert (finalize_ref(state).astype(float) == 4.5).all()


@pytest.mark.parametrize("block", [2, 99, -1, 0x7FFFFFFF])
def test_a_block_outside_the_pool_makes_the_row_nan(block: int) -> None:
    state = small_call(tile_blocks=np.array([[0, block]], np.int32))
    assert np.isnan(finalize_ref(state).astype(np.float32)).all()
    small_call(state=state)
    assert np.isnan(finalize_ref(state).astype(np.float32)).all()


def test_a_live_nan_or_infinity_is_not_hidden() -> None:
    for pool in ("k_pool", "v_pool"):
        values = np.ones((2, 4, 1, 4), ml_dtypes.bfloat16)
        values[1, 1] = np.nan
        assert np.isnan(finalize_ref(small_call(**{pool: values})).astype(np.float32)).all()


def test_a_key_of_score_minus_infinity_weighs_nothing() -> None:
    q = np.ones((1, 2, 4), ml_dtypes.bfloat16)
    keys = np.ones((2, 4, 1, 4), ml_dtypes.bfloat16)
    keys[0] = -np.inf
    assert (finalize_ref(small_call(q=q, k_pool=keys)).astype(float) == 6.5).all()
    values = np.full((2, 4, 1, 4), np.inf, ml_dtypes.bfloat16)
    values[1] = 3.0
    assert (finalize_ref(small_call(q=q, k_pool=keys, v_pool=values)).astype(float) == 3.0).all()
    keys[1] = -np.inf
    assert not finalize_ref(small_call(q=q, k_pool=keys)).view(np.uint16).any()


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 2, 4), 1e4, ml_dtypes.bfloat16)
    keys = np.ones((2, 4, 1, 4), ml_dtypes.bfloat16)
    keys[1, 3] = 2.0
    state = small_call(q=q, k_pool=keys)
    assert (finalize_ref(state).astype(float) == 8.0).all()
    assert math.isfinite(float(state.l.max()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gqa_ratio": 1}, "^gqa_ratio: got 1, which times num_kv_heads 1"),
        (
            {"q": np.zeros((1, 2, 8), ml_dtypes.bfloat16)},
            r"^q: got shape \(1, 2, 8\), allowed is \(1, 2, 4\)",
        ),
        ({"tile_capacity": 3}, "^tile_blocks: got shape"),
        (
            {"tile_block_counts": np.array([3])},
            "^tile_block_counts: got values from 3 to 3, allowed are 0 to 2",
        ),
        ({"tile_block_counts": np.array([-1])}, "^tile_block_counts: got values"),
        (
            {"last_block_valid_slots": 5},
            "^last_block_valid_slots: got values from 5 to 5, allowed are 0 to 4",
        ),
        ({"last_block_valid_slots_per_seq": np.array([1, 1])}, "^last_block_valid_slots_per_seq: got shape"),
        ({"k_pool": np.ones((2, 4, 1, 4), ml_dtypes.bfloat16)[::-1]}, "^k_pool: got strides"),
        ({"tok_stride": 0}, "^tok_stride: got 0, allowed is 1 or more"),
        ({"last_block_valid_slots": -1}, "^last_block_valid_slots: got -1, allowed is 0 or more"),
        ({"last_block_valid_slots": 2**40}, "^last_block_valid_slots: got values"),
    ],
)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        small_call(**changes)


def test_wrong_types_and_sizes() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^v_pool: got dtype float32"):
        small_call(v_pool=np.ones((2, 4, 1, 4), np.float32))
    with pytest.raises(ArgumentTypeError, match="dtype float16"):
        small_call(q=np.zeros((1, 2, 4), np.float16))
    with pytest.raises(ArgumentValueError, match=r"^num_q_heads: got 0, allowed is 1 or more"):
        AttnState(1, 0, 4)
    with pytest.raises(ArgumentTypeError, match=r"^num_seqs: got '1' of type str, allowed is an int"):
        AttnState("1", 2, 4)  # type: ignore[arg-type]
    for name in ("gqa_ratio", "num_kv_heads", "block_size", "tile_capacity", "blk_stride", "kvh_stride"):
        for bad in (1.0, "2", None, True):
            with pytest.raises(ArgumentTypeError, match=f"^{name}: got {bad!r}"):
                small_call(**{name: bad})
    for name in ("q", "k_pool", "v_pool", "tile_blocks", "tile_block_counts"):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got list, allowed is a NumPy array"):
            small_call(**{name: [1]})


def test_sizes_that_are_numpys_integers_do_not_overflow() -> None:
    """128 query heads are 16 for each of 8 KV heads, which is -128 as int8."""
    state = AttnState(np.int8(1), np.uint8(128), np.int8(4))  # type: ignore[arg-type]
    pool = np.ones((2, 4, 8, 4), ml_dtypes.bfloat16)
    sizes = (np.int8(8), np.int8(4), np.int8(1), np.int8(16), np.uint8(128), np.int8(32), np.int8(4), 4)
    q, tile = np.ones((1, 128, 4), ml_dtypes.bfloat16), np.array([[1]], np.int32)
    step_tile_ref(state, q, pool, pool, tile, np.array([1], np.int32), *sizes)  # type: ignore[arg-type]
    assert (finalize_ref(state).astype(float) == 1.0).all()
