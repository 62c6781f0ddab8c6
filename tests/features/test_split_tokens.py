"""split_tokens: a sequence's result is the same bits in any batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import FORMATS, CacheFormat
from tests.features.batches import Batch, Call, Result, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
SINKS = (0.3, -1.5, 4.0, 0.0, -30.0, 2.5, 9.0, -0.1)
SPLIT = 48
BLOCKS = 64
LENGTHS = (700, 0, 1, 47, 48, 49, 96, 97, 300, 1000, 15)
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "query-tokens": {"query_tokens": 3, "soft_cap": 20.0, "heads_first": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def _setup(fmt: CacheFormat, kind: str = "plain", **changed: object) -> Setup:
    return Setup.of(fmt, split_tokens=SPLIT, max_blocks_per_seq=BLOCKS, **{**KINDS[kind], **changed})


@formats
@kinds
def test_against_float64(rig: Rig, fmt: CacheFormat, kind: str) -> None:
    """Chunks that are full, short, empty; windows that leave whole ones out; sinks once."""
    setup = _setup(fmt, kind)
    for window in (0, 1, 47, 48, 49, 200):
        make_batch(setup, Call(lengths=LENGTHS, window=window)).check(rig)
    make_batch(setup, Call(lengths=LENGTHS, window=60, sinks=SINKS)).check(rig)
    make_batch(setup, Call(lengths=LENGTHS, sinks=SINKS, extra_columns=1)).check(rig)
    zero_query(setup, Call(lengths=(1, 49, 0, 200), sinks=SINKS)).check(rig)


def _only(batch: Batch, rows: list[int], width: int) -> Batch:
    """Some rows of a batch, in that order, with a table of another width."""
    tables = np.full((len(rows), width), -1, np.int32)
    columns = min(width, batch.tables.shape[1])
    tables[:, :columns] = batch.tables[rows, :columns]
    return dataclasses.replace(
        batch,
        q=batch.q[rows],
        seq_lens=batch.seq_lens[rows],
        tables=tables,
        call=dataclasses.replace(batch.call, lengths=tuple(batch.call.lengths[row] for row in rows)),
    )


def _row(result: Result, row: int) -> Result:
    return Result(result.out[row : row + 1], result.lse[row : row + 1])


@formats
@kinds
@pytest.mark.parametrize("window", [0, 100])
def test_the_same_bits_in_any_batch(rig: Rig, fmt: CacheFormat, kind: str, window: int) -> None:
    """Alone, in another row, beside others, in tables of other widths, and again."""
    setup = _setup(fmt, kind)
    batch = make_batch(setup, Call(lengths=LENGTHS, sinks=SINKS, window=window))
    together = batch.check(rig)
    batch.run(rig).assert_same_bits(together)
    rows = list(range(len(LENGTHS)))[::-1]
    turned = _only(batch, rows, BLOCKS).run(rig)
    for at, row in enumerate(rows):
        _row(turned, at).assert_same_bits(_row(together, row))
        alone = _only(batch, [row], max(1, -(-LENGTHS[row] // 16))).run(rig)
        alone.assert_same_bits(_row(together, row))


@formats
def test_the_same_bits_at_other_blocks(rig: Rig, fmt: CacheFormat) -> None:
    """The same tokens, in another decoder's larger batch too."""
    setup = _setup(fmt)
    first = make_batch(setup, Call(lengths=LENGTHS))
    tokens = [[d.astype(np.float32) for d in dense] for dense in first.dense]
    result = first.check(rig)
    # Dequantised values quantise to themselves, here with their own scale.
    again = make_batch(
        setup, dataclasses.replace(first.call, seed=99), q=first.q, keys=tokens[0], values=tokens[1]
    )
    assert (again.tables != first.tables).any()
    for which in (0, 1):
        for ours, theirs in zip(first.dense[which], again.dense[which], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    again.run(rig).assert_same_bits(result)


@formats
def test_the_planned_result_is_near(rig: Rig, fmt: CacheFormat) -> None:
    call = Call(lengths=LENGTHS, window=400, sinks=SINKS)
    planned = make_batch(Setup.of(fmt), call).check(rig)
    out, lse = (x.astype(np.float64) for x in (planned.out, planned.lse))
    make_batch(_setup(fmt), call).run(rig).assert_near(out, lse)


@formats
@pytest.mark.parametrize("split_tokens", [16, 64, 2048])
def test_sizes_of_chunks(rig: Rig, fmt: CacheFormat, split_tokens: int) -> None:
    """No compile-time constant."""
    setup = dataclasses.replace(_setup(fmt), split_tokens=split_tokens)
    make_batch(setup, Call(lengths=(0, 1, 16, 17, 63, 64, 65, 1000), window=0)).check(rig)


@formats
def test_rows_that_are_wrong(rig: Rig, fmt: CacheFormat) -> None:
    batch = make_batch(_setup(fmt), Call(lengths=(300, 300, 300, 300, 40), sinks=SINKS))
    tables, lengths = batch.tables.copy(), batch.seq_lens.copy()
    tables[0, 7], tables[1, 18] = -1, batch.num_blocks
    lengths[2], lengths[3] = -5, tables.shape[1] * 16 + 1
    out, lse = batch.expected()
    out[:4], lse[:4] = np.nan, np.nan
    dataclasses.replace(batch, tables=tables, seq_lens=lengths).run(rig).assert_near(out, lse)


@pytest.mark.parametrize("split_tokens", [0, -16, 8, 17, 24, 2**31 + 16, 2**32, 2**64])
def test_other_chunks_are_refused(rig: Rig, split_tokens: int) -> None:
    match = f"split_tokens: got {split_tokens}, allowed are positive multiples of 16 up to {2**31}"
    with pytest.raises(ArgumentValueError, match=match):
        Setup(split_tokens=split_tokens, max_blocks_per_seq=4).decoder(rig)


def test_the_longest_chunk(rig: Rig) -> None:
    """Longer than any sequence, which is then one chunk."""
    setup = Setup(split_tokens=2**31, max_blocks_per_seq=64)
    make_batch(setup, Call(lengths=(700, 0, 1))).check(rig)


def test_what_chunks_need(rig: Rig) -> None:
    with pytest.raises(ArgumentValueError, match="max_blocks_per_seq: got None; split_tokens needs it"):
        Setup(split_tokens=16).decoder(rig)
    with pytest.raises(
        ArgumentValueError, match="max_blocks_per_seq: got 4, but only split_tokens needs one"
    ):
        Setup(max_blocks_per_seq=4).decoder(rig)
    with pytest.raises(ArgumentValueError, match="max_blocks_per_seq: got 0"):
        Setup(split_tokens=16, max_blocks_per_seq=0).decoder(rig)
    with pytest.raises(ArgumentTypeError, match="split_tokens"):
        Setup(split_tokens=16.0, max_blocks_per_seq=4).decoder(rig)  # type: ignore[arg-type]
    setup = Setup(split_tokens=16, max_blocks_per_seq=4)
    bare = make_batch(setup, Call(lengths=(1,))).arguments(rig)
    bare = {name: rig.gpu.pointer(x) if hasattr(x, "shape") else x for name, x in bare.items()}
    for width in (2**28, np.int32(2**28)):  # 16 tokens a block: 2^32 in all
        with pytest.raises(ArgumentValueError, match=f"max_blocks_per_seq: got {2**28}, .* is for 4"):
            setup.decoder(rig).decode(**bare | {"output": 1 << 20, "max_blocks_per_seq": width})
    batch = make_batch(_setup(FORMATS[0]), Call(lengths=(1,), extra_columns=BLOCKS))
    with pytest.raises(ArgumentValueError, match=f"max_blocks_per_seq: got {BLOCKS + 1}, .* is for {BLOCKS}"):
        batch.run(rig)
