"""What streaming needs of a device beside kernels: pinned memory, copies on streams, events.

One class for each kind of backend. On the emulator a copy has ended when it returns, and events only tell
the time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError

Bytes = npt.NDArray[np.uint8]
PAGE = 4096  # bytes; pinned memory begins at a multiple, as direct I/O asks for


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: int) -> None:
        """Put it behind what is queued on the stream."""

    def wait(self, stream: int) -> None:
        """Hold up what is queued on the stream from now on until it is reached."""

    def synchronize(self) -> None:
        """Wait for it on the host; returns at once if it was never recorded."""

    def milliseconds_since(self, other: Any) -> float:
        """Time from another event, both reached; only for those made with timing."""


class Device(Protocol):
    """A backend's memory and streams."""

    def stream(self) -> int:
        """Handle of a new stream that does not wait for the default one; it lives as long as the device."""

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""

    def pinned(self, num_bytes: int) -> Bytes:
        """Page-locked host memory, which copies can read and write while other work goes on."""

    def to_device(self, target: int, source: Bytes, stream: int) -> None:
        """Queue a copy from pinned memory to a device address."""

    def to_host(self, target: Bytes, source: int, stream: int) -> None:
        """Queue a copy from a device address to pinned memory."""

    def current(self) -> Any:
        """Context manager under which threads of one's own may use events."""


class _HostEvent:
    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: int) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: int) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def milliseconds_since(self, other: _HostEvent) -> float:
        return 1e3 * (self._at - other._at)


class HostDevice:
    """Of the emulator: device memory is host memory."""

    def stream(self) -> int:
        """The only stream there is."""
        return 0

    def event(self, *, timing: bool = False) -> _HostEvent:
        """Remembers when it was recorded."""
        return _HostEvent()

    def pinned(self, num_bytes: int) -> Bytes:
        """Page-aligned memory."""
        storage = np.empty(num_bytes + PAGE, np.uint8)
        start = -storage.ctypes.data % PAGE
        return storage[start : start + num_bytes]

    def to_device(self, target: int, source: Bytes, stream: int) -> None:
        """Copies at once."""
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def to_host(self, target: Bytes, source: int, stream: int) -> None:
        """Copies at once."""
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Nothing to make current."""
        yield


class _CudaEvent:
    def __init__(self, cupy: Any, timing: bool) -> None:
        self._cupy = cupy
        self._event = cupy.cuda.Event(block=True, disable_timing=not timing)

    def record(self, stream: int) -> None:
        self._cupy.cuda.runtime.eventRecord(self._event.ptr, stream)

    def wait(self, stream: int) -> None:
        self._cupy.cuda.runtime.streamWaitEvent(stream, self._event.ptr)

    def synchronize(self) -> None:
        self._event.synchronize()

    def milliseconds_since(self, other: _CudaEvent) -> float:
        return float(self._cupy.cuda.get_elapsed_time(other._event, self._event))


class CudaDevice:
    """Of a GPU, through CuPy."""

    def __init__(self, index: int) -> None:
        import cupy

        self._cupy = cupy
        self._index = index
        self._streams: list[Any] = []

    def stream(self) -> int:
        """A non-blocking stream."""
        with self.current():
            self._streams.append(self._cupy.cuda.Stream(non_blocking=True))
        return int(self._streams[-1].ptr)

    def event(self, *, timing: bool = False) -> _CudaEvent:
        """An event that lets the waiting thread sleep."""
        with self.current():
            return _CudaEvent(self._cupy, timing)

    def pinned(self, num_bytes: int) -> Bytes:
        """Memory of its own, not of CuPy's pool: it is large and given back when dropped."""
        with self.current():
            memory = self._cupy.cuda.PinnedMemoryPointer(self._cupy.cuda.PinnedMemory(max(1, num_bytes)), 0)
        return np.frombuffer(memory, np.uint8, num_bytes)

    def to_device(self, target: int, source: Bytes, stream: int) -> None:
        """``cudaMemcpyAsync``."""
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(target, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream)

    def to_host(self, target: Bytes, source: int, stream: int) -> None:
        """``cudaMemcpyAsync``."""
        runtime = self._cupy.cuda.runtime
        with self.current():
            runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, stream)

    def current(self) -> Any:
        """The device, current in this thread."""
        return self._cupy.cuda.Device(self._index)


def device_of(gpu: Any) -> Device:
    """The device of a backend.

    Raises:
        ArgumentTypeError: a backend that streaming does not know.
    """
    name = getattr(gpu, "name", None)
    if name == "emulator":
        return HostDevice()
    if name == "cupy":
        return CudaDevice(gpu.device)
    raise ArgumentTypeError(f"gpu: got {gpu!r}, allowed are an EmulatorBackend and a CupyBackend")
