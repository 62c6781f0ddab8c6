"""Layouts, and tokens in and out of paged pools."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import (
    BF16,
    FORMATS,
    FP8,
    NVFP4,
    CacheFormat,
    CacheLayout,
    block_sections,
    cache_format,
    encode_bf16,
    gather_tokens,
    pool_num_blocks,
    write_tokens,
)
from tests.closed_form import exact_values
from tests.oracle import F64
from tests.poison import Guarded, decode_pool

KNOWN = (BF16, FP8, NVFP4)  # whose sizes stand below
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)

LAYOUTS = [
    CacheLayout(BF16, 2, 32, 4),
    CacheLayout(FP8, 2, 32, 4),
    CacheLayout(FP8, 2, 32, 4, block_stride_override=300),
    CacheLayout(NVFP4, 2, 32, 4),
    CacheLayout(NVFP4, 2, 32, 4, block_stride_override=192, data_section_override=144),
    CacheLayout(BF16, 2, 32, 4, block_stride_override=1100),
    CacheLayout(BF16, 2, 32, 4, heads_first=True),
    CacheLayout(FP8, 2, 32, 4, block_stride_override=300, heads_first=True),
    CacheLayout(NVFP4, 2, 32, 4, block_stride_override=192, data_section_override=144, heads_first=True),
]


class TestLayout:
    def test_sizes(self) -> None:
        bf16, fp8, nvfp4 = (CacheLayout(f, num_kv_heads=8, head_dim=128, block_size=16) for f in KNOWN)
        assert [x.bytes_per_token_head for x in (bf16, fp8, nvfp4)] == [256, 128, 72]
        assert [x.bytes_per_token for x in (bf16, fp8, nvfp4)] == [2048, 1024, 576]
        assert [x.block_bytes for x in (bf16, fp8, nvfp4)] == [32768, 16384, 9216]
        assert [x.block_stride_bytes for x in (bf16, fp8, nvfp4)] == [32768, 16384, 9216]
        assert [x.cache_stride for x in (bf16, fp8, nvfp4)] == [16384, 16384, 9216]
        assert nvfp4.data_section_bytes == 8192
        assert bf16.pool_shape(3) == fp8.pool_shape(3) == (3, 16, 8, 128)
        assert nvfp4.pool_shape(3) == (3, 9216)
        assert bf16.pool_dtype == ml_dtypes.bfloat16
        assert fp8.pool_dtype == nvfp4.pool_dtype == np.uint8

    def test_overrides(self) -> None:
        layout = LAYOUTS[4]
        assert (layout.data_section_bytes, layout.block_bytes, layout.block_stride_bytes) == (144, 160, 192)
        assert layout.pool_shape(2) == (2, 192)
        assert LAYOUTS[2].pool_shape(2) == (2, 300)
        assert dataclasses.replace(LAYOUTS[3], block_size=8).block_stride_bytes == 2 * 144

    @pytest.mark.parametrize(
        ("fmt", "head_dim", "allowed"),
        [(f, d, d % 2 == 0) for f in (BF16, FP8) for d in (8, 46, 48, 72, 127, 1)]
        + [(NVFP4, d, d % 16 == 0) for d in (8, 46, 48, 72, 80, 96, 100, 112, 127)],
    )
    def test_head_dim(self, fmt: CacheFormat, head_dim: int, allowed: bool) -> None:
        if allowed:
            assert CacheLayout(fmt, 2, head_dim, 16).head_dim == head_dim
        else:
            with pytest.raises(ArgumentValueError, match=f"head_dim: got {head_dim}, .*multiple of"):
                CacheLayout(fmt, 2, head_dim, 16)

    @by_format
    @pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "block_size"])
    @pytest.mark.parametrize("value", [0, -16])
    def test_sizes_must_be_positive(self, fmt: CacheFormat, name: str, value: int) -> None:
        sizes = {"num_kv_heads": 2, "head_dim": 32, "block_size": 4} | {name: value}
        with pytest.raises(ArgumentValueError, match=f"{name}: got {value}, allowed is"):
            CacheLayout(fmt, **sizes)

    @pytest.mark.parametrize("value", [16.0, "16", True, None])
    def test_sizes_must_be_integers(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match="block_size: got"):
            CacheLayout(BF16, 2, 32, value)
        assert CacheLayout(BF16, 2, 32, int(np.int64(16))).block_size == 16

    def test_override_rules(self) -> None:
        with pytest.raises(ArgumentValueError, match="block_stride_override: got 255, allowed is 256"):
            CacheLayout(FP8, 2, 32, 4, block_stride_override=255)
        with pytest.raises(ArgumentValueError, match=r"block_stride_override: got 1025, .*multiple of 2"):
            CacheLayout(BF16, 2, 32, 4, block_stride_override=1025)
        assert CacheLayout(BF16, 2, 32, 4, block_stride_override=1024).cache_stride == 512
        with pytest.raises(ArgumentValueError, match="fp8 has no scale section"):
            CacheLayout(FP8, 2, 32, 4, data_section_override=256)
        with pytest.raises(ArgumentValueError, match="data_section_override: got 127, allowed is 128"):
            CacheLayout(NVFP4, 2, 32, 4, data_section_override=127)

    @by_format
    def test_formats_by_name(self, fmt: CacheFormat) -> None:
        assert cache_format(fmt.name) is fmt
        assert CacheLayout(copy.deepcopy(fmt), 2, 32, 4) == CacheLayout(fmt, 2, 32, 4)

    def test_unknown_formats(self) -> None:
        with pytest.raises(
            ArgumentValueError, match=f"'int3', allowed are {', '.join(f.name for f in FORMATS)}$"
        ):
            cache_format("int3")
        with pytest.raises(ArgumentTypeError, match="format: got 'bf16'"):
            CacheLayout("bf16", 2, 32, 4)  # type: ignore[arg-type]


def filled_pool(layout: CacheLayout, num_blocks: int) -> Guarded:
    guarded = Guarded.allocate(layout.pool_shape(num_blocks), layout.pool_dtype)
    guarded.array.reshape(-1).view(np.uint8)[...] = 0xEE
    return guarded


def exact_tokens(layout: CacheLayout, count: int, seed: int = 3) -> F64:
    """Random tokens that every format holds exactly: E2M1 values, a 6 in every group, times powers of two."""
    rng = np.random.default_rng(seed)
    shape = (count, layout.num_kv_heads, layout.head_dim // 16, 16)
    values = rng.choice([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0, -0.5], shape)
    values[..., 5] = 6.0
    scales = 2.0 ** (np.arange(layout.head_dim // 16) % 8 - 2)
    tokens: F64 = (values * scales[:, None]).reshape(count, layout.num_kv_heads, layout.head_dim)
    return tokens


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.format.name}-{x.block_stride_bytes}")
class TestPools:
    def test_tokens_come_back_and_the_oracle_reads_the_same(self, layout: CacheLayout) -> None:
        pool = filled_pool(layout, 5).array
        tokens = exact_tokens(layout, 10)
        table = np.array([4, 1, 3], np.int32)
        slots = [int(table[t // 4]) * 4 + t % 4 for t in range(10)]
        write_tokens(pool, layout, tokens, slots)
        np.testing.assert_array_equal(gather_tokens(pool, layout, table, 10), tokens)
        dense = decode_pool(pool, layout)
        for token, slot in enumerate(slots):
            np.testing.assert_array_equal(dense[slot // 4, slot % 4], tokens[token])

    def test_only_the_named_slots_change(self, layout: CacheLayout) -> None:
        guarded = filled_pool(layout, 5)
        before = guarded.storage.copy()
        capacity = 5 * 4
        slots = np.array([0, -1, 17, -1, -(2**40), capacity, 2**33, 2**62], np.int64)
        write_tokens(guarded.array, layout, exact_tokens(layout, len(slots)), slots)
        guarded.assert_intact()
        sections = block_sections(guarded.array, layout)
        for section in sections:
            untouched = np.delete(section.reshape(capacity, -1), [0, 17], axis=0)
            assert (untouched.view(np.uint8) == 0xEE).all()
        same = np.count_nonzero(before == guarded.storage)
        assert 0 < before.size - same <= 2 * layout.bytes_per_token

    def test_blocks_outside_the_pool_read_nan(self, layout: CacheLayout) -> None:
        pool = filled_pool(layout, 3).array
        tokens = exact_tokens(layout, 4)
        write_tokens(pool, layout, tokens, np.arange(4, 8))
        for bad in (99, -1, 3, 0x7FFFFFFF):
            got = gather_tokens(pool, layout, np.array([1, bad], np.int32), 6)
            np.testing.assert_array_equal(got[:4], tokens)
            assert np.isnan(got[4:]).all()
        assert np.isnan(gather_tokens(pool, layout, [1], 6)[4:]).all()

    def test_columns_past_the_sequence_are_not_read(self, layout: CacheLayout) -> None:
        pool = filled_pool(layout, 3).array
        tokens = exact_tokens(layout, 4)
        write_tokens(pool, layout, tokens, np.arange(8, 12))
        np.testing.assert_array_equal(gather_tokens(pool, layout, [2, -1, 0x7FFFFFFF], 4), tokens)

    def test_nothing_to_do(self, layout: CacheLayout) -> None:
        pool = filled_pool(layout, 2)
        before = pool.storage.copy()
        write_tokens(pool.array, layout, exact_tokens(layout, 0), [])
        np.testing.assert_array_equal(pool.storage, before)
        assert gather_tokens(pool.array, layout, [], 0).shape == (0, 2, 32)
        empty = np.zeros(layout.pool_shape(0), layout.pool_dtype)
        assert pool_num_blocks(empty, layout) == 0
        write_tokens(empty, layout, exact_tokens(layout, 1), [0])

    def test_wrong_arguments(self, layout: CacheLayout) -> None:
        pool = filled_pool(layout, 2).array
        with pytest.raises(ArgumentTypeError, match=r"^pool: got dtype float32, allowed for"):
            write_tokens(np.zeros(4096, np.float32), layout, exact_tokens(layout, 1), [0])
        with pytest.raises(ArgumentTypeError, match=r"^pool: got list, allowed for"):
            pool_num_blocks([1, 2], layout)  # type: ignore[arg-type]
        with pytest.raises(ArgumentValueError, match=r"^pool: got strides"):
            write_tokens(pool[::-1], layout, exact_tokens(layout, 1), [0])
        with pytest.raises(ArgumentValueError, match=r"^values: got shape"):
            write_tokens(pool, layout, exact_tokens(layout, 2), [0])
        with pytest.raises(ArgumentTypeError, match=r"^values: got dtype int64"):
            write_tokens(pool, layout, np.zeros((1, 2, 32), np.int64), [0])
        with pytest.raises(ArgumentTypeError, match=r"^slot_mapping: got dtype float64"):
            write_tokens(pool, layout, exact_tokens(layout, 1), [0.0])
        with pytest.raises(ArgumentValueError, match="block_table: got 2 dimensions"):
            gather_tokens(pool, layout, [[0]], 1)
        with pytest.raises(ArgumentValueError, match=r"^seq_len: got -1, allowed is 0 or more"):
            gather_tokens(pool, layout, [0], -1)
        with pytest.raises(ArgumentValueError, match=r"^scale: got"):
            gather_tokens(pool, layout, [0], 1, scale=0.0)

    def test_scales_of_a_pool(self, layout: CacheLayout) -> None:
        """FP8 has one, NVFP4 a second level, BF16 none; each head may have its own."""
        pool = filled_pool(layout, 2).array
        if layout.format == FP8:
            write_tokens(pool, layout, np.full((1, 2, 32), 3.0), [0], scale=2.0)
            assert (block_sections(pool, layout)[0][0, 0] == 0x3C).all()
            assert (gather_tokens(pool, layout, [0], 1, scale=np.float64(2.0)) == 3.0).all()
        elif layout.format == NVFP4:
            tokens = exact_tokens(layout, 1)
            by_head = np.array([0.5, 4.0])
            for scale in (2.0, by_head):
                factors = np.broadcast_to(scale, 2)[:, None]
                write_tokens(pool, layout, tokens * factors, [0], scale=scale)
                plain = filled_pool(layout, 2).array
                write_tokens(plain, layout, tokens, [0])
                for section, same in zip(
                    block_sections(pool, layout), block_sections(plain, layout), strict=True
                ):
                    np.testing.assert_array_equal(section[0, 0], same[0, 0])
                np.testing.assert_array_equal(
                    gather_tokens(pool, layout, [0], 1, scale=scale), tokens * factors
                )
            with pytest.raises(ArgumentValueError, match=r"^scale: got shape \(3,\)"):
                write_tokens(pool, layout, tokens, [0], scale=np.ones(3))
        else:
            with pytest.raises(ArgumentValueError, match=f"{layout.format.name} has no pool scale"):
                write_tokens(pool, layout, exact_tokens(layout, 1), [0], scale=2.0)
            with pytest.raises(ArgumentValueError, match=f"{layout.format.name} has no pool scale"):
                gather_tokens(pool, layout, [0], 1, scale=2.0)


def test_nvfp4_bytes_lie_where_the_contract_says() -> None:
    layout = CacheLayout(NVFP4, 2, 32, 4)
    pool = np.zeros(layout.pool_shape(2), np.uint8)
    tokens = np.zeros((1, 2, 32), np.float32)
    tokens[0, 1, 16:19] = [6.0, 0.5, -3.0]  # scale 1 = 0x38 for the second group of head 1
    write_tokens(pool, layout, tokens, [4 + 3])  # block 1, token 3
    row = 3 * 2 + 1
    expected = np.zeros_like(pool)
    expected[1, row * 16 + 8 : row * 16 + 10] = [0x17, 0x0D]
    expected[1, 4 * 2 * 16 + row * 2 + 1] = 0x38
    np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_every_group_keeps_its_own_scale_and_k_and_v_stay_apart(block_size: int) -> None:
    layout = CacheLayout(NVFP4, 3, 128, block_size)
    groups = 2.0 ** (np.arange(block_size * 3 * 8) % 8)
    # 6 and 3 times them below: absmax / 6 of a group is then a power of two, exact in E4M3.
    keys = np.repeat(groups, 16).reshape(block_size, 3, 128)
    k_pool, v_pool = (np.zeros(layout.pool_shape(2), np.uint8) for _ in range(2))
    slots = np.arange(block_size, 2 * block_size)
    write_tokens(k_pool, layout, 6 * keys, slots)
    write_tokens(v_pool, layout, -3 * keys[::-1], slots)
    np.testing.assert_array_equal(gather_tokens(k_pool, layout, [1], block_size), 6 * keys)
    np.testing.assert_array_equal(gather_tokens(v_pool, layout, [1], block_size), -3 * keys[::-1])


def test_bf16_tokens_keep_their_bits() -> None:
    layout = CacheLayout(BF16, 1, 4, 2)
    bits = np.array([[[0x7FC1, 0xFF81, 0x8000, 0x0001]]], np.uint16)
    for values in (bits, bits.view(ml_dtypes.bfloat16)):
        for dtype in (np.uint16, ml_dtypes.bfloat16):
            pool = np.zeros((1, 2, 1, 4), dtype)
            write_tokens(pool, layout, values, [1])
            np.testing.assert_array_equal(pool.view(np.uint16)[0, 1], bits[0])


def test_fp8_pools_may_be_float8_arrays() -> None:
    layout = CacheLayout(FP8, 2, 32, 4)
    pool = np.zeros(layout.pool_shape(2), ml_dtypes.float8_e4m3fn)
    write_tokens(pool, layout, exact_tokens(layout, 1), [5])
    np.testing.assert_array_equal(pool[1, 1].astype(np.float32), exact_tokens(layout, 1)[0])


def test_interleaved_k_and_v_share_one_buffer() -> None:
    tight = CacheLayout(FP8, 2, 32, 4)
    layout = dataclasses.replace(tight, block_stride_override=2 * tight.block_bytes)
    buffer = np.full((3, 2, 4, 2, 32), 0x7F, np.uint8)
    flat = buffer.reshape(-1)
    tokens = exact_tokens(layout, 4)
    write_tokens(flat, layout, tokens, np.arange(8, 12))
    write_tokens(flat[tight.block_bytes :], layout, -tokens, np.arange(8, 12))
    assert pool_num_blocks(flat[tight.block_bytes :], layout) == 3
    np.testing.assert_array_equal(gather_tokens(buffer[2, 0], tight, [0], 4), tokens)
    np.testing.assert_array_equal(gather_tokens(buffer[2, 1], tight, [0], 4), -tokens)
    assert (buffer[:2] == 0x7F).all()


@by_format
def test_what_the_closed_forms_call_exact_comes_back(fmt: CacheFormat) -> None:
    exact, layout = exact_values(fmt), CacheLayout(fmt, 1, 256, 4)
    lanes = np.arange(256)
    alone = np.zeros((2, 1, 256))
    alone[0, 0, 5], alone[1, 0, 5] = exact.pair[0], exact.ladder[4]
    rows = [
        np.broadcast_to(np.array([*exact.ladder, exact.pair[1]])[:, None, None], (9, 1, 256)),
        (exact.lanes[lanes % 16] * exact.group_factors[lanes // 16 % len(exact.group_factors)])[None, None],
        np.broadcast_to(np.arange(exact.counts + 1.0)[:, None, None], (exact.counts + 1, 1, 256)),
        np.minimum(lanes, exact.counts)[None, None].astype(np.float64),
        alone,
    ]
    tokens = np.concatenate(rows)
    pool = np.zeros(layout.pool_shape(-(-len(tokens) // 4)), layout.pool_dtype)
    write_tokens(pool, layout, tokens, np.arange(len(tokens)))
    np.testing.assert_array_equal(gather_tokens(pool, layout, np.arange(len(pool)), len(tokens)), tokens)


def test_a_format_without_exact_values_fails_by_name() -> None:
    with pytest.raises(AssertionError, match=r"tests/closed_form\.py what int3"):
        exact_values(CacheFormat("int3", np.dtype(np.uint8), 2))


def test_a_format_says_whether_it_needs_scales() -> None:
    assert [(f.name, f.needs_scale, f.largest) for f in KNOWN] == [
        ("bf16", False, None), ("fp8", True, 448.0), ("nvfp4", False, None),
    ]  # fmt: skip
    assert CacheFormat("int8", np.dtype(np.uint8), 2, largest=127.0).needs_scale


@given(
    st.integers(1, 5),
    st.integers(1, 33),
    st.integers(0, 60),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32 - 1),
)
def test_any_table_round_trips(heads: int, block_size: int, count: int, base: CacheLayout, seed: int) -> None:
    layout = CacheLayout(base.format, heads, base.head_dim, block_size)
    needed = -(-count // block_size)
    num_blocks = needed + 2
    table = np.random.default_rng(seed).permutation(num_blocks)[:needed].astype(np.int32)
    pool = np.zeros(layout.pool_shape(num_blocks), layout.pool_dtype)
    tokens, index = exact_tokens(layout, count, seed), np.arange(count)
    write_tokens(pool, layout, tokens, table[index // block_size] * block_size + index % block_size)
    np.testing.assert_array_equal(gather_tokens(pool, layout, table, count), tokens)
    encoded = encode_bf16(tokens)
    write_tokens(pool, layout, encoded, table[index // block_size] * block_size + index % block_size)
    np.testing.assert_array_equal(gather_tokens(pool, layout, table, count), tokens)
