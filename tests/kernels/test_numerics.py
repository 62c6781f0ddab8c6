"""The kernels' number conversions: every code, and encoders against ml_dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupaged import KernelLaunch, div_ceil
from cupaged.formats import encode_bf16, encode_e2m1, encode_e4m3
from tests.oracle import E2M1_TABLE, E4M3_TABLE
from tests.rig import Rig

PROBE = Path(__file__).parent / "numerics_probe.cu"


def _launch(rig: Rig, entry: str, count: int, *arrays: Any) -> None:
    launch = KernelLaunch(rig.gpu, rig.gpu.kernel(PROBE, entry))
    launch.grid([div_ceil(count, 128), 1, 1]).block([128, 1, 1])
    for array in arrays:
        launch.arg_ptr(array)
    launch.arg_u32(count).launch(rig.stream)


def test_all_e4m3_codes(rig: Rig) -> None:
    single, low, high = (rig.gpu.zeros(256, np.float32) for _ in range(3))
    _launch(rig, "decode_e4m3", 256, single, low, high)
    expected = np.array(E4M3_TABLE, np.float32)
    np.testing.assert_array_equal(rig.download(single), expected)
    np.testing.assert_array_equal(rig.download(low), expected)
    np.testing.assert_array_equal(rig.download(high), expected[::-1])


def _floats_to_try() -> np.ndarray:
    """Every upper half of a float32 with tails around the rounding points, without NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | tails).reshape(-1).view(np.float32)
    return values[~np.isnan(values)]


def test_encoders(rig: Rig) -> None:
    values = _floats_to_try()
    count = len(values)
    e4m3, e2m1 = (rig.gpu.zeros(count, np.uint8) for _ in range(2))
    bf16 = rig.gpu.zeros(count, np.uint16)
    _launch(rig, "encode", count, rig.gpu.asarray(values), e4m3, e2m1, bf16)
    np.testing.assert_array_equal(rig.download(e4m3), encode_e4m3(values))
    np.testing.assert_array_equal(rig.download(e2m1), encode_e2m1(values))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rig.download(bf16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(rig.download(bf16), encode_bf16(values))


def test_e2m1_times_every_scale_is_exact(rig: Rig) -> None:
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint32)
    words = np.array([0x76543210, 0xFEDCBA98], np.uint32)
    grid_words, grid_scales = (a.reshape(-1) for a in np.meshgrid(words, finite))
    decoded = rig.gpu.zeros(8 * len(grid_words), np.float32)
    _launch(
        rig,
        "decode_e2m1",
        len(grid_words),
        rig.gpu.asarray(grid_words),
        rig.gpu.asarray(grid_scales),
        decoded,
    )
    codes = (grid_words[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    expected = np.array(E2M1_TABLE)[codes] * np.array(E4M3_TABLE)[grid_scales][:, None]
    np.testing.assert_array_equal(rig.download(decoded).reshape(-1, 8).astype(np.float64), expected)


def test_a_nan_scale_gives_nan(rig: Rig) -> None:
    decoded = rig.gpu.zeros(8, np.float32)
    word, scale = np.array([0x76543211], np.uint32), np.array([0x7F], np.uint32)
    _launch(rig, "decode_e2m1", 1, rig.gpu.asarray(word), rig.gpu.asarray(scale), decoded)
    assert np.isnan(rig.download(decoded)).all()
