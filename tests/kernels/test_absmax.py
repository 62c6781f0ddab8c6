"""The absmax kernels and the FP8 calibration that stands on them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import ops
from cupaged.calibration import Fp8Calibration
from tests.rig import Rig


def _absmax(rig: Rig, data: npt.NDArray[np.float32], *, offset: int = 0, start: float = 0.0) -> float:
    """Absmax of the data, placed `offset` elements into a buffer of infinities."""
    wide = np.full(len(data) + offset + 16, np.inf, np.float32).astype(ml_dtypes.bfloat16)
    wide[offset : offset + len(data)] = data.astype(ml_dtypes.bfloat16)
    device = rig.upload(wide)
    out = rig.gpu.asarray(np.array([start], np.float32))
    address = rig.gpu.pointer(device) + 2 * offset
    ops.bf16_absmax(rig.gpu, rig.kernel("bf16_absmax"), address, out, len(data), rig.stream)
    return float(rig.download(out)[0])


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 511, 512, 513, 4095, 4096, 4097, 32_769, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_every_element_counts(rig: Rig, count: int, offset: int) -> None:
    rng = np.random.default_rng(count)
    data = rng.standard_normal(count).astype(np.float32)
    for at in {0, count // 2, count - 1}:
        peaked = data.copy()
        peaked[at] = -77.0
        assert _absmax(rig, peaked, offset=offset) == 77.0


@pytest.mark.parametrize("row_elems", [1, 7, 8, 31, 256, 4095, 4096, 4103, 12_301])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_every_row_counts_and_no_gap(rig: Rig, row_elems: int, gap: int) -> None:
    """Rows at any alignment; the largest is at either end of a row, or where a warp's piece ends."""
    rows, stride, offset = 5, row_elems + gap, 3
    rng = np.random.default_rng(row_elems)
    wide = np.full(offset + rows * stride + 16, np.nan, np.float32)
    for row in range(rows):
        begin = offset + row * stride
        wide[begin : begin + row_elems] = rng.standard_normal(row_elems)
    places = {0, row_elems - 1, min(4095, row_elems - 1), min(4096, row_elems - 1), row_elems // 2}
    for row, at in ((row, at) for row in (0, 3, rows - 1) for at in places):
        peaked = wide.copy()
        peaked[offset + row * stride + at] = -55.0
        device, out = rig.upload(peaked.astype(ml_dtypes.bfloat16)), rig.gpu.zeros(1, np.float32)
        address = rig.gpu.pointer(device) + 2 * offset
        kernel = rig.kernel("bf16_absmax", "bf16_absmax_rows")
        ops.bf16_absmax_rows(rig.gpu, kernel, address, out, rows, row_elems, stride, rig.stream)
        assert rig.download(out)[0] == 55.0


def test_special_values(rig: Rig) -> None:
    assert _absmax(rig, np.zeros(0, np.float32)) == 0.0
    assert _absmax(rig, np.full(50, -0.0, np.float32)) == 0.0
    assert _absmax(rig, np.array([1.0, -np.inf], np.float32)) == np.inf
    assert np.isnan(_absmax(rig, np.array([np.inf, np.nan, 3.0], np.float32)))
    assert np.isnan(_absmax(rig, np.array([2.0, -np.nan], np.float32)))


def test_accumulates(rig: Rig) -> None:
    assert _absmax(rig, np.array([0.5], np.float32), start=8.0) == 8.0
    assert _absmax(rig, np.array([8.0], np.float32), start=0.5) == 8.0
    assert np.isnan(_absmax(rig, np.array([8.0], np.float32), start=float("nan")))
    above = np.float32(1 + 2.0**-7)  # the next BF16 number after 1
    for count in (1, 8, 513):
        assert _absmax(rig, np.full(count, above), start=1.0) == above
        assert _absmax(rig, np.full(count, 1.0, np.float32), start=float(above)) == above


def test_calibration_reads_rows_and_not_their_gaps(rig: Rig) -> None:
    rows = np.full((5, 48), 1e30, np.float32)
    rows[1::2] = np.nan
    rows[:, :32] = np.random.default_rng(1).standard_normal((5, 32))
    rows[3, 31] = -9.0
    calibration = Fp8Calibration(rig.gpu)
    calibration.reset(rig.stream)
    assert calibration.scale() == 1.0
    calibration.update(rig.upload(rows.astype(ml_dtypes.bfloat16)), 5, 32, 48, rig.stream)
    assert calibration.scale() == 9.0 / 448.0
    more = rig.upload(np.full((1, 8), 18.0, np.float32).astype(ml_dtypes.bfloat16))
    calibration.update(more, 1, 8, 8, rig.stream)
    assert calibration.scale() == 18.0 / 448.0
    calibration.reset(rig.stream)
    calibration.update(rig.upload(rows[:1].astype(ml_dtypes.bfloat16)), 0, 32, 48, rig.stream)
    assert calibration.scale() == 1.0
