"""A raw device address that knows how many bytes it stands for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError


@dataclass(frozen=True)
class DevicePtr:
    """An address on a device, as an argument for `KernelLaunch.arg_ptr`.

    Attributes:
        address: the address; 0 is the null pointer.
        nbytes: size of what it points to, or None if unknown. The emulator's check mode uses it.
    """

    address: int
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.address, bool) or not isinstance(self.address, int):
            raise ArgumentTypeError(f"address: got {type(self.address).__name__}, allowed is int")
        if not 0 <= self.address < 1 << 64:
            raise ArgumentValueError(f"address: got {self.address}, allowed is 0 to 2^64 - 1")
        if self.nbytes is not None:
            object.__setattr__(self, "nbytes", _integer("nbytes", self.nbytes))
            if self.nbytes < 0:
                raise ArgumentValueError(f"nbytes: got {self.nbytes}, allowed is 0 or more")

    def __index__(self) -> int:
        return self.address

    def __add__(self, offset: int) -> DevicePtr:
        """The address `offset` bytes further on."""
        offset = _integer("offset", offset)
        left = None if self.nbytes is None else self.nbytes - offset
        if left is not None and left < 0:
            raise ArgumentValueError(
                f"offset: got {offset}, allowed is at most the {self.nbytes} bytes it points to"
            )
        return DevicePtr(self.address + offset, left)


def is_null(pointer: Any) -> bool:
    """Whether it is address 0, in whatever form; an array never is."""
    return isinstance(pointer, (int, np.integer, DevicePtr)) and operator.index(pointer) == 0


def _integer(name: str, value: Any) -> int:
    """As an int: NumPy's integers overflow in sums."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed is an integer") from None


def views(
    pointers: Sequence[Any], array: type, look: Callable[[Any], tuple[Any, ...]]
) -> tuple[Any, ...] | None:
    """What `GpuBackend.views` returns.

    Args:
        pointers: of a call.
        array: type of the backend's own arrays.
        look: an array's address, then all else that checks look at.
    """
    found: list[Any] = []
    for pointer in pointers:
        kind: Any = type(pointer)
        if kind is array:
            found.append(look(pointer))
        elif kind is int or pointer is None:
            found.append(pointer)
        elif kind is DevicePtr:
            found.append((pointer.address, kind, pointer.nbytes))
        else:
            return None
    return tuple(found)
