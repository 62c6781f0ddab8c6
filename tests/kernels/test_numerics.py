"""The kernels' number conversions: every code, and encoders against ml_dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

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
    values = values[: len(values) // 4 * 4]
    count = len(values)
    e4m3, bf16 = rig.gpu.zeros(count, np.uint8), rig.gpu.zeros(count, np.uint16)
    _launch(rig, "encode", count // 4, rig.gpu.asarray(values), e4m3, bf16)
    np.testing.assert_array_equal(rig.download(e4m3), encode_e4m3(values))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rig.download(bf16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(rig.download(bf16), encode_bf16(values))


def test_every_bf16_value_by_every_group_scale_to_e2m1(rig: Rig) -> None:
    """By an approximate reciprocal, with the codes of true quotients."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns[(patterns & 0x7FFF) <= 0x7F80]  # no NaN
    values = np.concatenate([values, values[: -len(values) % 8]])
    words, scales = len(values) // 8, np.arange(1, 0x7F, dtype=np.uint32)
    found = rig.gpu.zeros((len(scales), words), np.uint32)
    launch = KernelLaunch(rig.gpu, rig.gpu.kernel(PROBE, "encode_e2m1"))
    launch.grid([div_ceil(words, 128), len(scales), 1]).block([128, 1, 1])
    for array in (rig.gpu.asarray(values), rig.gpu.asarray(scales), found):
        launch.arg_ptr(array)
    launch.arg_u32(words).launch(rig.stream)
    packed = rig.download(found).view(np.uint8)
    wide = values.view(ml_dtypes.bfloat16).astype(np.float32)
    for code, row in zip(scales, packed, strict=True):
        with np.errstate(over="ignore"):
            expected = encode_e2m1(wide / np.float32(E4M3_TABLE[code]))
        np.testing.assert_array_equal(row & 15, expected[0::2])
        np.testing.assert_array_equal(row >> 4, expected[1::2])


def test_quotients_of_every_bf16_mantissa_by_every_divisor(rig: Rig) -> None:
    """All mantissas of a divisor on a GPU; on the emulator every 61st, and some neighbours."""
    step = 1 if rig.name == "cupy" else 61
    ranges = [(0, step, (1 << 23) // step)]
    if step > 1:
        ranges += [((eighth << 20) - 64, 1, 128) for eighth in range(1, 8)]
        ranges += [(0, 1, 64), ((1 << 23) - 64, 1, 64)]
    for first, every, count in ranges:
        wrong = rig.gpu.asarray(np.full(count, 99, np.uint32))
        launch = KernelLaunch(rig.gpu, rig.gpu.kernel(PROBE, "count_wrong_quotients"))
        launch.grid([div_ceil(count, 128), 1, 1]).block([128, 1, 1]).arg_ptr(wrong)
        launch.arg_u32(first).arg_u32(every).arg_u32(count).launch(rig.stream)
        assert not rig.download(wrong).any()


def test_magnitudes_of_pairs(rig: Rig) -> None:
    """Infinities and NaN among them, of either sign; limits are positive numbers."""
    special = np.array([0, 1, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0], np.uint16)
    halves = np.concatenate([special, special | np.uint16(0x8000)])
    first = np.stack(np.meshgrid(halves, halves[::-1]), -1).reshape(-1, 2)
    for limit in (0x0001, 0x3F80, 0x4580):
        second = np.full_like(first, limit)
        second[:, 1] = 0x3F80
        found = [rig.gpu.zeros(len(first), np.uint32) for _ in range(3)]
        operands = [
            rig.gpu.asarray(np.ascontiguousarray(x).view(np.uint32).reshape(-1)) for x in (first, second)
        ]
        _launch(rig, "compare_magnitudes", len(first), *operands, *found)
        larger, smaller, smaller_f16 = (rig.download(x).view(np.uint16).reshape(-1, 2) for x in found)
        magnitude, sign = first & 0x7FFF, first & 0x8000
        is_nan = magnitude > 0x7F80
        expected = np.maximum(magnitude, second)
        np.testing.assert_array_equal((larger & 0x7FFF) > 0x7F80, is_nan)
        np.testing.assert_array_equal((larger & 0x7FFF)[~is_nan], expected[~is_nan])
        np.testing.assert_array_equal((smaller & 0x7FFF) > 0x7F80, is_nan)
        expected = np.minimum(magnitude, second) | sign
        np.testing.assert_array_equal(smaller[~is_nan], expected[~is_nan])
        is_nan = magnitude > 0x7C00  # as F16
        np.testing.assert_array_equal(smaller_f16[~is_nan], expected[~is_nan])


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


@pytest.mark.parametrize("total", [396, 397, 1000, 2**24 + 5, 2**31, 2**32 - 7])
@pytest.mark.parametrize("blocks", [1, 3, 396])
def test_positions_are_their_shares(rig: Rig, total: int, blocks: int) -> None:
    """A plan's first and last position of each block's share, up to as many as it counts."""
    found = rig.gpu.zeros(2 * blocks, np.uint32)
    launch = KernelLaunch(rig.gpu, rig.gpu.kernel(PROBE, "ends_of_shares"))
    launch.grid([div_ceil(blocks, 128), 1, 1]).block([128, 1, 1])
    launch.arg_ptr(found).arg_u32(total).arg_u32(blocks).launch(rig.stream)
    np.testing.assert_array_equal(rig.download(found), np.repeat(np.arange(blocks), 2))
