"""Slow scalar encoders: exact fractions over a table of all codes, nothing of cupaged or ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tests.oracle import E2M1_TABLE, E4M3_TABLE

# (magnitude, code) of the non-negative finite codes, ascending; the code order is the magnitude order.
_E4M3 = [(Fraction(float(E4M3_TABLE[code])), code) for code in range(0x7F)]
_E2M1 = [(Fraction(float(E2M1_TABLE[code])), code) for code in range(8)]


def _nearest_even(magnitude: Fraction, table: Sequence[tuple[Fraction, int]]) -> int:
    """Code of the nearest magnitude; of two equally near ones the even code; saturates."""
    if magnitude >= table[-1][0]:
        return table[-1][1]
    return min(table, key=lambda entry: (abs(entry[0] - magnitude), entry[1] % 2))[1]


def _encode(x: float, table: Sequence[tuple[Fraction, int]], sign_bit: int) -> int:
    sign = sign_bit if math.copysign(1.0, x) < 0 else 0
    magnitude = Fraction(10**9) if math.isinf(x) else Fraction(abs(x))
    return sign | _nearest_even(magnitude, table)


def divide_float32(x: float, y: float) -> float:
    """Correctly rounded float32 quotient of two float32 values."""
    with np.errstate(all="ignore"):
        return float(np.float32(x) / np.float32(y))


def slow_e4m3(x: float, scale: float) -> int:
    if math.isnan(x):
        return 0xFF if math.copysign(1.0, x) < 0 else 0x7F
    return _encode(divide_float32(x, scale), _E4M3, 0x80)


def slow_e2m1(x: float) -> int:
    return _encode(x, _E2M1, 0x8)


def slow_nvfp4_group(values: Sequence[float]) -> tuple[list[int], int]:
    """Codes and scale byte of one group of 16 float32 values."""
    if any(math.isnan(x) for x in values):
        return [0] * 16, 0x7F
    scale_code = slow_e4m3(max(abs(x) for x in values), 6.0)
    scale = float(E4M3_TABLE[scale_code])
    if scale == 0:
        return [0] * 16, scale_code
    return [slow_e2m1(divide_float32(x, scale)) for x in values], scale_code
