"""A backend that compiles and runs nothing: it records what a launch would hand to the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.emulator import memory
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.handle import HandleFactory, KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.pointers import DevicePtr
from cupaged.registry import limits_of_capability
from cupaged.source import KernelSource

_SIZES = {"ptr": 8, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4}
_TYPES: dict[str, npt.DTypeLike] = {
    "ptr": "u8",
    "u32": "u4",
    "i32": "i4",
    "u64": "u8",
    "i64": "i8",
    "f32": "f4",
}
_C_NAMES = {"ptr": "const float*", "u32": "u32", "i32": "i32", "u64": "u64", "i64": "i64", "f32": "float"}


@dataclass(frozen=True)
class FakeKernel:
    """What `FakeBackend.load` returns."""

    source: KernelSource


@dataclass(frozen=True)
class Launch:
    """One launch as the driver would have seen it.

    Attributes:
        source: of the kernel.
        grid: blocks in x, y, z.
        block: threads in x, y, z.
        shared_mem: bytes.
        stream: raw handle.
        offsets: of each parameter from the first one, in bytes.
        packed: the bytes of each parameter.
        arguments: parameter position -> object, where one was given.
        cooperative: all blocks must be resident at once.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    stream: int
    offsets: list[int]
    packed: list[bytes]
    arguments: dict[int, Any]
    cooperative: bool

    @property
    def values(self) -> dict[str, Any]:
        """Parameter name -> value."""
        return {
            parameter.name: np.frombuffer(raw, _TYPES[parameter.kind])[0].item()
            for parameter, raw in zip(self.source.parameters, self.packed, strict=True)
        }

    @property
    def constants(self) -> dict[str, str]:
        """The macros that the kernel is compiled with."""
        return dict(self.source.defines)


class FakeBackend(HandleFactory):
    """Arrays are NumPy arrays and streams are ints, as on the emulator.

    Attributes:
        loads: every source that was to be compiled.
        launches: every launch.
        allocations: how many arrays were made.
        made: their addresses.
        prepared: how many launches were prepared.
        again: how many of these were made.
        before_read: called at each launch before its parameters are read.
    """

    name = "fake"
    arch = "none"
    num_sms = 4
    limits = limits_of_capability(90, 4)

    def __init__(self) -> None:
        self.loads: list[KernelSource] = []
        self.launches: list[Launch] = []
        self.allocations = 0
        self.made: set[int] = set()
        self.prepared = self.again = 0
        self.before_read: Callable[[], object] = lambda: None

    @property
    def last(self) -> Launch:
        return self.launches[-1]

    def load(self, source: KernelSource) -> FakeKernel:
        self.loads.append(source)
        return FakeKernel(source)

    def launch_packed(
        self,
        kernel: FakeKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        params: int,
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> None:
        self.before_read()
        parameters = kernel.source.parameters
        addresses = list((ctypes.c_uint64 * len(parameters)).from_address(params))
        self.launches.append(
            Launch(
                kernel.source,
                grid,
                block,
                shared_mem,
                stream,
                [address - addresses[0] for address in addresses],
                [ctypes.string_at(a, _SIZES[p.kind]) for a, p in zip(addresses, parameters, strict=True)],
                dict(arguments),
                cooperative,
            )
        )

    def pointer(self, value: Any) -> int:
        if isinstance(value, np.ndarray):
            return int(value.ctypes.data)
        if isinstance(value, DevicePtr):
            return value.address
        if isinstance(value, np.integer):
            return int(value)
        raise ArgumentTypeError(
            f"pointer: got {type(value).__name__}, allowed are an array, DevicePtr, an int address"
        )

    def views(self, pointers: Sequence[Any]) -> tuple[Any, ...] | None:
        return memory.views(pointers)

    def prepare(
        self,
        kernel: FakeKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        parameters: bytes,
        offsets: Sequence[int],
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> Callable[[], None] | None:
        """Not of a caller's arrays, which would be kept."""
        if any(self.pointer(x) not in self.made for x in arguments.values()):
            return None
        self.prepared += 1
        kinds = [p.kind for p in kernel.source.parameters]
        packed = [parameters[at : at + _SIZES[kind]] for at, kind in zip(offsets, kinds, strict=True)]
        launch = Launch(
            kernel.source,
            grid,
            block,
            shared_mem,
            stream,
            list(offsets),
            packed,
            dict(arguments),
            cooperative,
        )

        def again() -> None:
            self.before_read()
            self.again += 1
            self.launches.append(launch)

        return again

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self.allocations += 1
        array = aligned(shape, dtype)
        self.made.add(array.ctypes.data)
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return self.empty(shape, dtype)

    def synchronize(self, stream: int | None = None) -> None:
        """Nothing ever runs."""

    def stream_handle(self, stream: Any) -> int:
        if isinstance(stream, bool) or not isinstance(stream, int):
            raise ArgumentTypeError(f"stream: got {stream!r}, allowed: int handle")
        if stream < 0:
            raise ArgumentValueError(f"stream: got {stream}, a handle is not negative")
        return stream


def aligned(shape: int | tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray[Any]:
    """A zeroed array whose address is `offset` bytes beyond a multiple of 256."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    storage = np.zeros(size + 512, np.uint8)
    start = -storage.ctypes.data % 256 + offset
    array: npt.NDArray[Any] = storage[start : start + size].view(dtype).reshape(shape)
    return array


def own_kernel(gpu: FakeBackend, folder: Path, kinds: tuple[str, ...]) -> KernelHandle:
    """A kernel in a file of the user's, its parameters p0, p1, ... of these kinds."""
    parameters = ", ".join(f"{_C_NAMES[kind]} p{i}" for i, kind in enumerate(kinds))
    entry = "k_" + "_".join(kinds)
    path = folder / f"{entry}.cu"
    path.write_text(f'#include "types.cuh"\nextern "C" __global__ void {entry}({parameters}) {{}}\n')
    return gpu.kernel(path, entry)


def builder(gpu: Any, kernel: KernelHandle) -> KernelLaunch:
    """A launch without geometry."""
    return KernelLaunch(gpu, kernel)


def small(gpu: Any, kernel: KernelHandle) -> KernelLaunch:
    """A launch of one warp."""
    return KernelLaunch(gpu, kernel).grid([1, 1, 1]).block([32, 1, 1])
