"""What a checked launch tells the runtime about its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupaged.backends.emulator.memory import DeviceMemory
from cupaged.errors import ArgumentValueError
from cupaged.handle import ParameterLayout
from cupaged.pointers import DevicePtr
from cupaged.source import KernelSource, Parameter


class _BufferRange(ctypes.Structure):
    """BufferRange in runtime/check/session.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int64),
    )


class _Setup(ctypes.Structure):
    """Setup in runtime/check/session.h."""

    _fields_ = (
        ("buffers", ctypes.POINTER(_BufferRange)),
        ("num_buffers", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64),
        ("parameter_bytes", ctypes.c_uint64),
        ("parameter_pointers", ctypes.c_uint64),
        ("parameter_pointer_bytes", ctypes.c_uint64),
    )


def setup_of(
    source: KernelSource, params: int, arguments: Mapping[int, Any], memory: DeviceMemory
) -> ctypes.Structure:
    """The memory that a launch's pointers stand for.

    Args:
        source: the kernel.
        params: address of an array of pointers to the packed parameters.
        arguments: parameter position -> object given for a pointer.
        memory: knows the allocations that bare addresses may lie in.

    Raises:
        ArgumentValueError: a bare address that lies in no allocation of the backend.
    """
    count = len(source.parameters)
    if count == 0:
        return _Setup()
    pointers = (ctypes.c_uint64 * count).from_address(params)
    ranges = []
    for position, parameter in enumerate(source.parameters):
        if parameter.kind != "ptr":
            continue
        address = ctypes.c_uint64.from_address(pointers[position]).value
        extent = _extent(parameter, address, arguments.get(position), memory)
        if extent is not None:
            ranges.append(_BufferRange(*extent, parameter.name.encode(), not parameter.const))
    buffers = (_BufferRange * max(1, len(ranges)))(*ranges)
    packed_bytes = ParameterLayout(source.parameters).size
    return _Setup(buffers, len(ranges), pointers[0], packed_bytes, params, 8 * count)


def _extent(parameter: Parameter, address: int, given: Any, memory: DeviceMemory) -> tuple[int, int] | None:
    """Address and bytes; None where there is nothing to reach."""
    if isinstance(given, np.ndarray):
        return _array_extent(given)
    if isinstance(given, DevicePtr) and given.nbytes is not None:
        return (address, given.nbytes) if given.nbytes else None
    if address == 0:
        return None
    for first, size in memory.ranges():
        # An empty allocation has an address too, and nothing behind it.
        if first <= address < first + max(1, size):
            return (first, size) if size else None
    raise ArgumentValueError(
        f"{parameter.name}: got the address {address:#x}, which lies in no buffer that this backend made; "
        "check mode needs to know what a pointer stands for: pass the array, or DevicePtr(address, nbytes)"
    )


def _array_extent(array: np.ndarray) -> tuple[int, int] | None:
    """From the lowest to the highest byte of any element."""
    if array.size == 0:
        return None
    low = high = array.ctypes.data
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        low, high = low + min(0, reach), high + max(0, reach)
    return low, high - low + array.itemsize
