"""The emulator backend: runs the package's CUDA kernels, unmodified, on the CPU.

A kernel's ``.cu`` file is compiled by the system's C++ compiler against headers that stand for CUDA's
built-ins, and each CUDA thread runs as a fiber. It is for trying kernels and testing them without a GPU:
results agree with a GPU's up to the roundings of fused and approximate operations; speed does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import LoadedKernel
from cupaged.backends.emulator import build, memory
from cupaged.backends.emulator.check_setup import setup_of
from cupaged.backends.emulator.compiler import find_compiler
from cupaged.backends.emulator.library import SCHEDULES, KernelLibrary, LaunchRequest, Runtime
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.handle import HandleFactory
from cupaged.launch import in_range
from cupaged.registry import DeviceLimits, limits_of_capability
from cupaged.source import KernelSource

__all__ = ["EmulatedKernel", "EmulatorBackend"]

_PAGE = 4096
_MIN_STACK = 4 * _PAGE


@dataclass(frozen=True)
class EmulatedKernel:
    """A compiled and loaded kernel.

    Attributes:
        source: what it was compiled from.
        runtime: what runs it.
        library: its code.
    """

    source: KernelSource
    runtime: Runtime
    library: KernelLibrary


class EmulatorBackend(HandleFactory):
    """Runs kernels on the CPU. Launches run to their end before they return; streams are only checked.

    Device arrays are NumPy arrays. A fault in a kernel raises a subclass of `KernelFault` that names
    kernel, block and thread.

    Args:
        check: ``"off"`` runs fast and finds deadlocks, wrong masks and misused asynchronous copies.
            ``"full"`` also finds data races, stray and misaligned accesses, reads of shared memory that
            nothing wrote and copies used too early, and names file and line; it takes two to four times
            as long, on one OS thread whatever `workers` says.
        schedule: order in which threads and blocks run: ``"fifo"``, ``"reverse"`` or ``"random"``.
            ``"random"`` also lets asynchronous copies land early or late; the others land them late.
        seed: of the random schedule.
        workers: OS threads that blocks are spread over. Cooperative launches use one.
        num_sms: what `num_sms` says.
        stack_bytes: stack of each CUDA thread; a kernel with larger local arrays crashes the process.

    Raises:
        ArgumentValueError: an argument that is not allowed.
        BackendUnavailableError: no C++ compiler; the message says how to get one.
    """

    name = "emulator"
    arch = "emulator"

    def __init__(
        self,
        *,
        check: str = "off",
        schedule: str = "fifo",
        seed: int = 0,
        workers: int = 1,
        num_sms: int = 4,
        stack_bytes: int = 65536,
    ) -> None:
        if check not in ("off", "full"):
            raise ArgumentValueError(f"check: got {check!r}, allowed are 'off' and 'full'")
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise ArgumentValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
        self._check = check == "full"
        self.schedule = schedule
        self.seed = in_range("seed", seed, 0) & (2**64 - 1)
        self.workers = in_range("workers", workers, 1)
        self.num_sms = in_range("num_sms", num_sms, 1)
        self.stack_bytes = -(-in_range("stack_bytes", stack_bytes, _MIN_STACK) // _PAGE) * _PAGE
        self._compiler = find_compiler()
        self._memory = memory.DeviceMemory()
        self._kernels: dict[tuple[object, ...], EmulatedKernel] = {}

    @property
    def limits(self) -> DeviceLimits:
        """Those of an sm_90 GPU with `num_sms` multiprocessors, but for ``cooperative_threads``."""
        limits = limits_of_capability(90, self.num_sms)
        return replace(limits, cooperative_threads=build.RESIDENT_THREADS)

    def load(self, source: KernelSource) -> EmulatedKernel:
        """Compile (or fetch from disk) and load.

        Raises:
            CompileError: with the compiler's log.
            BackendUnavailableError: the result cannot be loaded.
        """
        key = (source.path, source.entry, source.defines, source.digest())
        found = self._kernels.get(key)
        if found is None:
            # Asked for each time: kernels are stored beside their runtime, and the cache may have moved.
            runtime = build.load_or_rebuild(self._runtime_library, Runtime.of)
            library = build.load_or_rebuild(
                lambda: build.kernel_library(
                    self._compiler, source, self._runtime_library(), check=self._check
                ),
                lambda path: KernelLibrary(path, runtime),
            )
            found = self._kernels[key] = EmulatedKernel(source, runtime, library)
        return found

    def _runtime_library(self) -> Path:
        return build.runtime_library(self._compiler, self._runtime_defines())

    def _runtime_defines(self) -> tuple[str, ...]:
        return (build.CHECK_DEFINE,) if self._check else ()

    def launch_packed(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        params: int,
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> None:
        """Run a launch to its end; see `GpuBackend.launch_packed`.

        Raises:
            LaunchError: geometry or shared memory beyond what a GPU allows.
            KernelFault: the kernel deadlocks, uses a wrong mask, and so on.
            ArgumentValueError: an array that must not be written, for a pointer that is not const; in check
                mode, an address that lies in no known buffer.
        """
        if not isinstance(kernel, EmulatedKernel):
            raise ArgumentTypeError(f"kernel: got {type(kernel).__name__}, allowed is what `load` returns")
        _check_writable(kernel.source, arguments)
        library = kernel.library
        setup = setup_of(kernel.source, params, arguments, self._memory) if self._check else None
        request = LaunchRequest(
            library.entry,
            params,
            library.shared_pointer,
            shared_mem,
            self.stack_bytes,
            self.seed,
            grid,
            block,
            SCHEDULES[self.schedule],
            self.workers,
            cooperative,
            None if setup is None else ctypes.addressof(setup),
        )
        kernel.runtime.launch(request, kernel.source.entry, library.path)

    def pointer(self, value: Any) -> int:
        """Address of a NumPy array, a `DevicePtr` or a NumPy integer; arrays of a real GPU are refused."""
        return memory.pointer(value)

    def views(self, pointers: Sequence[Any]) -> tuple[Any, ...] | None:
        """What checks look at in NumPy arrays and addresses; see `GpuBackend.views`."""
        return memory.views(pointers)

    def prepare(self, *_: Any, **__: Any) -> None:
        """None: every launch is looked at; see `GpuBackend.prepare`."""

    def stream_handle(self, stream: Any) -> int:
        """Handle of an int, or of an object with ``__cuda_stream__`` or ``ptr``."""
        return memory.stream_handle(stream)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """NumPy array full of 0xFF bytes: NaN, or the largest or a negative integer."""
        return self._memory.allocate(shape, dtype, memory.POISON_BYTE)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """NumPy array of zeros."""
        return self._memory.allocate(shape, dtype, 0)

    def asarray(self, host: npt.ArrayLike) -> np.ndarray:
        """Copy of a host array, in C order and of the same dtype."""
        return self._memory.copy_of(host)

    def to_host(self, array: Any) -> np.ndarray:
        """Copy of a device array."""
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(f"array: got {type(array).__name__}, allowed is a NumPy array")
        return np.array(array)

    def memset(self, pointer: int, value: int, num_bytes: int, stream: int) -> None:
        """Fill bytes."""
        memory.fill(pointer, value, num_bytes)

    def synchronize(self, stream: int | None = None) -> None:
        """Nothing to wait for: launches have ended when they return."""

    def null_stream(self) -> int:
        """Handle of the default stream."""
        return 0


def _check_writable(source: KernelSource, arguments: Mapping[int, Any]) -> None:
    """A kernel that writes to memory that is mapped for reading alone would end the process."""
    for position, given in arguments.items():
        parameter = source.parameters[position]
        if isinstance(given, np.ndarray) and not given.flags.writeable and not parameter.const:
            raise ArgumentValueError(
                f"{parameter.name}: got a NumPy array that must not be written (flags.writeable is False), "
                "where a result goes; allocate one with gpu.empty"
            )
