"""FP8 calibration with headroom and for each head, and the cache that is written with its scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupaged import DevicePtr, KVCache
from cupaged.calibration import Fp8Calibration
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import FP8, CacheLayout
from tests.rig import Rig

BF = ml_dtypes.bfloat16


def test_each_head_has_its_own_maximum(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    calibration = Fp8Calibration(rig.gpu, num_heads=3, headroom=1.5)
    calibration.reset(rig.stream)
    assert calibration.scales().tolist() == [1.0, 1.0, 1.0]
    largest = np.zeros(3)
    for step in range(3):
        rows = (rng.standard_normal((7, 3, 40)) * np.array([1.0, 30.0, 0.01])[:, None]).astype(BF)
        rows[step, step, 39] = -(2.0**step) * 50
        wide = np.full((7, 160), np.nan, BF)  # what lies between the rows is not read
        wide[:, :120] = rows.reshape(7, 120)
        calibration.update(rig.upload(wide), 7, 120, 160, rig.stream)
        largest = np.maximum(largest, np.abs(rows.astype(np.float64)).max(axis=(0, 2)))
        assert rig.download(calibration.absmax).tolist() == largest.tolist()
    scales = calibration.scales()
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales, (1.5 * largest / 448).astype(np.float32))
    assert calibration.scale() == 1.5 * largest.max() / 448
    calibration.update(rig.upload(np.full((1, 120), np.inf, BF)), 0, 120, 120, rig.stream)
    assert calibration.scales().tolist() == scales.tolist()


def test_a_head_of_zeros_and_a_nan(rig: Rig) -> None:
    rows = np.zeros((2, 3, 8), BF)
    rows[1, 1, 3], rows[0, 2, 0] = 7.0, np.nan
    calibration = Fp8Calibration(rig.gpu, num_heads=3)
    calibration.update(rig.upload(rows.reshape(2, 24)), 2, 24, 24, rig.stream)
    scales = calibration.scales()
    assert scales[:2].tolist() == [1.0, float(np.float32(7 / 448))]
    assert np.isnan(scales[2])
    assert np.isnan(calibration.scale())
    with pytest.raises(ArgumentValueError, match=r"k_scale\[2\]"):
        KVCache(rig.gpu, CacheLayout(FP8, 3, 64, 4), 1, k_scale=scales, v_scale=1.0)


def test_headroom_keeps_the_largest_value_below_saturation(rig: Rig) -> None:
    """absmax a with headroom 2 is stored as 224, and twice as much still fits."""
    values = rig.upload(np.full((1, 64), 3.5, BF))
    calibration = Fp8Calibration(rig.gpu, headroom=2.0)
    calibration.update(values, 1, 64, 64, rig.stream)
    cache = KVCache(
        rig.gpu, CacheLayout(FP8, 1, 64, 2), 1, k_scale=calibration.scale(), v_scale=calibration.scales()
    )
    tokens = rig.upload(np.array([3.5, 7.0], BF).repeat(64).reshape(2, 1, 64))
    cache.write(tokens, tokens, rig.upload(np.arange(2)), stream=rig.stream)
    for array in cache.gather([0], 2, stream=rig.stream):
        assert rig.download(array)[:, 0, 0].tolist() == [3.5, 7.0]
    assert rig.download(cache.k_pool).reshape(2, 64)[:, 0].tolist() == [0x76, 0x7E]  # 224 and 448


@pytest.mark.parametrize("heads", [None, 2])
def test_rows_are_those_of_the_array(rig: Rig, heads: int | None) -> None:
    """An array's own stride, or none: other rows would be read, and a maximum missed."""
    data = np.zeros((10, 256), BF)
    data[9, 100] = 100.0
    wide = rig.upload(data)
    calibration = Fp8Calibration(rig.gpu, num_heads=heads)
    with pytest.raises(ArgumentValueError, match="row_stride: got 128, but data has 256 elements between"):
        calibration.update(wide[:, :128], 10, 128, 128, rig.stream)
    assert not rig.download(calibration.absmax).any()
    calibration.update(wide[:, :128], 10, 128, 256, rig.stream)
    assert rig.download(calibration.absmax).max() == 100.0


def test_addresses_of_data(rig: Rig) -> None:
    """By themselves, and with a size that the rows must fit in."""
    data = rig.upload(np.arange(1, 13, dtype=np.float32).astype(BF).reshape(2, 6))
    address = rig.gpu.pointer(data)
    for given in (address, np.uint64(address), DevicePtr(address), DevicePtr(address, 24)):
        calibration = Fp8Calibration(rig.gpu, num_heads=2)
        calibration.update(given, 2, 6, 6, rig.stream)
        assert rig.download(calibration.absmax).tolist() == [9.0, 12.0]
    for heads in (1, 2):
        with pytest.raises(ArgumentValueError, match="data: got 22 bytes, needed are 24"):
            Fp8Calibration(rig.gpu, num_heads=heads).update(DevicePtr(address, 22), 2, 6, 6, rig.stream)


def test_what_is_refused(rig: Rig) -> None:
    for bad in (0.5, 0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ArgumentValueError, match="headroom"):
            Fp8Calibration(rig.gpu, headroom=bad)
    for heads in (0, -1):
        with pytest.raises(ArgumentValueError, match=f"num_heads: got {heads}"):
            Fp8Calibration(rig.gpu, num_heads=heads)
    calibration = Fp8Calibration(rig.gpu, num_heads=3)
    data = rig.full_bf16((4, 24))
    with pytest.raises(ArgumentValueError, match="row_elems: got 25, allowed are multiples of 3 heads"):
        calibration.update(data, 2, 25, 25, rig.stream)
    with pytest.raises(ArgumentValueError, match="data: reaches over 96 elements, needed are 120"):
        calibration.update(data, 5, 24, 24, rig.stream)
    with pytest.raises(ArgumentTypeError, match="data: got dtype float32"):
        calibration.update(rig.gpu.zeros((4, 24), np.float32), 4, 24, 24, rig.stream)
    with pytest.raises(ArgumentValueError, match="row_stride: got 8, a row has 24"):
        calibration.update(rig.gpu.pointer(data), 2, 24, 8, rig.stream)
    for nothing in (None, [1.0], True, -1):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=r"^data: got"):
            calibration.update(nothing, 2, 24, 24, rig.stream)
    assert rig.download(calibration.absmax).tolist() == [0.0] * 3
