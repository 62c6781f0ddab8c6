"""Reads DLPack capsules, the narrow types among them, which NumPy's own reader refuses.

Layouts of the structs: DLPack 1.1 (``dlpack.h``); capsules of before 1.0 are read too.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupaged.errors import ArgumentTypeError

CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
CUDA_MANAGED = 13  # kDLCUDAManaged

_NEWEST = (1, 1)
_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags

# (type code, bits, lanes) -> dtype. Two E2M1 values that share a byte are that byte.
_DTYPES: dict[tuple[int, int, int], np.dtype[Any]] = {
    **{(0, bits, 1): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits, 1): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits, 1): np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    (4, 16, 1): np.dtype(ml_dtypes.bfloat16),
    (10, 8, 1): np.dtype(ml_dtypes.float8_e4m3fn),
    (17, 4, 2): np.dtype(np.uint8),
}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_is_valid = _api.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_get_pointer = _api.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_set_name = _api.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


class _Owner:
    """Keeps the producer's memory; gives it back when it goes."""

    def __init__(self, managed: int, deleter: int | None) -> None:
        if deleter:
            weakref.finalize(self, _DELETER(deleter), managed).atexit = False


@dataclass(frozen=True)
class DLTensor:
    """Memory that another library lent.

    Attributes:
        address: of the first element; 0 where there is none.
        shape: elements along each axis.
        strides: bytes between elements along each axis.
        dtype: NumPy's or ml_dtypes'.
        read_only: whether it must not be written.
        owner: holds the memory for as long as it lives.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    read_only: bool
    owner: object


def is_producer(value: Any) -> bool:
    """Whether an object lends its memory by DLPack."""
    return hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")


def device_of(producer: Any) -> tuple[int, int]:
    """Type and ordinal of the device that a producer's memory is on.

    Raises:
        ArgumentTypeError: it does not say so.
    """
    try:
        kind, index = producer.__dlpack_device__()
        return operator.index(kind), operator.index(index)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"array: got a {type(producer).__name__} whose __dlpack_device__ gives no pair of integers"
        ) from None


def borrow(producer: Any, stream: int | None) -> DLTensor:
    """What a producer lends.

    Args:
        producer: see `is_producer`.
        stream: what its ``__dlpack__`` takes: 1 is the legacy default stream, 2 the per-thread one, larger
            ones are handles; work that the producer queued comes before what is queued on it next. None for
            memory of the CPU.

    Raises:
        ArgumentTypeError: no memory is lent, or elements of a type that nothing here takes.
    """
    try:
        try:
            capsule = producer.__dlpack__(stream=stream, max_version=_NEWEST)
        except TypeError:  # a producer of before 1.0 knows no max_version
            capsule = producer.__dlpack__(stream=stream)
    except BufferError as error:  # how the protocol says that there is nothing to lend
        raise ArgumentTypeError(
            f"array: got a {type(producer).__name__} that does not lend its memory: {error}"
        ) from error
    if _is_valid(capsule, b"dltensor_versioned"):
        address = _get_pointer(capsule, b"dltensor_versioned")
        versioned = _ManagedVersioned.from_address(address)
        if versioned.major > _NEWEST[0]:
            raise ArgumentTypeError(
                f"array: got DLPack {versioned.major}.{versioned.minor}, allowed are versions up to "
                f"{_NEWEST[0]} (a {type(producer).__name__} lends it)"
            )
        _set_name(capsule, b"used_dltensor_versioned")
        owner = _Owner(address, versioned.deleter)
        return _described(producer, versioned.tensor, owner, bool(versioned.flags & _READ_ONLY))
    if not _is_valid(capsule, b"dltensor"):
        raise ArgumentTypeError(
            f"array: got a {type(producer).__name__} whose __dlpack__ gives {capsule!r}, allowed is a "
            "capsule that nobody has taken"
        )
    address = _get_pointer(capsule, b"dltensor")
    managed = _Managed.from_address(address)
    _set_name(capsule, b"used_dltensor")
    return _described(producer, managed.tensor, _Owner(address, managed.deleter), read_only=False)


def _described(producer: Any, tensor: _Tensor, owner: object, read_only: bool) -> DLTensor:
    dtype = _DTYPES.get((tensor.code, tensor.bits, tensor.lanes))
    if dtype is None:
        raise ArgumentTypeError(
            f"array: got a {type(producer).__name__} with elements of DLPack type code {tensor.code} with "
            f"{tensor.bits} bits and {tensor.lanes} lanes; allowed are integers, floats, bfloat16, "
            "float8_e4m3fn and pairs of float4_e2m1fn"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    else:
        strides = _contiguous(shape, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    return DLTensor(address, shape, strides, dtype, read_only, owner)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
