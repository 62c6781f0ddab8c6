"""float32 to BF16 bit patterns and back, for NumPy and CuPy arrays alike."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np


def to_bf16(values: Any) -> Any:
    """BF16 bit patterns (uint16, same shape, contiguous) of a float32 array, rounded to nearest even."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values.astype(ml_dtypes.bfloat16)).view(np.uint16)
    rounder, contiguous = _cupy_rounder()
    return rounder(contiguous(values))


def from_bf16(bits: Any) -> Any:
    """float32 values of a contiguous uint16 array of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def _cupy_rounder() -> tuple[Any, Any]:
    import cupy

    # One launch instead of the five that array arithmetic on the bits would take. Adding 0x7FFF and the
    # lowest kept bit rounds to nearest even; a NaN is kept one by setting its highest fraction bit.
    rounder = cupy.ElementwiseKernel(
        "float32 value",
        "uint16 bits",
        """
        unsigned int u = __float_as_uint(value);
        unsigned int rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
        unsigned int quiet = (u >> 16) | 0x40u;
        bits = (unsigned short)((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
        """,
        "float32_to_bf16_bits",
    )
    return rounder, cupy.ascontiguousarray
