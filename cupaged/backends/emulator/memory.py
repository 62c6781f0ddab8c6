"""Emulated device memory: NumPy arrays, and which of them the backend made."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged import pointers
from cupaged.backends.streams import handle_of
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.pointers import DevicePtr

ALIGNMENT = 256  # bytes, as the CUDA driver's allocations
_FORGET_FROM = 1024
POISON_BYTE = 0xFF  # reads as NaN in every float format the kernels use


class DeviceMemory:
    """Allocates arrays, and knows the address ranges of those that are still in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}  # address -> owner, bytes
        self._most = _FORGET_FROM  # entries from which on those without an owner are dropped

    def allocate(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, fill: int) -> np.ndarray:
        """An array with every byte set to `fill`, aligned to `ALIGNMENT` bytes."""
        kind = np.dtype(dtype)
        dims = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        if any(n < 0 for n in dims):
            raise ArgumentValueError(f"shape: got {dims}, no dimension may be negative")
        num_bytes = int(np.prod(dims, dtype=object)) * kind.itemsize
        owner = np.full(num_bytes + ALIGNMENT, fill, dtype=np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        self._remember(owner, owner.ctypes.data + start, num_bytes)
        return owner[start : start + num_bytes].view(kind).reshape(dims)

    def copy_of(self, host: npt.ArrayLike) -> np.ndarray:
        """A copy of an array, in C order and of the same dtype."""
        given = np.asarray(host)
        if given.dtype.hasobject:
            raise ArgumentTypeError(f"host: got dtype {given.dtype}, allowed are numbers")
        copy = self.allocate(given.shape, given.dtype, POISON_BYTE)
        copy[...] = given
        return copy

    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of every allocation that something still refers to."""
        with self._lock:
            return [(address, size) for address, (owner, size) in self._ranges.items() if owner() is not None]

    def _remember(self, owner: np.ndarray, address: int, num_bytes: int) -> None:
        # All views of an allocation keep its owner alive, so that is what tells whether it is in use. A
        # callback at its end could not take the lock: the garbage collector may call it while this thread
        # holds it.
        with self._lock:
            self._ranges[address] = (weakref.ref(owner), num_bytes)
            if len(self._ranges) >= self._most:
                self._ranges = {at: kept for at, kept in self._ranges.items() if kept[0]() is not None}
                self._most = max(_FORGET_FROM, 2 * len(self._ranges))


def pointer(value: Any) -> int:
    """Address of a NumPy array, a `DevicePtr` or a NumPy integer.

    Raises:
        ArgumentTypeError: anything else, with the reason for arrays of a real GPU.
    """
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, DevicePtr):
        return value.address
    if isinstance(value, np.integer):
        return int(value)
    if hasattr(value, "__cuda_array_interface__"):
        raise ArgumentTypeError(
            f"pointer: got {type(value).__name__}, which lives in the memory of a GPU, where the emulator "
            "cannot reach it; copy it to the host and then with gpu.asarray, or use CupyBackend"
        )
    raise ArgumentTypeError(
        f"pointer: got {type(value).__name__}, allowed are an array (gpu.asarray makes one), DevicePtr, an "
        "int address"
    )


def views(given: Sequence[Any]) -> tuple[Any, ...] | None:
    """See `GpuBackend.views`."""
    return pointers.views(given, np.ndarray, _look)


def _look(array: np.ndarray) -> tuple[Any, ...]:
    return array.ctypes.data, array.dtype, array.shape, array.strides


def stream_handle(stream: Any) -> int:
    """Handle of an int, of an object with ``__cuda_stream__``, or of one with ``ptr``."""
    allowed = "int handle, object with __cuda_stream__ or ptr"
    return handle_of(stream, allowed, getattr(stream, "ptr", None))


def fill(address: int, value: int, num_bytes: int) -> None:
    """Set bytes of memory."""
    if num_bytes:
        ctypes.memset(address, value, num_bytes)
