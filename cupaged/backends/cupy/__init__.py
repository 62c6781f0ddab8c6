"""The GPU backend: CuPy supplies NVRTC, modules, streams, memory and the driver's launch call."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged import environment
from cupaged.backends.cupy import extended_launch, forked, installation, nvtx, prebuilt
from cupaged.backends.streams import handle_of
from cupaged.errors import ArgumentTypeError, ArgumentValueError, BackendUnavailableError, LaunchError
from cupaged.handle import HandleFactory
from cupaged.pointers import DevicePtr, views
from cupaged.registry import DeviceLimits
from cupaged.source import KernelSource

_LOOK = operator.attrgetter("data.ptr", "data.device_id", "dtype", "shape", "strides")
_MEMORY_OF_A_DEVICE = 2  # cudaMemoryTypeDevice
_DEFAULT_SHARED_LIMIT = 48 * 1024  # more shared memory, static and dynamic, must be asked for


@dataclass
class CupyKernel:
    """A loaded function of one device.

    Attributes:
        source: what it was compiled from.
        function: the driver's handle.
        dynamic_shared: bytes of dynamic shared memory that launches may use so far.
    """

    source: KernelSource
    function: int
    dynamic_shared: int
    _keep: list[Any] = field(default_factory=list)


def _import_cupy() -> tuple[Any, Any, Any]:
    """CuPy, and its bindings of the driver and of the CUDA runtime."""
    try:
        import cupy
        from cupy_backends.cuda.api import driver, runtime
    except Exception as error:  # a damaged installation fails in any way
        raise installation.import_problem(error) from error
    return cupy, driver, runtime


class CupyBackend(HandleFactory):
    """Runs kernels on one CUDA device.

    Args:
        device: device index; the current one by default.

    Raises:
        BackendUnavailableError: no CuPy, no driver or no such device, or a process forked from one that uses
            CUDA; the message says what to do.
    """

    name = "cupy"

    def __init__(self, device: int | None = None) -> None:
        forked.refuse_in_child()
        self._cupy, self._driver, self._runtime = _import_cupy()
        runtime = self._runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise installation.no_device(error, runtime) from None
        self.device = runtime.getDevice() if device is None else device
        if not 0 <= self.device < count:
            raise BackendUnavailableError(f"device: got {self.device}, there are {count} CUDA devices")
        properties = runtime.getDeviceProperties(self.device)
        capability = (int(properties["major"]), int(properties["minor"]))
        self._target = prebuilt.choose_target(capability)
        self._limits = DeviceLimits(
            num_sms=int(properties["multiProcessorCount"]),
            shared_per_block=int(properties["sharedMemPerBlockOptin"]),
            shared_per_sm=int(properties["sharedMemPerMultiprocessor"]),
            bulk_copies=self._target.has_bulk_copies,
            capability=10 * capability[0] + capability[1],
        )
        self._modules: dict[tuple[object, ...], Any] = {}
        self._lock = threading.Lock()
        if environment.NVTX.is_on():
            nvtx.mark_launches(self)
        forked.guard(self)

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        return self._limits.num_sms

    @property
    def limits(self) -> DeviceLimits:
        """Facts about this GPU that kernels are shaped by."""
        return self._limits

    @property
    def arch(self) -> str:
        """What kernels are compiled for, as ``sm_90a``."""
        return self._target.arch

    def load(self, source: KernelSource) -> CupyKernel:
        """Compile (or fetch from disk) and load on this device."""
        module_key = (source.path, source.defines, source.digest())
        # Outside the lock, so that threads compile side by side.
        code = b"" if module_key in self._modules else prebuilt.code_of(source, self._target)
        with self._lock, self._cupy.cuda.Device(self.device):
            module = self._modules.get(module_key)
            if module is None:
                module = self._modules[module_key] = self._load_module(source, code)
            function = module.get_function(source.entry)
            attribute = self._driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            static = int(self._driver.funcGetAttribute(attribute, function.ptr))
            return CupyKernel(
                source, int(function.ptr), _DEFAULT_SHARED_LIMIT - static, _keep=[function, module]
            )

    def _load_module(self, source: KernelSource, code: bytes) -> Any:
        module = self._cupy.cuda.function.Module()
        try:
            module.load(code)
        except self._driver.CUDADriverError as error:
            if "CAPTURE" in str(error):
                raise LaunchError(
                    f"{source.entry}: its first use loads code, which a stream that is being captured in "
                    "global mode forbids. Warm up first: launch it once, or call kernel.warm(...), before "
                    "the capture; or capture in relaxed mode"
                ) from error
            supported = ".".join(map(str, installation.cuda_version(self._runtime.driverGetVersion())))
            raise BackendUnavailableError(
                f"the driver (CUDA {supported}) refuses {source.path.name} as {prebuilt.compiler_text()} "
                f"compiled it for {self._target.arch}: {error}. If NVRTC is newer than the driver, update "
                "the driver; else compile again: python -m cupaged cache --clear"
            ) from error
        return module

    def launch_packed(
        self,
        kernel: CupyKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        params: int,
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> None:
        """Launch through the driver; see `GpuBackend.launch_packed`."""
        runtime = self._runtime
        current = runtime.getDevice()
        if current != self.device:
            runtime.setDevice(self.device)
        try:
            if shared_mem > kernel.dynamic_shared:
                self._allow_shared(kernel, shared_mem)
            if overlapping and self._limits.bulk_copies:
                extended_launch.launch(kernel.function, grid, block, shared_mem, params, stream, cooperative)
                return
            x, y, z = grid
            threads_x, threads_y, threads_z = block
            if cooperative:
                self._driver.launchCooperativeKernel(
                    kernel.function, x, y, z, threads_x, threads_y, threads_z, shared_mem, stream, params
                )
            else:
                self._driver.launchKernel(
                    kernel.function, x, y, z, threads_x, threads_y, threads_z, shared_mem, stream, params, 0
                )
        except (self._driver.CUDADriverError, LaunchError) as error:
            raise _refused(kernel, grid, block, shared_mem, error) from error
        finally:
            if current != self.device:
                runtime.setDevice(current)

    def prepare(
        self,
        kernel: CupyKernel,
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
        """All that the driver takes, made once; see `GpuBackend.prepare`."""
        if shared_mem > kernel.dynamic_shared:
            return None
        overlaps = overlapping and self._limits.bulk_copies
        config = extended_launch.Config(grid, block, shared_mem, stream, cooperative, overlaps)
        launch = extended_launch.prepare(kernel.function, config, parameters, offsets)
        runtime, device = self._runtime, self.device
        current_device = runtime.getDevice

        def again() -> None:
            if forked.is_child:
                forked.refuse_in_child()
            current = current_device()
            if current == device:
                status = launch()
            else:
                runtime.setDevice(device)
                try:
                    status = launch()
                finally:
                    runtime.setDevice(current)
            if status:
                raise _refused(kernel, grid, block, shared_mem, extended_launch.error(status))

        return again

    def _allow_shared(self, kernel: CupyKernel, num_bytes: int) -> None:
        if num_bytes > self._limits.shared_per_block:
            raise ArgumentValueError(
                f"{kernel.source.entry}: shared_mem is {num_bytes} bytes, this GPU allows "
                f"{self._limits.shared_per_block}"
            )
        attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._driver.funcSetAttribute(kernel.function, attribute, num_bytes)
        kernel.dynamic_shared = num_bytes

    def pointer(self, value: Any) -> int:
        """Address of a CuPy array, of an object with ``__cuda_array_interface__``, or of a `DevicePtr`.

        Raises:
            ArgumentTypeError: an object of another kind.
            ArgumentValueError: an array in the memory of another device.
        """
        if isinstance(value, self._cupy.ndarray):
            memory = value.data
            if memory.device_id != self.device and memory.ptr:
                raise self._elsewhere(value, memory.device_id)
            return int(memory.ptr)
        if isinstance(value, DevicePtr):
            return value.address
        if isinstance(value, np.integer):
            return int(value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            address = int(interface["data"][0])
            holder = self._device_of(address)
            if holder not in (None, self.device):
                raise self._elsewhere(value, holder)
            return address
        allowed = "an array on the GPU (gpu.asarray makes one), DevicePtr, an int address"
        hint = " (a host array: copy it with gpu.asarray)" if isinstance(value, np.ndarray) else ""
        raise ArgumentTypeError(f"pointer: got {type(value).__name__}{hint}, allowed are {allowed}")

    def views(self, pointers: Sequence[Any]) -> tuple[Any, ...] | None:
        """What checks look at in CuPy arrays and addresses; see `GpuBackend.views`."""
        return views(pointers, self._cupy.ndarray, _LOOK)

    def _device_of(self, address: int) -> int | None:
        """The device whose memory an address is in; None for memory that every device reaches, or null."""
        if not address:
            return None
        try:
            found = self._runtime.pointerGetAttributes(address)
        except self._runtime.CUDARuntimeError:
            return None  # the driver does not know it
        return int(found.device) if found.type == _MEMORY_OF_A_DEVICE else None

    def _elsewhere(self, array: Any, holder: int | None) -> ArgumentValueError:
        return ArgumentValueError(
            f"pointer: got a {type(array).__name__} on device {holder}, allowed are arrays on this backend's "
            f"device, {self.device}; copy it there, or give its address where peer access is enabled"
        )

    def stream_handle(self, stream: Any) -> int:
        """Handle of an int, a CuPy stream (``ptr``) or an object with ``__cuda_stream__``."""
        if isinstance(stream, (self._cupy.cuda.Stream, self._cupy.cuda.ExternalStream)):
            return int(stream.ptr)
        return handle_of(stream, "int handle, CuPy stream, object with __cuda_stream__")

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Uninitialised CuPy array; dtypes CuPy does not have come as unsigned bits of the same size."""
        with self._cupy.cuda.Device(self.device):
            return self._cupy.empty(shape, _bits_dtype(dtype))

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Zeroed CuPy array; dtypes as in `empty`."""
        with self._cupy.cuda.Device(self.device):
            return self._cupy.zeros(shape, _bits_dtype(dtype))

    def asarray(self, host: npt.ArrayLike) -> Any:
        """Copy on the device; ml_dtypes arrays become unsigned bits of the same size."""
        array = np.ascontiguousarray(host)
        with self._cupy.cuda.Device(self.device):
            return self._cupy.asarray(array.view(_bits_dtype(array.dtype)))

    def to_host(self, array: Any) -> np.ndarray:
        """Copy to the host, after everything queued on the device."""
        self.synchronize()
        with self._cupy.cuda.Device(self.device):
            return np.asarray(array.get())

    def memset(self, pointer: int, value: int, num_bytes: int, stream: int) -> None:
        """Fill bytes, ordered on the stream."""
        with self._cupy.cuda.Device(self.device):
            self._runtime.memsetAsync(pointer, value, num_bytes, stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for one stream, or for the whole device."""
        with self._cupy.cuda.Device(self.device) as device:
            if stream is None:
                device.synchronize()
            else:
                self._runtime.streamSynchronize(stream)

    def null_stream(self) -> int:
        """Handle of the default stream."""
        return 0


def _refused(
    kernel: CupyKernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_mem: int,
    error: Exception,
) -> LaunchError:
    return LaunchError(
        f"{kernel.source.entry}: the driver refused grid {grid}, block {block}, "
        f"{shared_mem} bytes of shared memory: {error}"
    )


def _bits_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype itself, or unsigned bits where only ml_dtypes has it."""
    given = np.dtype(dtype)
    if given.kind == "V" or given.name in ("bfloat16",) or given.name.startswith("float8"):
        return np.dtype(f"uint{8 * given.itemsize}")
    return given
