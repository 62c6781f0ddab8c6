"""Dequantisation scales of every kind, K and V of different formats, and F16 queries."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from tests.features.batches import Call, Scales, make_batch, zero_query
from tests.features.setups import PAIRS, Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
quantised = pytest.mark.parametrize("fmt", [FP8, NVFP4], ids=lambda fmt: fmt.name)
pairs = pytest.mark.parametrize(("key", "value"), PAIRS, ids=lambda fmt: fmt.name)
LENGTHS = (1, 40, 0, 17, 700)


def by_head(*scales: float) -> np.ndarray:
    return np.array(scales, np.float32)


# ---- scales ------------------------------------------------------------------------------------------


@quantised
@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.0371, 0.0021), (1.0, 0.0123), (0.0171, 3.7)])
def test_scales_for_all_heads(rig: Rig, fmt: CacheFormat, k_scale: float, v_scale: float) -> None:
    """For NVFP4 the second of two levels."""
    make_batch(Setup.of(fmt), Call(lengths=LENGTHS, scales=Scales(k_scale, v_scale))).check(rig)


@quantised
def test_scales_by_head(rig: Rig, fmt: CacheFormat) -> None:
    """Alone, and on top of one for all heads; with several blocks of threads for the heads."""
    k, v = by_head(0.0171, 0.11), by_head(0.5, 0.0123)
    for scales in (Scales(None, None, k, v), Scales(2.0, 0.5, k, v), Scales(0.02, None, None, v)):
        make_batch(Setup.of(fmt), Call(lengths=LENGTHS, scales=scales)).check(rig)
    heads = 17
    rng = np.random.default_rng(3)
    many = [(0.02 * 2.0 ** rng.uniform(-2, 2, heads)).astype(np.float32) for _ in range(2)]
    setup = Setup.of(fmt, heads=(heads, heads), head_dim=32)
    make_batch(setup, Call(lengths=(1, 90, 0, 400), scales=Scales(None, None, *many))).check(rig)


@quantised
def test_scales_by_head_of_query_tokens_and_chunks(rig: Rig, fmt: CacheFormat) -> None:
    """The merge of chunks finds them applied."""
    scales = Scales(0.5, 2.0, by_head(0.0171, 0.11), by_head(0.5, 0.0123))
    for chunks in ({}, {"split_tokens": 32, "max_blocks_per_seq": 50}):
        setup = Setup.of(fmt, query_tokens=3, **chunks)
        make_batch(setup, Call(lengths=LENGTHS, scales=scales, sinks=(0.5,) * 8)).check(rig)


@quantised
def test_v_scale_by_formula(rig: Rig, fmt: CacheFormat) -> None:
    """Fixture H times powers of two by head: exact, and K's scales do not touch it."""
    k, v = by_head(7.3, 0.2), by_head(2.0, 0.25)
    setup = Setup.of(fmt)
    closed = zero_query(setup, Call(lengths=(5, 70), scales=Scales(None, 4.0, k, v)), "heads")
    closed.check(rig)


@formats
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-50, 1e300])
def test_other_scales_are_refused(rig: Rig, fmt: CacheFormat, name: str, scale: float) -> None:
    batch = make_batch(Setup.of(fmt), Call(lengths=(5,)))
    with pytest.raises(ArgumentValueError, match=name):
        batch.run(rig, **{name: scale})


@formats
@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_scales_by_head_are_f32_and_one_for_each(rig: Rig, fmt: CacheFormat, name: str) -> None:
    batch = make_batch(Setup.of(fmt), Call(lengths=(5,)))
    if fmt == BF16:
        with pytest.raises(ArgumentValueError, match=f"{name[:-1]}: got .* a bf16 cache has none"):
            batch.run(rig, **{name: rig.gpu.zeros(2, np.float32)})
        return
    for shape in ((1,), (8,), (1, 2), (2, 1)):
        with pytest.raises(ArgumentValueError, match=rf"^{name}: got shape .*, allowed is \(2,\)"):
            batch.run(rig, **{name: rig.gpu.zeros(shape, np.float32)})
    with pytest.raises(ArgumentTypeError, match=f"{name}.*float64"):
        batch.run(rig, **{name: rig.gpu.zeros(2, np.float64)})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("null", [0, DevicePtr(0), np.uint64(0)], ids=["int", "DevicePtr", "uint64"])
def test_a_null_pointer_is_no_scale(rig: Rig, name: str, null: Any) -> None:
    batch = make_batch(Setup.of(FP8), Call(lengths=(5,)))
    with pytest.raises(ArgumentValueError, match=f"^{name}: got None; an fp8 cache needs it or {name}s"):
        batch.run(rig, **{name: None, f"{name}s": null})
    make_batch(Setup.of(BF16), Call(lengths=(5,))).run(rig, **{f"{name}s": null})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_an_fp8_cache_needs_scales(rig: Rig, name: str) -> None:
    """Of the pool that is FP8, and of that alone."""
    batch = make_batch(Setup.of(FP8), Call(lengths=(5,)))
    with pytest.raises(ArgumentValueError, match=f"{name}: got None; an fp8 cache needs it or {name}s"):
        batch.run(rig, **{name: None})
    mixed = make_batch(Setup(key=FP8, value=BF16), Call(lengths=(5,)))
    with pytest.raises(ArgumentValueError, match=r"v_scale: got 1\.0; a bf16 cache has none"):
        mixed.run(rig, v_scale=1.0)


@quantised
def test_scales_whose_product_is_too_large(rig: Rig, fmt: CacheFormat) -> None:
    """k_scale and the softmax scale are one factor in the kernel."""
    batch = make_batch(Setup.of(fmt), Call(lengths=(5,)))
    with pytest.raises(ArgumentValueError, match="beyond float32"):
        batch.run(rig, softmax_scale=1e30, k_scale=1e30)


# ---- pairs of formats --------------------------------------------------------------------------------


@pairs
def test_pairs_of_formats(rig: Rig, key: CacheFormat, value: CacheFormat) -> None:
    """Pools of other block strides each, in NHD and HND."""
    setup = Setup(key=key, value=value, heads=(4, 2), head_dim=32)
    scales = Scales(
        0.0171 if key != BF16 else None,
        0.0123 if value != BF16 else None,
        by_head(0.5, 2.0) if key != BF16 else None,
        by_head(3.0, 1.0) if value != BF16 else None,
    )
    call = Call(lengths=LENGTHS, scales=scales, sinks=(0.1, 0.2, 0.3, 0.4))
    make_batch(setup, call).check(rig)
    make_batch(dataclasses.replace(setup, pools="layer"), dataclasses.replace(call, window=33)).check(rig)
    zero_query(setup, Call(lengths=(5, 70)), "dims").check(rig)


@pairs
def test_layouts_of_pairs_that_do_not_agree(rig: Rig, key: CacheFormat, value: CacheFormat) -> None:
    from cupaged.decode import Decoder

    layout, other = Setup(key=key, value=value).layouts()
    for field, found in (("num_kv_heads", 4), ("head_dim", 128), ("block_size", 8), ("heads_first", True)):
        wrong = dataclasses.replace(other, **{field: found})
        with pytest.raises(ArgumentValueError, match=f"value_layout: its {field} is {found}"):
            Decoder(rig.gpu, layout, 8, 4, value_layout=wrong)


# ---- F16 queries -------------------------------------------------------------------------------------


def _f16(fmt: CacheFormat, **changed: object) -> Setup:
    return Setup.of(fmt, q_dtype="float16", **changed)


@formats
def test_f16_queries(rig: Rig, fmt: CacheFormat) -> None:
    setup = _f16(fmt)
    make_batch(setup, Call(lengths=LENGTHS, q_gap=24)).check(rig)
    make_batch(setup, Call(lengths=LENGTHS, sinks=(0.5,) * 8, window=33)).check(rig)
    zero_query(setup, Call(lengths=(1, 16, 0, 200))).check(rig)


@formats
def test_f16_queries_with_query_tokens_and_a_cap(rig: Rig, fmt: CacheFormat) -> None:
    setup = _f16(fmt, query_tokens=2, soft_cap=5.0)
    make_batch(setup, Call(lengths=LENGTHS, softmax_scale=0.5)).check(rig)


@formats
@pytest.mark.parametrize("lanes", [(0, 1), (63, 7)])
def test_all_bits_of_an_f16_query_count(rig: Rig, fmt: CacheFormat, lanes: tuple[int, int]) -> None:
    """Fixture X2 from the last of q's 11 bits: q = (1 + 2^-10) e_i - e_j, K = 3 (e_i + e_j), scale 2^10.

    In BF16 the score would be 0 instead of 3.
    """
    q = np.zeros((1, 1, 8, 64))
    q[..., lanes[0]], q[..., lanes[1]] = 1 + 2.0**-10, -1.0
    keys, values = np.zeros((2, 2, 64), np.float32), np.full((2, 2, 64), 1.5, np.float32)
    keys[1][:, list(lanes)] = 3.0
    values[0] = 0.0
    scales = Scales(1.0, 1.0) if fmt == FP8 else None
    call = Call(lengths=(2,), softmax_scale=2.0**10, scales=scales)
    result = make_batch(_f16(fmt), call, q=q, keys=[keys], values=[values]).run(rig)
    # Weights are rounded to BF16 for BF16 V, to F16 for the others.
    np.testing.assert_allclose(result.out.astype(np.float64), 1.5 / (1 + math.exp(-3.0)), rtol=2.0**-8)
    np.testing.assert_allclose(result.lse, math.log1p(math.exp(3.0)), rtol=1e-6)


@formats
@pytest.mark.parametrize("magnitude", [2.0**-24, 2.0**-14, 1e-3, 2.0**15])
def test_f16_queries_of_any_magnitude(rig: Rig, fmt: CacheFormat, magnitude: float) -> None:
    """Subnormal ones too, down to the smallest there is; each row has its own factor."""
    rng = np.random.default_rng(2)
    q = rng.choice([-1.0, 1.0, 0.0], (len(LENGTHS), 1, 8, 64)) * magnitude
    call = Call(lengths=LENGTHS, softmax_scale=0.125 / magnitude)
    make_batch(_f16(fmt), call, q=q).check(rig)


@formats
def test_f16_outputs_have_all_their_bits(rig: Rig, fmt: CacheFormat) -> None:
    """1.5 / 7 as F16 has it: equal weights are exact."""
    values = np.zeros((7, 2, 64), np.float32)
    values[1] = 1.5
    call = Call(lengths=(7,), scales=Scales(1.0, 1.0) if fmt == FP8 else None)
    result = make_batch(_f16(fmt), call, q=np.zeros((1, 1, 8, 64)), values=[values]).run(rig)
    np.testing.assert_array_equal(result.out, np.float16(1.5 / 7))


@pytest.mark.parametrize("name", ["q", "output"])
def test_arrays_of_the_other_type_are_refused(rig: Rig, name: str) -> None:
    for setup, dtype in ((Setup(), np.float16), (_f16(BF16), np.uint16), (Setup(), np.float32)):
        batch = make_batch(setup, Call(lengths=(5,)))
        with pytest.raises(ArgumentTypeError, match=rf"{name}: got dtype {np.dtype(dtype)}"):
            batch.run(rig, **{name: rig.gpu.zeros(batch.q.shape, dtype)})


@pytest.mark.parametrize("dtype", ["float32", "half", "fp8", "", None, np.float16])
def test_other_query_types_are_refused(rig: Rig, dtype: object) -> None:
    with pytest.raises(ArgumentValueError, match=r"q_dtype: got .*allowed are bfloat16, float16"):
        Setup(q_dtype=dtype).decoder(rig)  # type: ignore[arg-type]
