"""How pools and q may lie: HND, K and V interleaved, one layer of many, q inside a packed QKV."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import KVCache
from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from tests.features.batches import Call, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig, bits

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
pools = pytest.mark.parametrize("pools", ["interleaved", "layer"])
LENGTHS = (1, 15, 16, 17, 48, 49, 0, 300)


@formats
@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
def test_heads_first(rig: Rig, fmt: CacheFormat, block_size: int) -> None:
    """However blocks lie, HND and NHD give the same bits: only where a row is fetched from differs."""
    setup = Setup.of(fmt, head_dim=32, heads=(4, 2), block_size=block_size, heads_first=True)
    call = Call(lengths=LENGTHS)
    result = make_batch(setup, call).check(rig)
    make_batch(dataclasses.replace(setup, pools="interleaved"), call).check(rig).assert_same_bits(result)
    make_batch(setup, dataclasses.replace(call, window=19)).check(rig)
    zero_query(setup, Call(lengths=(5, 70)), "heads").check(rig)
    if block_size in (8, 16):  # tested elsewhere in NHD order too
        make_batch(dataclasses.replace(setup, heads_first=False), call).check(rig).assert_same_bits(result)


@formats
@pools
def test_strided_blocks_give_the_same_bits(rig: Rig, fmt: CacheFormat, pools: str) -> None:
    tight = Setup.of(fmt)
    call = Call(lengths=LENGTHS)
    result = make_batch(tight, call).check(rig)
    make_batch(dataclasses.replace(tight, pools=pools), call).check(rig).assert_same_bits(result)


def test_sections_of_nvfp4_that_follow_each_other_in_one_pool_only(rig: Rig) -> None:
    """Values and scales of a block are one copy where both pools have them so; the bits are the same."""
    setup, rng = Setup.of(NVFP4), np.random.default_rng(0)
    joined = setup.layouts()[0]
    section = joined.data_section_bytes + 64
    stride = joined.block_stride_bytes + 64
    apart = dataclasses.replace(joined, data_section_override=section, block_stride_override=stride)
    key, value = (rig.upload(rng.standard_normal((40, 2, 64)).astype(ml_dtypes.bfloat16)) for _ in range(2))
    q = rig.upload(rng.standard_normal((1, 8, 64)).astype(ml_dtypes.bfloat16))
    table, length = rig.upload(np.array([[2, 0, 3]], np.int32)), rig.upload(np.array([40], np.int32))
    slots = rig.upload(np.concatenate([np.arange(32, 48), np.arange(16), np.arange(48, 56)]))
    found = []
    for k_layout, v_layout in itertools.product((joined, apart), repeat=2):
        cache = KVCache(rig.gpu, k_layout, 4, value_layout=v_layout)
        cache.write(key, value, slots, stream=rig.stream)
        out = Decoder.for_cache(cache, 8, 1).decode(q, cache, table, length, stream=rig.stream)
        found.append(bits(rig.download(out)))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@formats
@pytest.mark.parametrize("heads_first", [False, True])
def test_interleaved_pools_of_a_few_heads(rig: Rig, fmt: CacheFormat, heads_first: bool) -> None:
    """Blocks of 12 tokens and 3 heads, none of whose sizes is a power of two."""
    setup = Setup.of(
        fmt, heads=(9, 3), head_dim=48, block_size=12, heads_first=heads_first, pools="interleaved"
    )
    make_batch(setup, Call(lengths=LENGTHS, q_gap=2 * 3 * 48)).check(rig)
    zero_query(setup, Call(lengths=(5, 70)), "heads").check(rig)


@formats
def test_poison_changes_no_bit(rig: Rig, fmt: CacheFormat) -> None:
    """What no live token owns is NaN, then 0, in strided pools with gaps in q and unused columns."""
    setup = Setup.of(fmt, pools="layer")
    call = Call(lengths=LENGTHS, q_gap=24, extra_columns=3, window=33)
    result = make_batch(setup, call).check(rig)
    make_batch(setup, dataclasses.replace(call, poison=0)).check(rig).assert_same_bits(result)


@formats
def test_q_out_of_packed_qkv(rig: Rig, fmt: CacheFormat) -> None:
    """q_stride is that of query tokens; what lies between belongs to K and V, here NaN."""
    for tokens in (1, 3):
        setup = Setup.of(fmt, query_tokens=tokens)
        plain = make_batch(setup, Call(lengths=LENGTHS)).check(rig)
        packed = make_batch(setup, Call(lengths=LENGTHS, q_gap=2 * 2 * 64))
        packed.check(rig).assert_same_bits(plain)


def test_q_as_a_view_of_packed_qkv(rig: Rig) -> None:
    """An array whose own stride is the one given; another one is refused."""
    setup = Setup()
    batch = make_batch(setup, Call(lengths=LENGTHS))
    row, width = 8 * 64, (8 + 2 * 2) * 64
    wide = np.full((len(LENGTHS), width), 0x7FC0, np.uint16)
    wide[:, :row] = batch.q.view(np.uint16).reshape(-1, row)
    view = rig.gpu.asarray(wide)[:, :row]
    result = batch.run(rig, q=view, q_stride=width)
    result.assert_near(*batch.expected())
    with pytest.raises(ArgumentValueError, match=f"q_stride: got {row}, but q has {width} elements"):
        batch.run(rig, q=view)


def _refused(rig: Rig, setup: Setup, match: str, **changed: Any) -> None:
    batch = make_batch(setup, Call(lengths=(5, 20)))
    with pytest.raises(ArgumentValueError, match=match):
        batch.run(rig, **changed)


@pytest.mark.parametrize("stride", [0, -512, 8 * 64 - 8, 8 * 64 + 4])
def test_other_q_strides_are_refused(rig: Rig, stride: int) -> None:
    flat = rig.gpu.zeros(4096, np.uint16)
    _refused(rig, Setup(), "q_stride", q=flat, q_stride=stride)


def test_rows_of_the_table_may_be_one(rig: Rig) -> None:
    """table_stride 0: all sequences have the same row, as those of a shared prefix."""
    setup = Setup()
    one = make_batch(setup, Call(lengths=(150,)))
    tables = one.tables
    lengths = np.array([150, 150, 150], np.int32)
    q = np.repeat(one.q, 3, axis=0)
    same = dataclasses.replace(
        one, q=q, seq_lens=lengths, call=dataclasses.replace(one.call, lengths=(150,) * 3)
    )
    table = rig.upload(tables)
    out, lse = (np.repeat(x, 3, axis=0) for x in one.expected())
    for given in (table, table.reshape(-1), rig.gpu.pointer(table)):
        same.run(rig, block_tables=given, table_stride=0).assert_near(out, lse)


@pytest.mark.parametrize("fmt", [BF16, FP8, NVFP4], ids=lambda fmt: fmt.name)
def test_wider_rows_of_the_table(rig: Rig, fmt: CacheFormat) -> None:
    """table_stride beyond the columns of a call: what lies behind them is not looked up."""
    batch = make_batch(Setup.of(fmt), Call(lengths=(150, 3, 40)))
    wide = np.full((3, batch.tables.shape[1] + 5), -1, np.int32)
    wide[:, : batch.tables.shape[1]] = batch.tables
    table = rig.upload(wide)
    result = batch.run(rig, block_tables=table.reshape(-1), table_stride=wide.shape[1])
    result.assert_near(*batch.expected())
