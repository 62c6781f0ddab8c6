"""More sequences than a block's shared memory has room to plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat
from cupaged.registry.ring import MAX_PLANNED_SEQS
from tests.features.batches import Call, Scales, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
BAD_LENGTHS = (-1, -(2**31), 2**31 - 1)


def _setup(fmt: CacheFormat, max_seqs: int) -> Setup:
    return Setup.of(fmt, heads=(2, 1), head_dim=32, max_seqs=max_seqs)


def _lengths(count: int) -> tuple[int, ...]:
    """Mostly empty and tiny ones, and here and there one that several blocks share."""
    rng = np.random.default_rng(count)
    lengths = rng.choice([0, 0, 0, 1, 2, 16, 17], count)
    lengths[rng.integers(0, count, 4)] = 400
    lengths[[0, -1]] = 33
    return tuple(int(n) for n in lengths)


@formats
@pytest.mark.parametrize("count", [512, 513, 1000, 5000])
def test_many_sequences(rig: Rig, fmt: CacheFormat, count: int) -> None:
    """With one decoder for all of them, and the same again: its counters are as they were."""
    setup = _setup(fmt, 5000)
    make_batch(setup, Call(lengths=_lengths(count))).check_twice(rig)


@formats
def test_a_small_batch_of_a_decoder_for_many(rig: Rig, fmt: CacheFormat) -> None:
    """As the decoder for few has it, to the last bit: shares and merges are the same."""
    for lengths in ((700, 0, 1), (0,), (5,) * 40):
        call = Call(lengths=lengths, window=300)
        many = make_batch(_setup(fmt, 5000), call).check(rig)
        few = make_batch(_setup(fmt, MAX_PLANNED_SEQS), call).check(rig)
        many.assert_same_bits(few)


@formats
@pytest.mark.parametrize("max_seqs", [MAX_PLANNED_SEQS, 5000])
def test_lengths_that_do_not_fit(rig: Rig, fmt: CacheFormat, max_seqs: int) -> None:
    """Their rows are NaN, wherever they are, and nobody else's; with sinks too."""
    count = 500 if max_seqs == MAX_PLANNED_SEQS else 1500
    for sinks in (None, (0.5, -1.0)):
        batch = make_batch(_setup(fmt, max_seqs), Call(lengths=_lengths(count), sinks=sinks))
        bad = {row: BAD_LENGTHS[i % 3] for i, row in enumerate((0, 1, 31, 32, 33, 255, count - 1))}
        bad[200] = batch.tables.shape[1] * 16 + 1
        lengths = batch.seq_lens.copy()
        lengths[list(bad)] = list(bad.values())
        out, lse = batch.expected()
        out[list(bad)], lse[list(bad)] = np.nan, np.nan
        dataclasses.replace(batch, seq_lens=lengths).run(rig).assert_near(out, lse)


@formats
def test_blocks_outside_the_pool_of_many(rig: Rig, fmt: CacheFormat) -> None:
    batch = make_batch(_setup(fmt, 5000), Call(lengths=_lengths(1000)))
    tables = batch.tables.copy()
    rows = [row for row, n in enumerate(batch.call.lengths) if n][3::7]
    out, lse = batch.expected()
    for i, row in enumerate(rows):
        column = (batch.call.lengths[row] - 1) // 16
        tables[row, column if i % 2 else 0] = (-1, batch.num_blocks, 2**31 - 1)[i % 3]
        out[row], lse[row] = np.nan, np.nan
    dataclasses.replace(batch, tables=tables).run(rig).assert_near(out, lse)


@formats
@pytest.mark.parametrize("count", [1, 513, 5000])
def test_all_empty(rig: Rig, fmt: CacheFormat, count: int) -> None:
    for sinks in (None, (2.5, -1.0)):
        result = zero_query(_setup(fmt, 5000), Call(lengths=(0,) * count, sinks=sinks)).check(rig)
        assert not result.out.view(np.uint16).any()


def test_many_sequences_with_everything(rig: Rig) -> None:
    setup = Setup(
        heads=(4, 2), head_dim=32, max_seqs=700, query_tokens=2, soft_cap=5.0, heads_first=True, block_size=8
    )
    call = Call(lengths=_lengths(600), window=19, sinks=(0.1, -2.0, 3.0, 0.0), softmax_scale=0.8)
    make_batch(setup, call).check(rig)


def test_more_than_a_decoder_takes(rig: Rig) -> None:
    decoder = Setup(max_seqs=600).decoder(rig)
    batch = make_batch(Setup(), Call(lengths=(1,) * 601))
    with pytest.raises(ArgumentValueError, match="num_seqs: got 601, this decoder takes 0 to 600"):
        batch.run(rig, decoder)
    with pytest.raises(ArgumentValueError, match="num_seqs: got -1"):
        batch.run(rig, decoder, num_seqs=-1)
    result = batch.run(rig, decoder, num_seqs=0)
    assert np.isnan(result.lse).all(), "nothing is written"


def test_more_tokens_than_a_plan_counts(rig: Rig) -> None:
    """Room of a table for 2^32 tiles or more."""
    batch = make_batch(Setup(max_seqs=600), Call(lengths=(1,)))
    table, lengths = (rig.gpu.pointer(rig.upload(x)) for x in (batch.tables, batch.seq_lens))
    q = rig.gpu.pointer(rig.upload(batch.q))
    width = 2**31 // 600 * 2 + 1
    for integer in (int, np.int32):
        with pytest.raises(ArgumentValueError, match="a plan counts fewer than 2\\^32 tiles of 16"):
            batch.run(
                rig, q=q, block_tables=table, seq_lens=lengths, num_seqs=integer(600),
                max_blocks_per_seq=integer(width), output=q, lse=None,
            )  # fmt: skip
    setup = Setup(max_seqs=1, block_size=16)
    one = make_batch(setup, Call(lengths=(1,)))
    with pytest.raises(ArgumentValueError, match="a plan counts fewer than 2\\^32 tiles of 16"):
        one.run(
            rig, q=q, block_tables=table, seq_lens=lengths, max_blocks_per_seq=2**32 - 2, output=q, lse=None
        )  # what a sequence costs beside its tiles counts too


def check_short_sequences(rig: Rig, fmt: CacheFormat, count: int) -> None:
    """By formula, in arrays: fixture U of 0 to 39 tokens, of which every second sequence has none."""
    setup = _setup(fmt, count)
    lengths = np.arange(count) % 40 * (np.arange(count) % 2)
    ramp = np.arange(40) + 1.0 if fmt == BF16 else 1.5 * 2.0 ** (np.arange(40) % 4)
    tokens = np.broadcast_to(ramp[:, None, None], (40, 1, 32))
    batch = make_batch(
        setup,
        Call(lengths=tuple(lengths.tolist()), scales=Scales(1.0, 1.0) if fmt == FP8 else None),
        q=np.zeros((count, 1, 2, 32)),
        keys=[tokens[:n] for n in lengths],
        values=[tokens[:n] for n in lengths],
    )
    means = np.concatenate([[0.0], np.cumsum(ramp) / np.arange(1, 41)])[lengths]
    with np.errstate(divide="ignore"):
        lse = np.log(lengths)
    out = np.broadcast_to(means[:, None, None, None], batch.q.shape)
    batch.run(rig).assert_near(out, np.broadcast_to(lse[:, None, None], batch.q.shape[:3]))


@formats
def test_short_sequences(rig: Rig, fmt: CacheFormat) -> None:
    check_short_sequences(rig, fmt, 5000)


@formats
def test_a_hundred_thousand_sequences(gpu_rig: Rig, fmt: CacheFormat) -> None:
    check_short_sequences(gpu_rig, fmt, 100_000)
