"""Checked mode looks at what a decoder's features attend to, and where their arrays lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupaged.checked import checked_mode
from cupaged.errors import CheckedModeError
from cupaged.formats import FORMATS, FP8, NVFP4, CacheFormat
from tests.features.batches import Batch, Call, make_batch
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def found(rig: Rig, batch: Batch, **changed: Any) -> tuple[str, Any, Any]:
    """Array, index and value of what checked mode raises."""
    with checked_mode(), pytest.raises(CheckedModeError) as caught:
        batch.run(rig, **changed)
    error = caught.value
    return error.array, error.index, error.value


def with_id(batch: Batch, column: int, block: int) -> Batch:
    """The first sequence's table has this id there."""
    tables = batch.tables.copy()
    tables[0, column] = block
    return dataclasses.replace(batch, tables=tables)


def widened(tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Five columns more, of ids that no pool has."""
    wide = np.full((len(tables), tables.shape[1] + 5), -77, np.int32)
    wide[:, : tables.shape[1]] = tables
    return wide


@formats
@pytest.mark.parametrize(("window", "oldest"), [(16, 48), (17, 47)])
def test_the_oldest_query_token_sees_more_than_the_last(
    rig: Rig, fmt: CacheFormat, window: int, oldest: int
) -> None:
    """The first of 3 query tokens sees [66 - 2 - window, 64): blocks from there on are looked up."""
    batch = make_batch(Setup.of(fmt, query_tokens=3), Call(lengths=(66,), window=window))
    column = oldest // 16
    assert found(rig, with_id(batch, column, -5)) == ("block_tables", (0, column), -5)
    with checked_mode():
        with_id(batch, column - 1, -5).check(rig)


def test_the_widest_window_of_several_query_tokens(rig: Rig) -> None:
    """With the older tokens' reach it is 2^32 and more: it must not begin at 0 again."""
    batch = make_batch(Setup(query_tokens=3), Call(lengths=(66,), window=2**32 - 1))
    with checked_mode():
        batch.check(rig)
    assert found(rig, with_id(batch, 0, -5)) == ("block_tables", (0, 0), -5)


def test_queries_in_half_precision(rig: Rig) -> None:
    """Their exponent has other bits than BF16's; the largest finite one is no infinity."""
    batch = make_batch(Setup(q_dtype="float16"), Call(lengths=(20, 3)))
    q = batch.q.copy()
    q[1, 0, 2, 5] = np.inf
    assert found(rig, dataclasses.replace(batch, q=q)) == ("q", (1, 2, 5), np.inf)
    q[1, 0, 2, 5] = 65504.0
    with checked_mode():
        dataclasses.replace(batch, q=q).run(rig)


@formats
@pytest.mark.parametrize("pools", ["interleaved", "layer"])
def test_strided_pools_pass(rig: Rig, fmt: CacheFormat, pools: str) -> None:
    """What lies between their blocks is poison, scales that are NaN among it."""
    with checked_mode():
        make_batch(Setup.of(fmt, pools=pools), Call(lengths=(40, 0, 17))).check(rig)


def test_tables_with_wider_rows(rig: Rig) -> None:
    batch = make_batch(Setup(), Call(lengths=(20, 40)))
    wide = widened(batch.tables)
    given: dict[str, Any] = {"table_stride": wide.shape[1]}
    with checked_mode():
        batch.run(rig, block_tables=rig.upload(wide).reshape(-1), **given).assert_near(*batch.expected())
    wide[1, 1] = -9
    table = rig.upload(wide)
    for tables in (table.reshape(-1), rig.gpu.pointer(table)):
        assert found(rig, batch, block_tables=tables, **given) == ("block_tables", (1, 1), -9)


@pytest.mark.parametrize("wide", [False, True], ids=["tight table", "wide table"])
@pytest.mark.parametrize("pools", ["apart", "layer"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_scales_of_nvfp4_groups(rig: Rig, heads_first: bool, pools: str, wide: bool) -> None:
    """In either order of heads and tokens, behind any table: K's group 2 of head 1 of token 19."""
    setup = Setup.of(NVFP4, heads_first=heads_first, pools=pools)
    batch = make_batch(setup, Call(lengths=(20, 40)))
    layout = setup.layouts()[0]
    row = 1 * 16 + 3 if heads_first else 3 * 2 + 1
    at = batch.offsets[0] + int(batch.tables[1, 1]) * layout.block_stride_bytes
    batch.storage[0].array[at + layout.data_section_bytes + row * 4 + 2] = 0x7F
    changed: dict[str, Any] = {}
    if wide:
        tables = widened(batch.tables)
        changed = {"block_tables": rig.upload(tables).reshape(-1), "table_stride": tables.shape[1]}
    array, index, value = found(rig, batch, **changed)
    assert (array, index) == ("k_cache scale", (1, 19, 1, 2))
    assert np.isnan(value)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 0.0, -1.0])
@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_scales_by_head(rig: Rig, name: str, bad: float) -> None:
    batch = make_batch(Setup.of(FP8), Call(lengths=(20,)))
    good = rig.upload(np.array([1.0, 3e38], np.float32))
    with checked_mode():
        batch.run(rig, **{name: good})
    array, index, value = found(rig, batch, **{name: rig.upload(np.array([1.0, bad], np.float32))})
    assert (array, index) == (name, (1,))
    np.testing.assert_equal(value, bad)


def test_an_lse_of_all_query_tokens(rig: Rig) -> None:
    """F32 ``[2, 2, 8]``, 128 bytes: what shares its second half is found, what follows it is not."""
    batch = make_batch(Setup(query_tokens=2), Call(lengths=(20, 3)))
    given, decoder = batch.arguments(rig), batch.setup.decoder(rig)
    for begin in (96, 120, 128):
        space = rig.gpu.zeros(1024, np.uint8)
        given["seq_lens"] = space[begin : begin + 8].view(np.int32)
        given["seq_lens"][:] = rig.upload(batch.seq_lens)
        given |= {"output": rig.full_bf16(batch.q.shape), "lse": rig.gpu.pointer(space)}
        with checked_mode():
            if begin == 128:
                decoder.decode(**given)
                continue
            with pytest.raises(CheckedModeError, match=r"^lse: .* share memory with seq_lens"):
                decoder.decode(**given)
