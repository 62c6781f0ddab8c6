"""The streaming step of every format: any tile, any order, states saved between, splits and their merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupaged import ops
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, paged_strides
from tests.oracle import assert_matches, partial_float64
from tests.poison import Options, PagedCase, Shape, build_case, random_case
from tests.rig import Rig, UploadedCase, bits, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
LENGTHS = (100, 1, 0, 48, 300)


def state_arrays(rig: Rig, *shape: int) -> tuple[Any, Any, Any]:
    """(-inf, 0, 0) of [..., num_q_heads, head_dim]."""
    m = rig.gpu.asarray(np.full(shape[:-1], -np.inf, np.float32))
    return m, rig.gpu.zeros(shape[:-1], "float32"), rig.gpu.zeros(shape, "float32")


def step(
    up: UploadedCase, states: Any, ids: npt.NDArray[np.int32], counts: Any, valid: Any, splits: int = 1
) -> None:
    """Fold one tile of the case's blocks in."""
    rig, case, layout = up.rig, up.case, up.case.layout
    name = "paged_decode_attn_tiled" + ("" if layout.format == BF16 else f"_{layout.format.name}")
    _, tok, kvh = paged_strides(layout.num_kv_heads, layout.head_dim, layout.block_size)
    strides: tuple[Any, ...] = (layout.cache_stride, tok, kvh)
    if layout.format == FP8:
        strides = (*strides, case.k_scale, case.v_scale)
    elif layout.format == NVFP4:
        strides = (layout.block_stride_bytes, layout.data_section_bytes)
    getattr(ops, name)(
        rig.gpu, rig.kernel(name), rig.upload(case.q), up.k.array, up.v.array, rig.upload(ids),
        rig.upload(np.asarray(counts, np.int32)), *states, case.num_seqs, case.num_q_heads,
        layout.num_kv_heads, layout.head_dim, layout.block_size, ids.shape[1],
        case.num_q_heads // layout.num_kv_heads, *strides, layout.block_size, rig.stream,
        inv_sqrt_d=case.inv_sqrt_d, num_blocks=case.num_blocks, num_splits=splits,
        last_block_valid_slots_per_seq=rig.upload(np.asarray(valid, np.int32)),
    )  # fmt: skip


def tiles(case: PagedCase, capacity: int) -> list[tuple[Any, Any, Any]]:
    """Ids, counts and valid slots of each tile; unused columns hold poison."""
    size, longest = case.layout.block_size, max(1, case.max_blocks_per_seq)
    found = []
    for first in range(0, longest, capacity):
        ids = np.full((case.num_seqs, capacity), 0x7FFFFFFF, np.int32)
        counts, valid = np.zeros(case.num_seqs, np.int32), np.full(case.num_seqs, size, np.int32)
        for seq, length in enumerate(case.seq_lens):
            blocks = -(-int(length) // size)
            part = case.block_tables[seq, first : min(first + capacity, blocks)]
            ids[seq, : len(part)], counts[seq] = part, len(part)
            if len(part) and first + len(part) == blocks:
                valid[seq] = length - (blocks - 1) * size
        found.append((ids, counts, valid))
    return found


def finalize(rig: Rig, states: Any) -> Any:
    output = rig.full_bf16(states[2].shape)
    kernel = rig.kernel("paged_decode_attn_tiled", "attention_finalize")
    ops.attention_finalize(rig.gpu, kernel, states[1], states[2], output, *states[2].shape, rig.stream)
    return rig.download_bf16(output)


def merged(rig: Rig, states: Any, seq_stride: int, part_stride: int, num_seqs: int, parts: int) -> Any:
    """One state a sequence."""
    heads, head_dim = states[2].shape[-2:]
    target = tuple(rig.gpu.asarray(np.full(x, np.nan, np.float32)) for x in
                   ((num_seqs, heads), (num_seqs, heads), (num_seqs, heads, head_dim)))  # fmt: skip
    ops.attention_merge_states(
        rig.gpu, rig.kernel("paged_decode_attn_tiled", "attention_merge_states"), *states, *target,
        num_seqs, heads, head_dim, parts, seq_stride, part_stride, rig.stream,
    )  # fmt: skip
    return target


def run(rig: Rig, case: PagedCase, capacity: int) -> Any:
    up = upload_case(rig, case)
    states = state_arrays(rig, *case.q.shape)
    for tile in tiles(case, capacity):
        step(up, states, *tile)
    up.assert_pools_untouched()
    return states


@formats
@pytest.mark.parametrize("capacity", [1, 3, 100])
@pytest.mark.parametrize(
    "shape",
    [Shape(4, 2, 64), Shape(9, 3, 128, 32), Shape(16, 1, 256, 7), Shape(2, 2, 192, 1), Shape(6, 2, 48, 16)],
    ids=str,
)
def test_against_float64(rig: Rig, fmt: CacheFormat, capacity: int, shape: Shape) -> None:
    case = random_case(fmt, LENGTHS, shape)
    got = finalize(rig, run(rig, case, capacity))
    assert_matches(got, case.expected()[0])
    assert not bits(got[2]).any(), "no token at all is a row of zeros"


@formats
@pytest.mark.parametrize("ratio", [1, 3, 8, 17, 40, 72, 128])
def test_many_query_heads(rig: Rig, fmt: CacheFormat, ratio: int) -> None:
    """From 65 heads on, several blocks of threads share a KV head."""
    case = random_case(fmt, [90, 5], Shape(2 * ratio, 2, 64))
    assert_matches(finalize(rig, run(rig, case, 4)), case.expected()[0])


@formats
def test_padded_blocks(rig: Rig, fmt: CacheFormat) -> None:
    padding = {} if fmt == BF16 else {"block_padding": 32}
    padding |= {"section_padding": 16} if fmt == NVFP4 else {}
    case = random_case(fmt, LENGTHS, Shape(4, 2, 64), options=Options(**padding))
    assert_matches(finalize(rig, run(rig, case, 2)), case.expected()[0])


@formats
@pytest.mark.parametrize("tile_tokens", [1, 7, 128, 4096])
@pytest.mark.parametrize("seed", range(2))
def test_any_tile_in_any_order_with_states_saved_between(
    rig: Rig, fmt: CacheFormat, tile_tokens: int, seed: int
) -> None:
    """The states go to the host and into new arrays after every tile."""
    block_size = {1: 1, 7: 7, 128: 16, 4096: 64}[tile_tokens]
    lengths = [4200, 100] if tile_tokens == 4096 else [150, 33]
    case = random_case(fmt, lengths, Shape(4, 2, 64, block_size), options=Options(seed=seed))
    up = upload_case(rig, case)
    saved = [rig.download(x) for x in state_arrays(rig, *case.q.shape)]
    order = tiles(case, tile_tokens // block_size)
    for i in np.random.default_rng(seed).permutation(len(order)):
        states = tuple(rig.gpu.asarray(x) for x in saved)
        step(up, states, *order[i])
        saved = [rig.download(x).copy() for x in states]
    got = finalize(rig, tuple(rig.gpu.asarray(x) for x in saved))
    assert_matches(got, case.expected()[0])


@formats
@pytest.mark.parametrize("base", [0.0, 1e4, -1e4])
def test_states_are_the_oracles(rig: Rig, fmt: CacheFormat, base: float) -> None:
    """m is the largest score, l and o are relative to it and in real units."""
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((200, 2, 64)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((1, 4, 64))
    keys[:, :, 0], q[:, :, 0] = 6.0, base * 8 / 6
    scales = {"k_scale": 0.02, "v_scale": 0.015} if fmt == FP8 else {}
    case = build_case(fmt, q, [keys], [values], options=Options(**scales))
    m, l_sum, o = (rig.download(x)[0].astype(np.float64) for x in run(rig, case, 3))
    dense = case.k_dense[0], case.v_dense[0]
    want_o, want_m, want_l = partial_float64(case.q[0], *dense, case.inv_sqrt_d)
    rounding = 2e-6 * np.abs(want_m).max() + 1e-5  # of the scores, which is relative in l and o
    np.testing.assert_allclose(m, want_m, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(l_sum, want_l, rtol=2e-5 + rounding)
    np.testing.assert_allclose(o, want_o, rtol=0, atol=(4e-3 + rounding) * want_l.max())


@formats
def test_empty_tiles_first_middle_and_last(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [90, 40])
    up, states = upload_case(rig, case), state_arrays(rig, *case.q.shape)
    nothing = (np.full((2, 3), -1, np.int32), [0, 0], [16, 16])
    no_slots = (np.full((2, 3), 1, np.int32), [1, 1], [0, 0])
    for tile in tiles(case, 3):
        for empty in (nothing, no_slots):
            before = [rig.download(x).copy() for x in states]
            step(up, states, *empty)
            for old, new in zip(before, states, strict=True):
                np.testing.assert_array_equal(rig.download(new).view(np.uint32), old.view(np.uint32))
        step(up, states, *tile)
    step(up, states, *nothing)
    assert_matches(finalize(rig, states), case.expected()[0])


@formats
def test_l_belongs_to_the_m_that_is_stored(rig: Rig, fmt: CacheFormat) -> None:
    """One token each, scores up to 1e4: l is 2^(s - m log2(e)), s the score that F32 holds in log2 units."""
    q = np.zeros((64, 1, 64))
    q[:, 0, 0] = np.arange(64, 128)
    key = np.zeros((1, 1, 64))
    key[0, 0, 0] = 1.0
    case = build_case(fmt, q, [key] * 64, [key] * 64, inv_sqrt_d=78.0)
    factor = np.float32(78.0) * np.float32(np.log2(np.e))
    products = (np.arange(64, 128) * case.k_dense[0][0, 0, 0]).astype(np.float32)
    scores = (products * factor).astype(np.float64)
    m, l_sum = (rig.download(x)[:, 0].astype(np.float64) for x in run(rig, case, 1)[:2])
    np.testing.assert_allclose(m, scores * np.log(2), rtol=2e-7)
    np.testing.assert_allclose(l_sum, np.exp2(scores - m * np.log2(np.e)), rtol=2e-6)


@formats
def test_an_empty_tile_keeps_negative_zeros(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [90])
    m, l_sum, _ = state_arrays(rig, *case.q.shape)
    o = rig.gpu.asarray(np.full(case.q.shape, -0.0, np.float32))
    step(upload_case(rig, case), (m, l_sum, o), np.zeros((1, 2), np.int32), [0], [16])
    assert np.signbit(rig.download(o)).all()


@formats
@pytest.mark.parametrize("splits", [2, 5, 33])
def test_splits(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    """Each split takes its own part of every tile; many splits find nothing in a short one."""
    case = random_case(fmt, LENGTHS)
    up = upload_case(rig, case)
    num_seqs, heads, head_dim = case.q.shape
    states = state_arrays(rig, num_seqs, splits, heads, head_dim)
    for tile in tiles(case, 7):
        step(up, states, *tile, splits=splits)
    used = (rig.download(states[1]) > 0).any(axis=2).sum(axis=1)
    assert list(used[:4]) == [min(splits, n) for n in (7, 1, 0, 3)]
    assert used[4] >= min(splits, 7)
    one = merged(rig, states, splits, 1, num_seqs, splits)
    assert_matches(finalize(rig, one), case.expected()[0])
    alone = run(rig, case, 7)
    np.testing.assert_array_equal(rig.download(one[0]), rig.download(alone[0]))
    np.testing.assert_allclose(rig.download(one[1]), rig.download(alone[1]), rtol=2e-5)


def test_merging_gathered_states_and_empty_ones(rig: Rig) -> None:
    """Parts come rank by rank; an empty one changes no bit of the other."""
    case = random_case(BF16, [64, 17, 0])
    alone = run(rig, case, 2)
    empty = state_arrays(rig, *case.q.shape)
    for order in ((alone, empty), (empty, alone), (empty, alone, empty)):
        together = tuple(
            rig.gpu.asarray(np.concatenate([rig.download(x[i]) for x in order])) for i in range(3)
        )
        one = merged(rig, together, 1, 3, 3, len(order))
        for got, want in zip(one, alone, strict=True):
            np.testing.assert_array_equal(rig.download(got), rig.download(want))


@formats
@pytest.mark.parametrize("fault", ["id", "count", "valid"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_bad_tile_makes_its_row_nan(rig: Rig, fmt: CacheFormat, fault: str, splits: int) -> None:
    case = random_case(fmt, [40, 20])
    ids, counts, valid = tiles(case, 4)[0]
    if fault == "id":
        ids[0, 1] = case.num_blocks
    elif fault == "count":
        counts[0] = 5
    else:
        valid[0], ids[0, 3] = 17, ids[0, 0]
    up, states = upload_case(rig, case), state_arrays(rig, 2, splits, *case.q.shape[1:])
    step(up, states, ids, counts, valid, splits=splits)
    if fault != "id":  # which only the part that has it can know
        assert np.isnan(rig.download(states[1])[0]).all()
        assert np.isnan(rig.download(states[2])[0]).all()
    expected = case.expected()[0]
    expected[0] = np.nan
    assert_matches(finalize(rig, merged(rig, states, splits, 1, 2, splits)), expected)


@formats
def test_many_small_weights_count(rig: Rig, fmt: CacheFormat) -> None:
    """One token of weight 1 and 4095 of about 2^-23.3, of which F16 next to 1 would keep one bit."""
    q = np.zeros((1, 1, 64))
    q[0, 0, 0] = 23.3 * np.log(2.0)
    keys, values = np.zeros((4096, 1, 64)), np.zeros((4096, 1, 64))
    keys[77, 0, 0] = 1.0
    values[:, 0, 1] = 1.0
    values[77, 0, :2] = [1.0, 0.0]
    case = build_case(fmt, q, [keys], [values], block_size=64, inv_sqrt_d=1.0, options=Options())
    states = run(rig, case, 16)
    l_sum, o = (rig.download(x)[0, 0].astype(np.float64) for x in states[1:])
    want_o, _, want_l = partial_float64(case.q[0], case.k_dense[0], case.v_dense[0], 1.0)
    np.testing.assert_allclose(l_sum, want_l[0], rtol=1e-6)
    assert 2e-4 < want_o[0, 1] < 6e-4
    np.testing.assert_allclose(o[1], want_o[0, 1], rtol=4e-3)


@formats
def test_every_run_gives_the_same_bits(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, LENGTHS)
    first, second = (run(rig, case, 5) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(rig.download(one).view(np.uint32), rig.download(two).view(np.uint32))
