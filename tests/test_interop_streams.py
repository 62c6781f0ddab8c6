"""What is asked of CUDA when other libraries' arrays come in, without a GPU: a CuPy that records."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupaged import dlpack, interop
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.host.test_dlpack import Producer

OURS, THEIRS = 0x700, 0x900
DEVICE = 1


class FakeArray:
    """cupy.ndarray, as it is made over memory of others."""

    def __init__(self, shape: Any, dtype: Any, pointer: Any, strides: Any) -> None:
        self.shape, self.dtype, self.memory, self.strides = shape, np.dtype(dtype), pointer, strides


class FakeCupy:
    """The part of CuPy that `cupaged.interop` uses.

    Attributes:
        calls: calls of the CUDA runtime, in order.
        holder: the device that memory is found on.
    """

    ndarray = FakeArray

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.holder = DEVICE
        runtime = SimpleNamespace(
            eventDisableTiming=2,
            eventCreateWithFlags=lambda flags: self._call("create", flags) or 55,
            eventRecord=lambda event, stream: self._call("record", event, stream),
            streamWaitEvent=lambda stream, event: self._call("wait", stream, event),
            eventDestroy=lambda event: self._call("destroy", event),
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda device: contextlib.nullcontext(self._call("device", device)),
            UnownedMemory=lambda address, size, owner: SimpleNamespace(
                address=address, size=size, owner=owner, device_id=self.holder
            ),
            MemoryPointer=lambda memory, offset: memory,
        )

    def _call(self, *call: Any) -> None:
        self.calls.append(call)

    @property
    def order(self) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] != "device"]


class Lender:
    """Says where memory is, as Numba does."""

    def __init__(self, **changed: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 4), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3
        } | changed  # fmt: skip


GPU = SimpleNamespace(
    name="cupy",
    device=DEVICE,
    stream_handle=lambda stream: stream,
    empty=lambda shape, dtype: ("empty", shape),
)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(interop, "_cupy", lambda: fake)
    return fake


def lent(value: Any, stream: int = OURS, **keywords: Any) -> Any:
    return interop.device_array(GPU, value, stream, **keywords)  # type: ignore[arg-type]


def test_a_producers_stream_is_waited_for_on_ours(cupy: FakeCupy) -> None:
    lent(Lender(stream=THEIRS))
    assert cupy.order == [("create", 2), ("record", 55, THEIRS), ("wait", OURS, 55), ("destroy", 55)]
    assert cupy.calls[0] == ("device", DEVICE)


@pytest.mark.parametrize(("producer", "consumer"), [(None, OURS), (OURS, OURS), (1, 0), (1, 1), (2, 2)])
def test_nothing_is_asked_where_there_is_nothing_to_wait_for(
    cupy: FakeCupy, producer: int | None, consumer: int
) -> None:
    """The handle 0 and the protocol's 1 are both the legacy default stream."""
    lent(Lender(stream=producer), consumer)
    assert cupy.order == []


@pytest.mark.parametrize(("producer", "consumer"), [(1, OURS), (2, 0), (2, 1), (THEIRS, 0)])
def test_default_streams_are_waited_for_too(cupy: FakeCupy, producer: int, consumer: int) -> None:
    lent(Lender(stream=producer), consumer)
    assert cupy.order[1:3] == [("record", 55, producer), ("wait", consumer, 55)]


def test_an_event_goes_even_where_the_wait_fails(cupy: FakeCupy) -> None:
    def fail(stream: int, event: int) -> None:
        raise RuntimeError("captured")

    cupy.cuda.runtime.streamWaitEvent = fail
    with pytest.raises(RuntimeError, match="captured"):
        lent(Lender(stream=THEIRS))
    assert cupy.order[-1] == ("destroy", 55)


def test_memory_is_described_as_it_is(cupy: FakeCupy) -> None:
    value = Lender()
    array = lent(value)
    assert (array.shape, array.dtype, array.strides) == ((3, 4), np.float32, None)
    assert (array.memory.address, array.memory.size, array.memory.owner) == (4096, 48, value)
    array = lent(Lender(strides=(32, 8)))
    assert (array.strides, array.memory.size) == ((32, 8), 2 * 32 + 3 * 8 + 4)
    assert lent(Lender(shape=(0, 4), data=(0, False))) == ("empty", (0, 4))


def test_sizes_of_numpys_integers(cupy: FakeCupy) -> None:
    """Their products would overflow."""
    array = lent(
        Lender(shape=np.int16([300, 300]), strides=np.int16([30000, 4]), data=(np.int64(4096), False))
    )
    assert (array.shape, array.strides) == ((300, 300), (30000, 4))
    assert array.memory.size == 299 * 30000 + 299 * 4 + 4
    assert all(
        type(x) is int for x in (*array.shape, *array.strides, array.memory.address, array.memory.size)
    )


def test_a_stream_that_is_none_is_not_the_array(cupy: FakeCupy) -> None:
    def refuse(stream: Any) -> int:
        raise ArgumentTypeError("stream: got str, allowed: int handle")

    gpu: Any = SimpleNamespace(**vars(GPU) | {"stream_handle": refuse})
    with pytest.raises(ArgumentTypeError, match=r"^stream: got str"):
        interop.named_array(gpu, "q", Lender(), "x")


@pytest.mark.parametrize(("stream", "passed"), [(OURS, OURS), (0, 1), (1, 1), (2, 2)])
def test_our_stream_is_passed_to_the_producer(cupy: FakeCupy, stream: int, passed: int) -> None:
    producer = Producer(np.zeros((2, 3), np.float32), device=(dlpack.CUDA, DEVICE))
    array = lent(producer, stream)
    assert producer.streams == [passed]
    assert cupy.order == []
    assert (array.memory.address, array.strides) == (producer.array.ctypes.data, (12, 4))


def test_narrow_types_come_as_bits(cupy: FakeCupy) -> None:
    import ml_dtypes

    for dtype, bits in ((ml_dtypes.bfloat16, np.uint16), (ml_dtypes.float8_e4m3fn, np.uint8)):
        assert lent(Producer(np.zeros(3, dtype), device=(dlpack.CUDA, DEVICE))).dtype == bits
        assert lent(Lender(typestr=np.dtype(dtype).str)).dtype == bits
    assert lent(Producer(np.zeros(3, np.float16), device=(dlpack.CUDA, DEVICE))).dtype == np.float16


def test_what_is_refused(cupy: FakeCupy) -> None:
    on_cpu = Producer(np.zeros(3, np.float32))
    elsewhere = Producer(np.zeros(3, np.float32), device=(dlpack.CUDA, 0))
    for value, message, keywords in (
        (Lender(stream=0), "says stream 0, which the protocol forbids", {}),
        (Lender(mask=3), "a Lender with a mask", {}),
        (Lender(data=(4096, True)), "must not be written", {"writable": True}),
        (on_cpu, "on DLPack device type 1, allowed is CUDA", {}),
        (elsewhere, "on device 0, this backend is of device 1", {}),
        (np.zeros(3), r"interop\.to_device or gpu\.asarray", {}),
        ("x", "array: got str, allowed: int, DevicePtr", {}),
    ):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=message):
            lent(value, **keywords)
    cupy.holder = 0
    with pytest.raises(ArgumentValueError, match="on device 0, this backend is of device 1"):
        lent(Lender())
    assert on_cpu.streams == elsewhere.streams == []
