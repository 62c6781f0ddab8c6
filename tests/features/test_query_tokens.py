"""Several query tokens a sequence: causal among themselves or not, with windows, caps and sinks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from tests.features.batches import Call, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
# Around nothing, a tile, a block of 24 and stages of up to 16 tiles: the window and the newest tokens end
# and begin in one tile or in two.
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 23, 24, 25, 63, 64, 65, 72, 127, 129, 256, 258, 300)
# Of a sink alone, whose sum is 2^-27 where weights are BF16: ln 2 times what `lg2.approx` may be wrong by
# there (2^-22 of 27) and what the reference is rounded by (half a unit in the last place below 32).
SINK_LSE_ATOL = 0.7 * (27 * 2.0**-22 + 2.0**-20)
SETUPS = [
    (2, True, BF16),
    (3, True, FP8),
    (4, True, NVFP4),
    (8, True, BF16),
    (5, True, NVFP4),
    (7, True, FP8),
    (6, False, BF16),
    (8, False, FP8),
    (3, False, NVFP4),
]
setups = pytest.mark.parametrize(
    ("tokens", "causal", "fmt"), SETUPS, ids=lambda x: x.name if isinstance(x, CacheFormat) else str(x)
)


def _setup(fmt: CacheFormat, tokens: int, causal: bool, **changed: object) -> Setup:
    sizes = {"heads": (6, 2), "head_dim": 32, "block_size": 24, "max_seqs": 32}
    return Setup.of(fmt, query_tokens=tokens, causal=causal, **{**sizes, **changed})


@setups
def test_lengths_around_everything(rig: Rig, tokens: int, causal: bool, fmt: CacheFormat) -> None:
    """With windows that reach into the newest tokens, over one tile, over several."""
    setup = _setup(fmt, tokens, causal)
    for window in (0, 1, tokens - 1, tokens, 16, 17, 40):
        make_batch(setup, Call(lengths=LENGTHS, window=window)).check(rig)
    make_batch(setup, Call(lengths=LENGTHS, window=20, sinks=(0.1, -3.0, 8.0, 0.0, 1.0, 2.0))).check(rig)


@setups
def test_means(rig: Rig, tokens: int, causal: bool, fmt: CacheFormat) -> None:
    """Fixture U: each token's mean is another, by formula."""
    setup = _setup(fmt, tokens, causal)
    for window in (0, 1, 5, 33):
        closed = zero_query(setup, Call(lengths=(1, 2, 17, 40, 100, 255), window=window))
        result = closed.check(rig)
        if causal and fmt == BF16 and window == 0:
            assert (result.out[3, :, 0, 0] == [(40 - after + 1) / 2 for after in range(tokens)][::-1]).all()


@setups
def test_tokens_before_the_sequence_see_nothing(
    rig: Rig, tokens: int, causal: bool, fmt: CacheFormat
) -> None:
    """Of a causal sequence shorter than query_tokens: zeros and -inf, or the sink alone."""
    setup = _setup(fmt, tokens, causal)
    lengths = tuple(range(tokens + 1))
    result = make_batch(setup, Call(lengths=lengths)).check(rig)
    sinks = tuple(np.linspace(-2, 3, 6).astype(np.float32))
    with_sinks = make_batch(setup, Call(lengths=lengths, sinks=sinks)).check(rig)
    for seq, length in enumerate(lengths):
        blind = max(0, tokens - length) if causal else tokens * (length == 0)
        assert not result.out[seq, :blind].astype(np.float32).any()
        assert np.isneginf(result.lse[seq, :blind]).all()
        assert np.isfinite(result.lse[seq, blind:]).all()
        assert not with_sinks.out[seq, :blind].astype(np.float32).any()
        alone = np.tile(sinks, (blind, 1))
        np.testing.assert_allclose(with_sinks.lse[seq, :blind], alone, rtol=1e-6, atol=SINK_LSE_ATOL)


@formats
def test_one_token_at_a_time_gives_the_same(rig: Rig, fmt: CacheFormat) -> None:
    """The last token of several is what one alone would be."""
    setup = _setup(fmt, 4, True)
    batch = make_batch(setup, Call(lengths=LENGTHS))
    together = batch.check(rig)
    one = dataclasses.replace(setup, query_tokens=1)
    alone = make_batch(one, batch.call)
    alone = dataclasses.replace(alone, q=batch.q[:, -1:].copy(), dense=batch.dense, storage=batch.storage)
    alone = dataclasses.replace(alone, tables=batch.tables)
    out, lse = (x[:, -1:].astype(np.float64) for x in (together.out, together.lse))
    alone.run(rig).assert_near(out, lse)


@pytest.mark.parametrize(("tokens", "fmt"), [(4, BF16), (8, NVFP4)], ids=str)
def test_more_rows_than_a_block_of_threads_has(rig: Rig, tokens: int, fmt: CacheFormat) -> None:
    """Slices of a KV head's rows, which cut through its query tokens."""
    setup = Setup.of(fmt, heads=(48, 1), head_dim=32, query_tokens=tokens)
    make_batch(setup, Call(lengths=(0, 2, 5, 40, 300), window=0)).check(rig)
    make_batch(setup, Call(lengths=(300, 3), window=21)).check(rig)
    zero_query(setup, Call(lengths=(1, 9, 70))).check(rig)


@formats
def test_a_poisoned_newest_value_stays_in_its_head_and_dim(rig: Rig, fmt: CacheFormat) -> None:
    """A NaN in V shows in every query token that sees it, and in no other head, dim or sequence.

    It may show in the older query tokens too, whose weight of 0 does not make it one: 0 times NaN is NaN.
    """
    setup = _setup(fmt, 3, True)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((n, 2, 32)).astype(np.float32) for n in (40, 17)]
    values[0][-1, 1, 3] = np.nan
    result = make_batch(setup, Call(lengths=(40, 17)), values=values).run(rig)
    out = result.out.astype(np.float32)
    assert np.isnan(out[0, 2, 3:, 3]).all()
    assert np.isfinite(out[0, :, :3]).all()
    group = slice(16) if fmt == NVFP4 else 3  # a scale for 16
    assert np.isfinite(np.delete(out[0], group, axis=-1)).all()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(result.lse).all()


@pytest.mark.parametrize("tokens", [0, -1, 9])
def test_other_numbers_of_tokens_are_refused(rig: Rig, tokens: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"query_tokens: got {tokens}, allowed is 1 to 8"):
        Setup(query_tokens=tokens).decoder(rig)


def test_a_number_of_tokens_that_is_none(rig: Rig) -> None:
    with pytest.raises(ArgumentTypeError, match="query_tokens"):
        Setup(query_tokens=2.5).decoder(rig)  # type: ignore[arg-type]


def test_q_of_another_number_of_tokens(rig: Rig) -> None:
    batch = make_batch(_setup(FP8, 3, True), Call(lengths=(5, 20)))
    wrong = rig.gpu.zeros((2, 4, 6, 32), np.uint16)
    with pytest.raises(ArgumentValueError, match=r"q: got shape \(2, 4, 6, 32\), allowed is \[n, 3, 6, 32\]"):
        batch.run(rig, q=wrong)
    with pytest.raises(ArgumentValueError, match="q: reaches over"):
        batch.run(rig, q=rig.gpu.zeros((2, 6, 32), np.uint16))
