"""What happens to scores: softmax scale, soft cap, sinks, windows, and magnitudes at the ends of F32."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat
from tests.features.batches import Batch, Call, Scales, make_batch, zero_query
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
CAPPED = 30.0
SINKS = (0.3, -1.5, 4.0, 0.0, -30.0, 2.5, 9.0, -0.1)


# ---- sinks -------------------------------------------------------------------------------------------


@formats
def test_sinks(rig: Rig, fmt: CacheFormat) -> None:
    """In sequences that one block has, that many share, that are empty."""
    setup = Setup.of(fmt)
    make_batch(setup, Call(lengths=(1, 16, 0, 33, 2000), sinks=SINKS)).check(rig)
    make_batch(setup, Call(lengths=(0, 40, 700), sinks=SINKS, window=17)).check(rig)
    zero_query(setup, Call(lengths=(0, 1, 20, 300), sinks=SINKS)).check(rig)


@formats
@pytest.mark.parametrize("sink", [1e4, -1e4, -math.inf, 1e38, -1e38])
def test_sinks_far_away(rig: Rig, fmt: CacheFormat, sink: float) -> None:
    """One that takes all the weight, and one that takes none: -inf is no sink at all, bit for bit."""
    setup = Setup.of(fmt)
    call = Call(lengths=(0, 1, 20, 300, 1500))
    result = make_batch(setup, dataclasses.replace(call, sinks=(sink,) * 8)).check(rig)
    without = make_batch(setup, call).check(rig)
    if sink == -math.inf:
        result.assert_same_bits(without)
    elif sink > 0:
        assert not result.out.astype(np.float32).any()
    else:
        np.testing.assert_array_equal(result.out[1:], without.out[1:])
        np.testing.assert_allclose(result.lse[0], sink, rtol=1e-6)


@formats
def test_sinks_at_the_end_of_float32(rig: Rig, fmt: CacheFormat) -> None:
    """Times log2(e) they are beyond it: they take all weight, and the LSE is none but theirs."""
    call = Call(lengths=(0, 1, 20, 300, 1500), sinks=(3e38,) * 8)
    result = make_batch(Setup.of(fmt), call).run(rig)
    assert not result.out.astype(np.float32).any()
    assert (result.lse > 2e38).all()


@formats
def test_a_nan_sink_shows(rig: Rig, fmt: CacheFormat) -> None:
    """In its own head alone."""
    sinks = (0.0, math.nan, *SINKS[2:])
    result = make_batch(Setup.of(fmt), Call(lengths=(0, 40, 700), sinks=sinks)).run(rig)
    assert np.isnan(result.lse[:, 0, 1]).all()
    assert np.isnan(result.out[1:, 0, 1].astype(np.float32)).all()
    others = [0, *range(2, 8)]
    assert np.isfinite(result.out[:, 0, others].astype(np.float32)).all()
    assert np.isfinite(result.lse[:, 0, others]).all()


# ---- soft cap ----------------------------------------------------------------------------------------


def _capped(fmt: CacheFormat, **changed: Any) -> Setup:
    return Setup.of(fmt, soft_cap=CAPPED, **changed)


def with_cap(rig: Rig, setup: Setup, cap: float) -> Any:
    """A decoder of the same kernels with another cap, which is no compile-time constant."""
    return dataclasses.replace(setup, soft_cap=cap).decoder(rig)


@formats
@pytest.mark.parametrize("cap", [30.0, 1.0, 0.05])
def test_soft_cap(rig: Rig, fmt: CacheFormat, cap: float) -> None:
    setup = dataclasses.replace(_capped(fmt), soft_cap=cap)
    make_batch(setup, Call(lengths=(1, 16, 0, 33, 2000), softmax_scale=0.9)).check(rig)
    make_batch(setup, Call(lengths=(300, 0), softmax_scale=2.5, window=50, sinks=SINKS)).check(rig)


@formats
@pytest.mark.parametrize("cap", [1e3, 1e4, 1e6, 1e10, 1e38, 3.4e38])
def test_huge_caps_leave_scores_alone(rig: Rig, fmt: CacheFormat, cap: float) -> None:
    """The score keeps its relative precision, however small a part of the cap it is."""
    setup = dataclasses.replace(_capped(fmt), soft_cap=cap)
    batch = make_batch(setup, Call(lengths=(1, 40, 0, 700), softmax_scale=1.0))
    result = batch.check(rig)
    plain = dataclasses.replace(batch, setup=dataclasses.replace(setup, soft_cap=None))
    if cap >= 1e6:
        result.assert_near(*plain.expected())


@formats
@pytest.mark.parametrize("share", [0.03125, 0.125, 0.24, 0.26, 0.5])
def test_soft_cap_by_its_formula(rig: Rig, fmt: CacheFormat, share: float) -> None:
    """Of one token, whose LSE is its score: cap * tanh(share), by a series where the share is small."""
    setup = dataclasses.replace(_capped(fmt), soft_cap=100.0)
    key, q = np.zeros((1, 2, 64)), np.zeros((1, 1, 8, 64))
    key[..., 0], q[..., 0] = 1.5, 1.0
    call = Call(lengths=(1,), softmax_scale=100.0 * share / 1.5, scales=_ones(fmt))
    batch = make_batch(setup, call, q=q, keys=[key.astype(ml_dtypes.bfloat16)])
    for sign in (1.0, -1.0):
        result = dataclasses.replace(batch, q=(sign * q).astype(ml_dtypes.bfloat16)).run(rig)
        np.testing.assert_allclose(result.lse, sign * 100.0 * np.tanh(share), rtol=4e-6)


@formats
@pytest.mark.parametrize("cap", [1e-3, 1e-10, 1.2e-38, 1e-40])
def test_tiny_caps_make_all_tokens_equal(rig: Rig, fmt: CacheFormat, cap: float) -> None:
    """Scores in [-cap, cap]; of keys and queries of zeros too."""
    setup = dataclasses.replace(_capped(fmt), soft_cap=cap)
    lengths = (1, 40, 0, 700)
    batch = make_batch(setup, Call(lengths=lengths))
    result = batch.check(rig)
    if cap < 1e-6:
        np.testing.assert_allclose(result.lse[[0, 1, 3], 0, 0], np.log([1, 40, 700]), atol=1e-5)
    zero_query(setup, Call(lengths=lengths)).check(rig)


@formats
def test_soft_cap_of_scores_far_beyond_it(rig: Rig, fmt: CacheFormat) -> None:
    """tanh is +-1 there: two groups of tokens, e^(2 cap) apart."""
    setup = dataclasses.replace(_capped(fmt), soft_cap=3.0)
    q, keys, values = _two_groups(50, 11)
    batch = make_batch(
        setup,
        Call(lengths=(50,), softmax_scale=2.0**40, scales=_ones(fmt)),
        q=q,
        keys=[keys],
        values=[values],
    )
    result = batch.check(rig)
    total = 11 * math.exp(3.0) + 39 * math.exp(-3.0)
    np.testing.assert_allclose(result.lse, math.log(total), rtol=1e-5)
    np.testing.assert_allclose(
        result.out.astype(np.float64),
        (11 * math.exp(3.0) * 3.0 - 1.5 * 39 * math.exp(-3.0)) / total,
        rtol=4e-3,
    )


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60])
def test_other_caps_are_refused(rig: Rig, cap: float) -> None:
    with pytest.raises(ArgumentValueError, match="soft_cap"):
        Setup(soft_cap=cap).decoder(rig)


def test_a_cap_that_is_no_number(rig: Rig) -> None:
    with pytest.raises(ArgumentTypeError, match="soft_cap"):
        Setup(soft_cap="30").decoder(rig)  # type: ignore[arg-type]


# ---- scales and windows ------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("scale", [1.0, 0.01, 5.0])
def test_softmax_scale(rig: Rig, fmt: CacheFormat, scale: float) -> None:
    make_batch(Setup.of(fmt), Call(softmax_scale=scale)).check(rig)


@pytest.mark.parametrize("scale", [0.0, -0.125, math.nan, math.inf, 1e39, 1e-60, 3e38, 2.36e38])
def test_other_softmax_scales_are_refused(rig: Rig, scale: float) -> None:
    batch = make_batch(Setup(), Call())
    with pytest.raises(ArgumentValueError, match="softmax_scale"):
        batch.run(rig, softmax_scale=scale)


def test_the_largest_softmax_scale(rig: Rig) -> None:
    """Times log2(e) it just fits float32: with q = 0 the result is the mean. With k_scale it does not fit."""
    call = Call(lengths=(9,), softmax_scale=2.35e38, scales=Scales(1.0, 1.0))
    batch = zero_query(Setup.of(FP8), call)
    batch.check(rig)
    with pytest.raises(ArgumentValueError, match=r"softmax_scale: got 2.35.*, which times k_scale, 1.01"):
        batch.batch.run(rig, k_scale=1.01)


@formats
def test_windows_with_everything(rig: Rig, fmt: CacheFormat) -> None:
    """Cap, sinks, query tokens, HND, interleaved pools and a window in one call."""
    setup = _capped(fmt, query_tokens=3, heads_first=True, pools="interleaved", block_size=24)
    for window in (0, 1, 2, 23, 64, 1000):
        call = Call(lengths=(0, 2, 24, 90, 700), window=window, sinks=SINKS, softmax_scale=0.7, q_gap=64)
        make_batch(setup, call).check(rig)


@pytest.mark.parametrize("window", [-1, 2**32])
def test_other_windows_are_refused(rig: Rig, window: int) -> None:
    batch = make_batch(Setup(), Call())
    with pytest.raises(ArgumentValueError, match="sliding_window"):
        batch.run(rig, sliding_window=window)


def test_a_window_as_large_as_can_be(rig: Rig) -> None:
    make_batch(Setup(), Call(window=2**32 - 1)).check(rig)


# ---- magnitudes --------------------------------------------------------------------------------------


def _ones(fmt: CacheFormat) -> Scales | None:
    return Scales(1.0, 1.0) if fmt == FP8 else None


def _two_groups(n: int, large: int) -> tuple[npt.NDArray[Any], ...]:
    """q of ones, K = 1.5 for every so many-th token and -1.5 for the others, V = 3 and -1.5: exact in
    all formats, and all scores of a group are equal."""
    q = np.ones((1, 1, 8, 64))
    keys = np.full((n, 2, 64), -1.5, np.float32)
    values = np.full((n, 2, 64), -1.5, np.float32)
    chosen = np.linspace(0, n - 1, large).astype(int)
    keys[chosen], values[chosen] = 1.5, 3.0
    return q, keys, values


@formats
@pytest.mark.parametrize("log_scale", [20, 21, 27, 30, 34, 60, 100])
@pytest.mark.parametrize("large", [1, 11])
def test_huge_scores(rig: Rig, fmt: CacheFormat, log_scale: int, large: int) -> None:
    """Scores of +-96 * 2^log_scale: one-hot, or ties among equal ones, whose mean is exact."""
    q, keys, values = _two_groups(700, large)
    call = Call(lengths=(700,), softmax_scale=2.0**log_scale, scales=_ones(fmt))
    result = make_batch(Setup.of(fmt), call, q=q, keys=[keys], values=[values]).run(rig)
    np.testing.assert_array_equal(result.out.astype(np.float64), 3.0)
    np.testing.assert_allclose(result.lse, 96.0 * 2.0**log_scale, rtol=1e-6)


@formats
def test_huge_scores_that_are_all_negative(rig: Rig, fmt: CacheFormat) -> None:
    q, keys, values = _two_groups(700, 1)
    call = Call(lengths=(699,), softmax_scale=2.0**40, scales=_ones(fmt))
    batch = make_batch(Setup.of(fmt), call, q=q, keys=[keys[1:]], values=[values[1:]])
    result = batch.run(rig)
    np.testing.assert_array_equal(result.out.astype(np.float64), -1.5)
    np.testing.assert_allclose(result.lse, -96.0 * 2.0**40, rtol=1e-6)


@formats
@pytest.mark.parametrize("magnitude", [1e-38, 2.0**-126, 1e-30, 1e-20, 1e20, 1e30, 2.0**120])
def test_magnitude_of_q(rig: Rig, fmt: CacheFormat, magnitude: float) -> None:
    """The softmax scale takes it back: as if q were of magnitude 1."""
    make_batch(Setup.of(fmt), Call(q_magnitude=magnitude)).check(rig)


@formats
def test_factors_of_scores_beyond_float32(rig: Rig, fmt: CacheFormat) -> None:
    """q and softmax scale together are: with keys of zeros all tokens are equal, and nothing is NaN."""
    q, keys = np.full((1, 1, 8, 64), 1e30), [np.zeros((20, 2, 64), ml_dtypes.bfloat16)]
    call = Call(lengths=(20,), softmax_scale=1e20, scales=_ones(fmt))
    result = make_batch(Setup.of(fmt), call, q=q, keys=keys).check(rig)
    np.testing.assert_allclose(result.lse, math.log(20), atol=1e-4)


@formats
def test_rows_of_q_far_apart(rig: Rig, fmt: CacheFormat) -> None:
    """Each row has its own range: heads of 1e-38 beside those of 1e35."""
    q = np.ones((1, 1, 8, 64))
    q[0, 0] *= np.array([1e-38, 1e35, 1.0, 1e-20, 1e20, 0.0, 1e-5, 1e5])[:, None]
    _, keys, values = _two_groups(50, 5)
    call = Call(lengths=(50,), softmax_scale=0.125, scales=_ones(fmt))
    batch = make_batch(Setup.of(fmt), call, q=q, keys=[keys], values=[values])
    out, lse = batch.expected()
    result = batch.run(rig)
    np.testing.assert_allclose(result.out.astype(np.float64), out, rtol=2.0**-8, atol=1e-3)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-5, atol=1e-4)


def test_values_at_the_end_of_bf16(rig: Rig) -> None:
    """+-3e38, whose weighted sums stay in range because weights are at most 1."""
    rng = np.random.default_rng(1)
    values = [(rng.choice([-1.0, 1.0], (n, 2, 64)) * 3e38).astype(ml_dtypes.bfloat16) for n in (1, 40, 700)]
    batch = make_batch(Setup(), Call(lengths=(1, 40, 700)), values=values)
    batch.check(rig)


# ---- weights far below the largest -------------------------------------------------------------------


def _faint(fmt: CacheFormat, log_weight: float, tokens: int) -> tuple[Batch, float]:
    """A token of V = 0 (a sink in the cache), others of V = 1.5 whose weight is 2^-log_weight of its.

    Also the exact output.
    """
    q = np.zeros((1, 1, 8, 64))
    q[..., 3] = 1.0
    n = tokens + 1
    keys = np.zeros((n, 2, 64), np.float32)
    values = np.full((n, 2, 64), 1.5, np.float32)
    keys[0, :, 3], values[0] = 1.5, 0.0
    call = Call(lengths=(n,), softmax_scale=log_weight * math.log(2.0) / 1.5, scales=_ones(fmt))
    share = tokens * 2.0**-log_weight
    return make_batch(Setup.of(fmt), call, q=q, keys=[keys], values=[values]), 1.5 * share / (1 + share)


@formats
@pytest.mark.parametrize("log_weight", [4, 10, 16, 18, 21])
def test_small_weights_keep_their_bits(rig: Rig, fmt: CacheFormat, log_weight: float) -> None:
    batch, exact = _faint(fmt, log_weight, 700)
    np.testing.assert_allclose(batch.run(rig).out.astype(np.float64), exact, rtol=2.0**-8)


@formats
@pytest.mark.parametrize("log_weight", [24, 26, 28, 30, 40])
def test_tiny_weights(rig: Rig, fmt: CacheFormat, log_weight: float) -> None:
    """BF16 keeps them to 2^-126 of the largest. The others' weights are F16, set 2^8 below a reference: those
    under 2^-22 of the largest lose bits, and under 2^-32 they are zero. The error is below 2^-33 of V's
    largest magnitude for each token."""
    batch, exact = _faint(fmt, log_weight, 700)
    got = batch.run(rig).out.astype(np.float64)
    if fmt == BF16:
        np.testing.assert_allclose(got, exact, rtol=2.0**-8)
    else:
        np.testing.assert_allclose(got, exact, rtol=2.0**-8, atol=700 * 1.5 * 2.0**-33)
