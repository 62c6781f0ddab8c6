"""BF16: the upper half of a float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

_FLOATS = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def as_float32(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Values of any shape as float32, before any quantisation.

    Args:
        name: what an error calls the argument.
        values: bfloat16, float16, float32 or float64 (rounded to nearest even), or uint16, which
            holds BF16 bit patterns.

    Raises:
        ArgumentTypeError: any other dtype.
    """
    array = np.asarray(values)
    if array.dtype == np.uint16:
        return decode_bf16(array)
    if array.dtype not in _FLOATS:
        raise ArgumentTypeError(
            f"{name}: got dtype {array.dtype}, allowed are bfloat16, float16, float32, float64 "
            "and uint16 (BF16 bit patterns)"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32)


def encode_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """BF16 bit patterns of values of any shape.

    Values that are BF16 already (bfloat16, or uint16 patterns) keep their bits, NaN payloads too.
    All others are rounded to float32, then to nearest even; a NaN becomes 0x7FC0 or 0xFFC0.
    """
    array = np.asarray(values)
    if array.dtype == BFLOAT16 or array.dtype == np.uint16:
        bits: npt.NDArray[np.uint16] = array.view(np.uint16).copy()
        return bits
    wide = as_float32("values", array)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.astype(BFLOAT16).view(np.uint16)


def decode_bf16(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Float32 values of BF16 bit patterns (uint16 or bfloat16) of any shape; exact.

    Raises:
        ArgumentTypeError: neither uint16 nor bfloat16.
    """
    array = np.asarray(bits)
    if array.dtype != np.uint16 and array.dtype != BFLOAT16:
        raise ArgumentTypeError(f"bits: got dtype {array.dtype}, allowed are uint16 and bfloat16")
    wide = array.view(np.uint16).astype(np.uint32)
    values: npt.NDArray[np.float32] = (wide << np.uint32(16)).view(np.float32)
    return values
