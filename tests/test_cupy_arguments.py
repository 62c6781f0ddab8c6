"""What the GPU backend takes for pointers and streams, with stand-ins for CuPy's own types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import DevicePtr
from cupaged.backends.cupy import CupyBackend, _bits_dtype
from cupaged.errors import ArgumentTypeError, ArgumentValueError


class CupyArray:
    def __init__(self, address: int, device: int = 0) -> None:
        self.data = SimpleNamespace(ptr=address, device_id=device)


class Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class ExternalStream(Stream):
    """CuPy's own is no subclass of its Stream in all versions; either is taken."""


class OtherLibrarysArray:
    """Numba's, PyTorch's or JAX's."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (1,),
            "typestr": "<f4",
            "version": 3,
        }


class UnknownPointerError(RuntimeError):
    """CuPy's CUDARuntimeError."""


HOST, DEVICE, MANAGED = 1, 2, 3  # cudaMemoryType
MEMORY = {4096: (DEVICE, 0), 8192: (DEVICE, 1), 12288: (MANAGED, 1), 16384: (HOST, 1)}


def attributes(address: int) -> Any:
    """What the runtime says of an address."""
    if address not in MEMORY:
        raise UnknownPointerError("cudaErrorInvalidValue")
    kind, device = MEMORY[address]
    return SimpleNamespace(type=kind, device=device)


class ProtocolStream:
    """A stream by the protocol: (version, handle)."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@pytest.fixture
def gpu() -> Any:
    """A backend that was never given a device."""
    backend = object.__new__(CupyBackend)
    cuda = SimpleNamespace(Stream=Stream, ExternalStream=ExternalStream)
    backend._cupy = SimpleNamespace(ndarray=CupyArray, cuda=cuda)
    backend._runtime = SimpleNamespace(pointerGetAttributes=attributes, CUDARuntimeError=UnknownPointerError)
    backend.device = 0
    return backend


def test_pointers(gpu: Any) -> None:
    for value in (
        CupyArray(4096),
        OtherLibrarysArray(4096),
        DevicePtr(4096),
        np.uint64(4096),
        np.int64(4096),
    ):
        address = gpu.pointer(value)
        assert address == 4096
        assert type(address) is int


def test_arrays_of_another_device_are_refused(gpu: Any) -> None:
    for array in (CupyArray(8192, device=1), OtherLibrarysArray(8192)):
        with pytest.raises(
            ArgumentValueError, match=f"got a {type(array).__name__} on device 1, .* device, 0; copy"
        ):
            gpu.pointer(array)
    gpu.device = 1
    assert gpu.pointer(CupyArray(8192, device=1)) == gpu.pointer(OtherLibrarysArray(8192)) == 8192


def test_memory_that_every_device_reaches_is_taken(gpu: Any) -> None:
    for address in (12288, 16384, 20480, 0):  # managed, pinned, one the runtime does not know, null
        assert gpu.pointer(OtherLibrarysArray(address)) == address
    assert gpu.pointer(CupyArray(0, device=1)) == 0  # an empty array


@pytest.mark.parametrize("bad", [None, "4096", 4096.0, True, [4096], np.zeros(4), object()])
def test_other_objects_are_no_pointers(gpu: Any, bad: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=f"pointer: got {type(bad).__name__}.* allowed are an array .*, an int"
    ):
        gpu.pointer(bad)


def test_a_host_array_is_told_what_to_do(gpu: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"got ndarray \(a host array: copy it with gpu\.asarray\)"):
        gpu.pointer(np.zeros(4, np.float32))


def test_streams(gpu: Any) -> None:
    assert [gpu.stream_handle(handle) for handle in (0, 1, np.int64(2), 2**47)] == [0, 1, 2, 2**47]
    for stream in (Stream(77), ExternalStream(77), ProtocolStream(77)):
        assert gpu.stream_handle(stream) == 77
    attribute = SimpleNamespace(__cuda_stream__=(0, 78))
    assert gpu.stream_handle(attribute) == 78
    assert gpu.null_stream() == 0


def test_a_stream_is_always_given(gpu: Any) -> None:
    for bad in (None, True, False, "0", 0.0, object()):
        with pytest.raises(ArgumentTypeError, match=f"stream: got {type(bad).__name__}, allowed: int handle"):
            gpu.stream_handle(bad)
    for number in (-1, np.int64(-1), 2**64):
        with pytest.raises(ArgumentValueError, match=f"stream: got {number}, a handle is 0 to"):
            gpu.stream_handle(number)
    for given in (5, (0,), (0, "x"), (0, 1.5), (0, 1, 2)):
        with pytest.raises(ArgumentTypeError, match=r"^stream: got .* whose __cuda_stream__ gives"):
            gpu.stream_handle(SimpleNamespace(__cuda_stream__=given))


def test_dtypes_that_cupy_lacks_become_bits() -> None:
    for dtype, bits in (
        (ml_dtypes.bfloat16, "uint16"),
        (ml_dtypes.float8_e4m3fn, "uint8"),
        (ml_dtypes.float4_e2m1fn, "uint8"),
        ("float32", "float32"),
        ("float16", "float16"),
        ("int64", "int64"),
        ("uint8", "uint8"),
    ):
        assert _bits_dtype(dtype) == np.dtype(bits)
