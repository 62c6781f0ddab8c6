"""FP8 E4M3: bias 7, largest finite 448, no infinity, NaN 0x7F and 0xFF."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats.bf16 import BFLOAT16, as_float32

E4M3_MAX = 448.0

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_NAN_CODE = 0x7F


def encode_e4m3(values: npt.ArrayLike, scale: object = 1.0) -> npt.NDArray[np.uint8]:
    """E4M3 codes of ``values / scale``, any shape.

    The quotient is a correctly rounded float32 and is then rounded to nearest even. It saturates at
    +-448, infinities too. A NaN becomes 0x7F or 0xFF and keeps the sign of the value.

    Args:
        values: see `as_float32`.
        scale: dequantisation scale, finite and > 0: one, or an array that broadcasts against the values.

    Raises:
        ArgumentTypeError: a dtype that is not allowed.
        ArgumentValueError: a scale that is not allowed.
    """
    divisor = checked_scales("scale", scale)
    wide = as_float32("values", values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        quotient = wide / divisor
        # The bare cast gives NaN from 465 up, so it must never see a value above 448.
        codes = np.clip(quotient, -E4M3_MAX, E4M3_MAX).astype(_E4M3).view(np.uint8)
    # The sign of a NaN after a division is the processor's choice: take it from the input.
    sign = np.signbit(wide).astype(np.uint8) << np.uint8(7)
    result: npt.NDArray[np.uint8] = np.where(np.isnan(wide), sign | np.uint8(_NAN_CODE), codes).astype(
        np.uint8
    )
    return result


def decode_e4m3(codes: npt.ArrayLike, scale: object = 1.0) -> npt.NDArray[np.float32]:
    """Float32 values of E4M3 codes (uint8 or float8_e4m3fn) of any shape, times ``scale``.

    The scale is one, or an array that broadcasts against the codes. Exact where
    ``scale`` is 1 or a power of two; otherwise one float32 rounding.
    """
    array = np.asarray(codes)
    if array.dtype != np.uint8 and array.dtype != _E4M3:
        raise ArgumentTypeError(f"codes: got dtype {array.dtype}, allowed are uint8 and float8_e4m3fn")
    factor = checked_scales("scale", scale)
    with np.errstate(over="ignore", under="ignore"):
        product: npt.NDArray[np.float32] = array.view(_E4M3).astype(np.float32) * factor
    return product


def checked_scale(name: str, value: object) -> float:
    """A dequantisation scale as the float that its float32 rounding is.

    Args:
        name: what an error calls the argument.
        value: int, float, NumPy real scalar or 0-d NumPy array.

    Raises:
        ArgumentTypeError: not a real number on the host (a bool is none; nor is a device array, whose
            value could not be read without a synchronisation).
        ArgumentValueError: not finite and > 0 after rounding to float32.
    """
    number = _real_number(name, value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    if not (math.isfinite(rounded) and rounded > 0.0):
        raise ArgumentValueError(
            f"{name}: got {number!r}, which is {rounded!r} as float32; allowed is finite and > 0 as float32"
        )
    return rounded


def checked_scales(name: str, value: object) -> npt.NDArray[np.float32]:
    """One dequantisation scale or a host array of them, as float32.

    Raises:
        ArgumentTypeError, ArgumentValueError: as `checked_scale`, of every element.
    """
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return np.array(checked_scale(name, value), np.float32)
    if value.dtype.kind not in "fiu" and value.dtype != BFLOAT16:
        raise ArgumentTypeError(f"{name}: got dtype {value.dtype}, allowed are real numbers")
    with np.errstate(over="ignore", under="ignore"):
        rounded: npt.NDArray[np.float32] = value.astype(np.float32)
    wrong = ~(np.isfinite(rounded) & (rounded > 0.0))
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ArgumentValueError(
            f"{name}[{', '.join(map(str, at))}]: got {value[at]!r}, allowed is finite and > 0 as float32"
        )
    return rounded


def _real_number(name: str, value: object) -> float:
    if isinstance(value, np.ndarray | np.generic):
        is_real = value.dtype.kind in "fiu" or value.dtype == BFLOAT16
        if is_real and value.shape == ():
            return float(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    raise ArgumentTypeError(
        f"{name}: got {value!r} of type {type(value).__name__}, "
        "allowed are a real number and a 0-d NumPy array of one"
    )
