"""DLPack capsules of both generations, made here from the structs, read without a library that made them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import DevicePtr, dlpack
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.interop import backend_array, device_array, is_lent, named_array
from tests.fake_backend import FakeBackend

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

CODES = {
    "int8": (0, 8, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "bfloat16": (4, 16, 1),
    "float8_e4m3fn": (10, 8, 1),
}


class Producer:
    """Lends a NumPy array with structs written by hand.

    Attributes:
        streams: what each call was given.
        returned: capsules that were given back.
    """

    def __init__(
        self,
        array: npt.NDArray[Any],
        *,
        versioned: bool = True,
        read_only: bool = False,
        device: tuple[int, int] = (1, 0),
        code: tuple[int, int, int] | None = None,
        compact: bool = False,
        byte_offset: int = 0,
        major: int = 1,
    ) -> None:
        self.array, self.device, self.versioned = array, device, versioned
        self.streams: list[Any] = []
        self.returned = 0
        self.major, self.read_only = major, read_only
        self._deleter = _DELETER(self._give_back)
        sizes = ctypes.c_int64 * array.ndim
        self._shape = sizes(*array.shape)
        self._strides = sizes(*(step // array.itemsize for step in array.strides))
        type_code, bits, lanes = code or CODES[array.dtype.name]
        tensor = dlpack._Tensor(
            array.ctypes.data - byte_offset, device[0], device[1], array.ndim, type_code, bits, lanes,
            self._shape, None if compact else self._strides, byte_offset,
        )  # fmt: skip
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        self._managed: Any = (
            dlpack._ManagedVersioned(major, 0, None, deleter, int(read_only), tensor)
            if versioned
            else dlpack._Managed(tensor, None, deleter)
        )

    def _give_back(self, _: int) -> None:
        self.returned += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **newer: Any) -> Any:
        if not self.versioned and newer:
            raise TypeError("unexpected keyword argument 'max_version'")
        assert not newer or newer["max_version"] >= (1, 0)
        self.streams.append(stream)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new_capsule(ctypes.addressof(self._managed), name, None)


generations = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "legacy"])


@generations
@pytest.mark.parametrize("name", CODES)
def test_every_type_that_is_taken(versioned: bool, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    producer = Producer(array, versioned=versioned)
    got = device_array(FakeBackend(), producer, 0)
    assert got.dtype == dtype
    assert got.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8))
    assert producer.streams == [None]


@generations
def test_memory_is_given_back_once_when_the_last_view_goes(versioned: bool) -> None:
    producer = Producer(np.arange(6, dtype=np.int32), versioned=versioned)
    got = device_array(FakeBackend(), producer, 0)
    view = got[2:]
    del got
    gc.collect()
    assert producer.returned == 0
    assert view.tolist() == [2, 3, 4, 5]
    del view
    gc.collect()
    assert producer.returned == 1


@generations
def test_strides_and_offsets(versioned: bool) -> None:
    wide = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for array in (wide[:, 1:3], wide[:, :, ::2], wide.transpose(2, 0, 1), wide[::-1], wide[:, :1]):
        got = device_array(FakeBackend(), Producer(array, versioned=versioned, byte_offset=8), 0)
        np.testing.assert_array_equal(got, array)
        assert got.strides == array.strides
    got = device_array(FakeBackend(), Producer(wide, versioned=versioned, compact=True), 0)
    np.testing.assert_array_equal(got, wide)
    empty = device_array(FakeBackend(), Producer(wide[:0], versioned=versioned), 0)
    assert empty.shape == (0, 4, 5)


def test_what_must_not_be_written() -> None:
    array = np.arange(4, dtype=np.float32)
    got = device_array(FakeBackend(), Producer(array, read_only=True), 0)
    assert not got.flags.writeable
    device_array(FakeBackend(), Producer(array), 0, writable=True)[0] = 5
    assert array[0] == 5
    with pytest.raises(ArgumentValueError, match="array: got a Producer that must not be written"):
        device_array(FakeBackend(), Producer(array, read_only=True), 0, writable=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a: Producer(a, code=(5, 64, 1)), "type code 5 with 64 bits and 1 lanes; allowed are"),
        (lambda a: Producer(a, code=(2, 32, 4)), "type code 2 with 32 bits and 4 lanes"),
        (lambda a: Producer(a, code=(17, 4, 1)), "type code 17 with 4 bits and 1 lanes"),
        (lambda a: Producer(a, major=2), r"got DLPack 2\.0, allowed are versions up to 1"),
        (lambda a: Producer(a, device=(2, 0)), "a Producer in the memory of a GPU, where the fake backend"),
    ],
)
def test_what_is_refused(make: Callable[[Any], Producer], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        device_array(FakeBackend(), make(np.arange(4, dtype=np.float32)), 0)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        *(("__dlpack__", x, "whose __dlpack__ gives .*, allowed is a capsule") for x in (None, 5, "x")),
        *(("__dlpack_device__", x, "gives no pair of integers") for x in (None, (1,), ("cpu", 0))),
    ],
)
def test_producers_that_break_the_protocol(
    monkeypatch: pytest.MonkeyPatch, method: str, given: Any, message: str
) -> None:
    monkeypatch.setattr(Producer, method, lambda self, **_: given)
    with pytest.raises(ArgumentTypeError, match=f"^q: got a Producer .*{message}"):
        named_array(FakeBackend(), "q", Producer(np.arange(4, dtype=np.float32)), 0)


def test_a_capsule_that_was_taken_and_memory_that_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(np.arange(4, dtype=np.float32))
    taken = producer.__dlpack__(stream=None)
    monkeypatch.setattr(Producer, "__dlpack__", lambda self, **_: taken)
    assert device_array(FakeBackend(), producer, 0).tolist() == [0, 1, 2, 3]
    with pytest.raises(ArgumentTypeError, match="allowed is a capsule that nobody has taken"):
        device_array(FakeBackend(), producer, 0)

    def refuse(*_: Any, **__: Any) -> None:
        raise BufferError("it needs a gradient")

    monkeypatch.setattr(Producer, "__dlpack__", refuse)
    with pytest.raises(ArgumentTypeError, match="that does not lend its memory: it needs a gradient"):
        device_array(FakeBackend(), producer, 0)


@pytest.mark.parametrize("wrong", [{"code": (5, 64, 1)}, {"major": 2}, {"device": (2, 0)}])
def test_what_is_refused_is_named(wrong: dict[str, Any]) -> None:
    producer = Producer(np.arange(4, dtype=np.float32), **wrong)
    with pytest.raises(ArgumentTypeError, match=r"^sinks: got ") as caught:
        named_array(FakeBackend(), "sinks", producer, 0)
    assert caught.value.argument == "sinks"


def test_pairs_of_e2m1_values_are_bytes() -> None:
    array = np.arange(4, dtype=np.uint8)
    got = device_array(FakeBackend(), Producer(array, code=(17, 4, 2)), 0)
    assert got.dtype == np.uint8
    assert got.tolist() == [0, 1, 2, 3]


def test_the_backends_own_objects_come_back_as_they_are() -> None:
    gpu = FakeBackend()
    for value in (4096, np.uint64(4096), np.zeros(3)):
        assert device_array(gpu, value, 0) is value


def test_what_an_instance_lends() -> None:
    """Some libraries put the interface on each array instead of on its type; an address lends nothing."""
    assert is_lent(SimpleNamespace(__cuda_array_interface__={"data": (4096, False)}))
    assert not any(is_lent(value) for value in (4096, DevicePtr(4096), None, SimpleNamespace()))


def test_arrays_of_numpy_that_must_not_be_written() -> None:
    """NumPy's own arrays too, under the argument's name."""
    array = np.zeros(4)
    gpu = FakeBackend()
    assert named_array(gpu, "out", array, 0, writable=True) is array
    array.flags.writeable = False
    for take in (named_array, backend_array):
        assert take(gpu, "q", array, 0) is array
        with pytest.raises(ArgumentValueError, match=r"^out: got a ndarray that must not be written"):
            take(gpu, "out", array, 0, writable=True)
