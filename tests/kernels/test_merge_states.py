"""Merging of attention results against float64, closed forms, and the same bits where nothing is to merge."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import DevicePtr, merge_states
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.oracle import F64, assert_matches, attention_float64, merge_float64
from tests.rig import Rig

BF = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
F16 = np.dtype(np.float16)
PAIRS = [(BF, BF), (F16, F16), (F32, F32), (F32, BF), (F32, F16)]
KINDS = pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)


def merged(
    rig: Rig,
    outputs: npt.NDArray[Any],
    lses: npt.ArrayLike,
    source: np.dtype[Any] = F32,
    target: np.dtype[Any] = F32,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Output and LSE on the host, after a merge into arrays of NaN."""
    parts = np.asarray(outputs).astype(source)
    out = rig.upload(np.full(parts.shape[1:], np.nan, target))
    out_lse = rig.upload(np.full(parts.shape[1:-1], np.nan, np.float32))
    merge_states(
        rig.gpu, rig.upload(parts), rig.upload(np.asarray(lses, np.float32)), out, out_lse, stream=rig.stream
    )
    return rig.download(out).view(target), rig.download(out_lse)


def exact(outputs: npt.NDArray[Any], lses: npt.NDArray[Any]) -> tuple[F64, F64]:
    """The merge in float64; what parts without keys hold is left out."""
    full = lses != -np.inf
    live = np.where(full[..., None], outputs.astype(np.float64), 0.0)
    rows = np.concatenate([live, lses[..., None].astype(np.float64), full[..., None]], axis=-1)
    return merge_float64(np.moveaxis(rows, 0, -2))


@KINDS
@pytest.mark.parametrize("num_parts", [1, 2, 3, 32, 33, 100])
@pytest.mark.parametrize("head_dim", [4, 64, 128, 240, 256])
def test_against_float64(
    rig: Rig, num_parts: int, head_dim: int, source: np.dtype[Any], target: np.dtype[Any]
) -> None:
    rng = np.random.default_rng(num_parts)
    outputs = rng.standard_normal((num_parts, 3, 5, head_dim)).astype(source)
    lses = (6 * rng.standard_normal((num_parts, 3, 5)) + 40 * rng.standard_normal((3, 5))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, 0, 0] = -np.inf
    outputs[lses == -np.inf] = np.nan
    out, lse = merged(rig, outputs, lses, source, target)
    right, right_lse = exact(outputs, lses)
    if target == BF:
        assert_matches(out, right)
    else:
        sums = 2e-6 * np.abs(outputs[lses > -np.inf].astype(np.float64)).max()
        # One rounding at the end, of half a unit in the last place, in F16 also below its normal numbers.
        rtol, atol = (2.0**-11, sums + 2.0**-25) if target == F16 else (0.0, sums)
        np.testing.assert_allclose(out.astype(np.float64), right, rtol=rtol, atol=atol)
    np.testing.assert_allclose(lse, right_lse, rtol=3e-7, atol=1e-6)
    nothing = out[0, 0].astype(np.float32)
    assert not nothing.any()
    assert not np.signbit(nothing).any()
    assert lse[0, 0] == -np.inf


@pytest.mark.edge("merge-empty")
@KINDS
@pytest.mark.parametrize("place", [0, 1, 40])
def test_an_empty_state_changes_nothing(
    rig: Rig, place: int, source: np.dtype[Any], target: np.dtype[Any]
) -> None:
    """(O 7, LSE 2.0) with empty ones is exactly (7, 2.0); other values keep their bits, -0 too."""
    rng = np.random.default_rng(2)
    outputs = np.full((41, 2, 2, 64), np.nan)
    lses = np.full((41, 2, 2), -np.inf)
    outputs[place] = rng.standard_normal((2, 2, 64)) * 1e3
    outputs[place, 0, 0], outputs[place, 0, 1, :8], lses[place, 0] = 7.0, -0.0, 2.0
    lses[place, 1] = [-1234.5678, 3.0e7]
    out, lse = merged(rig, outputs, lses, source, target)
    assert (out[0, 0] == 7.0).all()
    assert (lse[0, 0], lse[0, 1]) == (2.0, 2.0)
    kept = outputs[place].astype(source).astype(target)
    np.testing.assert_array_equal(out.view(np.uint8), kept.view(np.uint8))
    np.testing.assert_array_equal(lse, lses[place].astype(np.float32))


@pytest.mark.edge("merge-base")
@KINDS
def test_natural_logarithms(rig: Rig, source: np.dtype[Any], target: np.dtype[Any]) -> None:
    """q = 0: V = 0 over 3072 keys, V = 1 over 64. A mix-up of logarithms gives 0.00374."""
    outputs = np.zeros((2, 1, 1, 64))
    outputs[1] = 1.0
    out, lse = merged(rig, outputs, np.log([[[3072.0]], [[64.0]]]), source, target)
    tolerance = {BF: 2.0**-14, F16: 2.0**-17, F32: 2e-8}[target]
    assert np.abs(out.astype(np.float64) - 64 / 3136).max() < tolerance
    assert abs(float(lse[0, 0]) - math.log(3136)) < 1e-6


def test_weights_far_apart(rig: Rig) -> None:
    """A part that is e^-200 of another has no weight, and no NaN; large LSEs do not overflow."""
    outputs = np.stack([np.full((1, 1, 64), 3.0), np.full((1, 1, 64), -5.0)])
    for low, high in ((-500.0, -300.0), (0.0, 200.0), (800.0, 1000.0)):
        out, lse = merged(rig, outputs, [[[high]], [[low]]])
        assert (out == 3.0).all()
        assert lse[0, 0] == high
    out, lse = merged(rig, outputs, [[[1000.0]], [[1000.0]]])
    assert (out == -1.0).all()
    assert abs(float(lse[0, 0]) - (1000 + math.log(2))) < 1e-4


def test_nan_is_kept(rig: Rig) -> None:
    outputs = np.ones((3, 1, 2, 64))
    outputs[1, 0, 1, 5] = np.nan
    out, lse = merged(rig, outputs, [[[0.0, 0.0]], [[np.nan, 0.0]], [[-np.inf, 0.0]]])
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(lse[0, 0])
    assert np.flatnonzero(np.isnan(out[0, 1])).tolist() == [5]
    assert abs(float(lse[0, 1]) - math.log(3)) < 1e-6
    out, lse = merged(rig, outputs, [[[np.nan, 0.0]], [[-np.inf, 0.0]], [[-np.inf, 0.0]]])
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(lse[0, 0])


def test_parts_of_attention_are_attention_over_all(rig: Rig) -> None:
    """Keys dealt out to parts, each with its own LSE, against float64 attention over all of them."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 6, 64), (200, 2, 64), (200, 2, 64)))
    cuts = [(0, 0), (0, 1), (1, 90), (90, 200), (200, 200)]
    outputs, lses = np.zeros((5, 2, 6, 64)), np.full((5, 2, 6), -np.inf)
    for part, (begin, end) in enumerate(cuts):
        for seq in range(2):
            outputs[part, seq], lses[part, seq] = attention_float64(q[seq], k[begin:end], v[begin:end], 0.125)
    out, lse = merged(rig, outputs, lses)
    for seq in range(2):
        right, right_lse = attention_float64(q[seq], k, v, 0.125)
        np.testing.assert_allclose(out[seq], right, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[seq], right_lse, rtol=0, atol=2e-6)


def test_in_place_and_twice(rig: Rig) -> None:
    """The result may replace a part, and a second run gives the same bits."""
    rng = np.random.default_rng(4)
    outputs = rng.standard_normal((40, 7, 3, 256)).astype(np.float32)
    lses = rng.standard_normal((40, 7, 3)).astype(np.float32)
    fresh = merged(rig, outputs, lses)
    for array, again in zip(fresh, merged(rig, outputs, lses), strict=True):
        np.testing.assert_array_equal(array, again)
    for part in (0, 39):
        device = rig.upload(outputs), rig.upload(lses)
        merge_states(rig.gpu, device[0], device[1], device[0][part], device[1][part], stream=rig.stream)
        for array, found, given in zip(fresh, device, (outputs, lses), strict=True):
            host = rig.download(found)
            np.testing.assert_array_equal(host[part], array)
            others = np.delete(np.arange(40), part)
            np.testing.assert_array_equal(host[others], given[others])


def test_results_that_are_no_whole_part(rig: Rig) -> None:
    """Rows are merged in no order, so a row that is written must not be one that is still read."""
    storage = rig.gpu.zeros(4096, np.float32)
    outputs, lses = storage[:1536].reshape(2, 12, 64), rig.gpu.zeros((3, 12), np.float32)[:2]
    bits = storage.view(np.uint16)
    fine, fine_lse = storage[2048:2816].reshape(12, 64), storage[3000:3012]
    for out, out_lse, message in (
        (storage[64:832].reshape(12, 64), fine_lse, r"out: its memory, .* is shared with outputs\[0\]"),
        (storage[1472:2240].reshape(12, 64), fine_lse, r"out: .* outputs\[1\]"),
        (bits[:768].reshape(12, 64), fine_lse, r"out: .* outputs\[0\]"),
        (fine, storage[100:112], r"out_lse: .* outputs\[0\]"),
        (fine, storage[2048:2060], "out: .* out_lse"),
        (fine, lses.reshape(-1)[1:13], r"out_lse: .* lses\[0\]"),
        (fine, lses.reshape(-1)[6:18], r"out_lse: .* lses\[0\]"),
    ):
        with pytest.raises(ArgumentValueError, match=f"^{message}"):
            merge_states(rig.gpu, outputs, lses, out, out_lse, stream=rig.stream)
    wide = storage[:3072].reshape(2, 2, 12, 64)
    for out in (fine, outputs[1], outputs[0]):
        merge_states(rig.gpu, outputs, lses, out, lses[1], stream=rig.stream)
    merge_states(rig.gpu, wide[:, 0], lses, wide[0, 1], fine_lse, stream=rig.stream)  # between two parts


def test_strided_parts_and_no_lse(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    wide = rng.standard_normal((4, 2, 3, 2, 64)).astype(np.float32)
    lses = rng.standard_normal((4, 2, 3, 2)).astype(np.float32)
    device, device_lses = rig.upload(wide), rig.upload(lses)
    out = rig.gpu.zeros((3, 2, 64), np.float32)
    merge_states(rig.gpu, device[:, 1], device_lses[:, 1], out, stream=rig.stream)
    right, _ = merged(rig, wide[:, 1], lses[:, 1])
    np.testing.assert_array_equal(rig.download(out), right)
    merge_states(rig.gpu, device[:, 1, :0], device_lses[:, 1, :0], out[:0], stream=rig.stream)


def test_what_is_refused(rig: Rig) -> None:
    gpu, stream = rig.gpu, rig.stream
    outputs, lses = gpu.zeros((2, 3, 4, 64), np.float32), gpu.zeros((2, 3, 4), np.float32)
    out, lse = gpu.zeros((3, 4, 64), np.float32), gpu.zeros((3, 4), np.float32)
    bf16, odd = rig.full_bf16((2, 3, 4, 64)), gpu.zeros((2, 3, 4, 6), np.float32)
    for arguments, message in (
        ((outputs, lses[:1], out, lse), r"lses: got shape \(1, 3, 4\), allowed is \(2, 3, 4\)"),
        ((outputs, lses, out[:2], lse), r"out: got shape \(2, 4, 64\)"),
        ((outputs, lses, out, 1 << 20), "^out_lse: got int, allowed is an array"),
        ((SimpleNamespace(shape=(2, 3, 4, 64)), lses, out, lse), "^outputs: got SimpleNamespace"),
        ((outputs, lses, out, lse[:2]), r"out_lse: got shape \(2, 4\)"),
        ((outputs[0, 0], lses[0, 0], out, lse), "outputs: got shape"),
        ((outputs[:0], lses[:0], out, lse), "outputs: got shape"),
        ((bf16, lses, out, lse), "outputs, out: got dtypes uint16 and float32"),
        ((gpu.zeros(outputs.shape, np.float16), lses, out, lse), "got dtypes float16 and float32"),
        ((gpu.zeros(outputs.shape, np.float64), lses, out, lse), "got dtypes float64"),
        ((outputs, gpu.zeros(lses.shape, np.float64), out, lse), "lses: got dtype float64"),
        ((outputs, lses, out, gpu.zeros(lse.shape, np.float16)), "out_lse: got dtype float16"),
        ((4096, lses, out, lse), "outputs: got int, allowed is an array"),
        ((outputs[..., :6], lses, out[..., :6], lse), "outputs: got strides"),
        ((odd, lses, odd[0], lse), "head_dim: got 6"),
        ((np.broadcast_to(outputs[:1], outputs.shape), lses, out, lse), "^outputs: got strides .* and 768"),
        ((outputs, np.broadcast_to(lses[:1], lses.shape), out, lse), "^lses: got strides .* and 12 or more"),
        ((outputs[::-1], lses, out, lse), "^outputs: got strides"),
        ((outputs, lses, out, DevicePtr(4096)), "^out_lse: got DevicePtr, allowed is an array"),
    ):  # fmt: skip
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            merge_states(gpu, *arguments, stream=stream)
    with pytest.raises(ArgumentTypeError, match=r"^gpu: got NoneType, allowed is a backend"):
        merge_states(None, outputs, lses, out, lse, stream=stream)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="stream: got None"):
        merge_states(gpu, outputs, lses, out, lse, stream=None)
    assert not rig.download(out).any()
