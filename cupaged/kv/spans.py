"""Which memory an array covers, and whether two share some. Nothing here synchronises."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import ArgumentValueError
from cupaged.pointers import DevicePtr


def span_of(gpu: Any, array: Any) -> tuple[int, int]:
    """First address, and that behind the last byte of any element.

    Args:
        gpu: the backend.
        array: of the backend, or a `DevicePtr`; nothing is known of where an address or a pointer ends.
    """
    if isinstance(array, (int, np.integer)):
        return int(array), int(array)
    begin = int(gpu.pointer(array))
    if isinstance(array, DevicePtr):
        return begin, begin + (array.nbytes or 0)
    if array.size == 0:
        return begin, begin
    if array.strides is None:
        return begin, begin + int(array.nbytes)
    steps = list(zip(array.shape, array.strides, strict=True))
    low = sum((length - 1) * step for length, step in steps if step < 0)
    high = sum((length - 1) * step for length, step in steps if step > 0)
    return begin + low, begin + high + int(array.dtype.itemsize)


def check_apart(name: str, written: tuple[int, int], other_name: str, other: tuple[int, int]) -> None:
    """Raise ArgumentValueError where memory that is written is shared with another argument's."""
    if max(written[0], other[0]) < min(written[1], other[1]):
        raise ArgumentValueError(
            f"{name}: its memory, {written[0]:#x} to {written[1]:#x}, is shared with {other_name}, "
            f"{other[0]:#x} to {other[1]:#x}"
        )
