"""Arrays of other libraries where device data is, without a copy and in the order of their streams.

Nothing here imports another library than CuPy, and that only for its own backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupaged import dlpack
from cupaged.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from cupaged.launch import in_range
from cupaged.pointers import DevicePtr

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

# Types of what needs no look: addresses, the backends' arrays (CuPy's joins when it is first met), and None
# for what is left out. Whether such an array belongs to the backend, `GpuBackend.pointer` says.
PLAIN_TYPES: set[type] = {int, DevicePtr, np.ndarray, type(None)}

_LEGACY_STREAM = 1  # what both protocols call the stream whose handle is 0
# Types of `__cuda_array_interface__` that NumPy has no name for, by their bytes: BF16 and FP8 as ml_dtypes
# spells them. They are passed on as bits.
_NARROW = {"V2": "uint16", "f1": "uint8", "V1": "uint8"}


def check_backend(gpu: Any) -> None:
    """Raise ArgumentTypeError for what is no backend."""
    if not hasattr(gpu, "load"):
        raise ArgumentTypeError(
            f"gpu: got {type(gpu).__name__}, allowed is a backend: CupyBackend or EmulatorBackend"
        )


def address_of(gpu: GpuBackend, name: str, value: Any) -> int:
    """Address of an array of the backend, of a `DevicePtr` or an int, under the argument's name in errors."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return in_range(name, value, 0, 2**64 - 1)
    try:
        return int(gpu.pointer(value))
    except ArgumentError as error:
        error.rename({"pointer": name})
        raise


def device_array(gpu: GpuBackend, value: Any, stream: Any, *, writable: bool = False) -> Any:
    """An array of the backend over the memory of any library's array.

    No copy and no wait on the host: work on ``stream`` queued from now on comes after what the producer has
    queued on its own stream. On a GPU, BF16 and FP8 become unsigned bits of the same size, which the
    launchers take as such.

    Args:
        gpu: the backend.
        value: on a GPU, a DLPack producer of its device or an object with ``__cuda_array_interface__``; on
            the emulator, a DLPack producer of memory of the CPU. The backend's own arrays, ints and
            `DevicePtr` come back as they are, with nothing done about order: they name no stream.
        stream: the stream that the array is going to be used on.
        writable: whether it is going to be written.

    Raises:
        ArgumentTypeError: host data given to a GPU, or the reverse, or an object that lends no memory.
        ArgumentValueError: another device, or memory that must not be written.
    """
    if isinstance(value, (int, np.integer, DevicePtr)):
        return value
    if gpu.name == "cupy":
        return _cupy_array(gpu, value, stream, writable)
    if isinstance(value, np.ndarray):
        _check_writable(value, not value.flags.writeable, writable)
        return value
    if not dlpack.is_producer(value):
        return value
    if dlpack.device_of(value)[0] != dlpack.CPU:
        raise ArgumentTypeError(
            f"array: got a {type(value).__name__} in the memory of a GPU, where the {gpu.name} backend "
            "cannot reach it; allowed is memory of the CPU"
        )
    return _numpy_array(value, writable)


def backend_array(gpu: GpuBackend, name: str, value: Any, stream: Any, *, writable: bool = False) -> Any:
    """`device_array` for the argument `name` of a call that has its own words for what is no array."""
    needs_look = writable and isinstance(value, np.ndarray)  # whether it may be written
    if not needs_look and (type(value) in PLAIN_TYPES or not is_lent(value)):
        return value
    return named_array(gpu, name, value, stream, writable=writable)


def backend_arrays(
    gpu: GpuBackend, given: Mapping[str, Any], stream: Any, written: Container[str]
) -> dict[str, Any]:
    """`backend_array` of all that a call was given, by the arguments' names, some of which it writes."""
    if PLAIN_TYPES.issuperset(map(type, given.values())):
        return dict(given)
    return {
        name: backend_array(gpu, name, value, stream, writable=name in written)
        for name, value in given.items()
    }


def named_array(gpu: GpuBackend, name: str, value: Any, stream: Any, *, writable: bool = False) -> Any:
    """`device_array` for the argument `name`, with which its errors begin."""
    try:
        return device_array(gpu, value, stream, writable=writable)
    except ArgumentError as error:
        error.rename({"array": name})
        raise


def is_lent(value: Any) -> bool:
    """Whether an object says where its memory is, by one of the protocols that `device_array` knows."""
    # Of the object, not of its type: an instance may carry the interface as a plain attribute.
    return dlpack.is_producer(value) or hasattr(value, "__cuda_array_interface__")


def to_device(gpu: GpuBackend, array: npt.ArrayLike, stream: Any) -> Any:
    """A copy of a host array on the device, queued on the stream; the host does not wait for it.

    The array may be changed as soon as this returns. The copy's memory is the stream's: it may be dropped as
    soon as the last work that reads it is queued there.

    Raises:
        ArgumentValueError: the stream is being captured: a graph would read the host's memory at each replay.
    """
    handle = gpu.stream_handle(stream)
    if gpu.name != "cupy":
        return gpu.asarray(array)
    if is_capturing(gpu, handle):
        raise ArgumentValueError(
            "stream: it is being captured, and a host array cannot be copied in a graph; copy it before the "
            "capture and give the device array"
        )
    runtime = _cupy().cuda.runtime
    host = np.array(array, order="C")  # pageable, so that the driver stages it before memcpyAsync returns
    with stream_memory(gpu, handle):
        copy = gpu.empty(host.shape, host.dtype)
        if host.nbytes:
            runtime.memcpyAsync(
                copy.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, handle
            )
    return copy


def is_capturing(gpu: GpuBackend, stream: Any) -> bool:
    """Whether a graph is being captured from the stream; never on the emulator."""
    return gpu.name == "cupy" and bool(_cupy().cuda.runtime.streamIsCapturing(gpu.stream_handle(stream)))


@contextlib.contextmanager
def stream_memory(gpu: GpuBackend, stream: Any) -> Iterator[None]:
    """Within it, the stream is CuPy's current one; nothing on the emulator.

    Arrays that the backend makes belong to the stream: memory that is dropped is used again for that stream's
    work alone. And libraries that read a CuPy array through DLPack there come after the stream's work.
    """
    if gpu.name != "cupy":
        yield
        return
    from cupaged.backends.cupy.streams import stream_of

    cupy = _cupy()
    device: int = gpu.device  # type: ignore[attr-defined]
    handle = gpu.stream_handle(stream)
    with cupy.cuda.Device(device), stream_of(handle, device):
        yield


def _cupy() -> Any:
    import cupy

    return cupy


def _cupy_array(gpu: Any, value: Any, stream: Any, writable: bool) -> Any:
    cupy = _cupy()
    if isinstance(value, cupy.ndarray):
        PLAIN_TYPES.add(cupy.ndarray)
        return value
    if isinstance(value, np.ndarray):
        raise ArgumentTypeError(
            "array: got a NumPy array, which lives on the host; copy it with interop.to_device or gpu.asarray"
        )
    handle = gpu.stream_handle(stream)
    # DLPack first: not every library says BF16 in the other protocol.
    if dlpack.is_producer(value):
        return _from_dlpack(gpu, cupy, value, handle, writable)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise ArgumentTypeError(
            f"array: got {type(value).__name__}, allowed: int, DevicePtr, CuPy array, DLPack producer, "
            "object with __cuda_array_interface__"
        )
    return _from_interface(gpu, cupy, value, interface, handle, writable)


def _from_dlpack(gpu: Any, cupy: Any, value: Any, handle: int, writable: bool) -> Any:
    kind, index = dlpack.device_of(value)
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise ArgumentTypeError(
            f"array: got a {type(value).__name__} on DLPack device type {kind}, allowed is CUDA; copy "
            "it to the GPU first"
        )
    _check_device(value, index, gpu.device)
    with cupy.cuda.Device(gpu.device):
        lent = dlpack.borrow(value, handle or _LEGACY_STREAM)
    _check_writable(value, lent.read_only, writable)
    bits = lent.dtype if lent.dtype.isbuiltin == 1 else np.dtype(f"uint{8 * lent.dtype.itemsize}")
    return _wrapped(gpu, cupy, lent.address, lent.shape, lent.strides, bits, lent.owner)


def _from_interface(
    gpu: Any, cupy: Any, value: Any, interface: dict[str, Any], handle: int, writable: bool
) -> Any:
    if interface.get("mask") is not None:
        raise ArgumentTypeError(f"array: got a {type(value).__name__} with a mask, allowed is one without")
    address, read_only = interface["data"]
    _check_writable(value, read_only, writable)
    spelled = interface["typestr"][1:]
    dtype = np.dtype(_NARROW.get(spelled, interface["typestr"]))
    # As ints: products of NumPy's integers overflow.
    shape = tuple(map(int, interface["shape"]))
    steps = interface.get("strides")
    strides = None if steps is None else tuple(map(int, steps))
    _follow(gpu, cupy, value, interface.get("stream"), handle)
    return _wrapped(gpu, cupy, int(address or 0), shape, strides, dtype, value)


def _wrapped(
    gpu: Any,
    cupy: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    owner: object,
) -> Any:
    if 0 in shape:
        return gpu.empty(shape, dtype)
    steps = [0] * len(shape) if strides is None else strides
    reach = sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize if strides is None else reach + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, max(size, dtype.itemsize), owner)
    _check_device(owner, memory.device_id, gpu.device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _follow(gpu: Any, cupy: Any, value: Any, producer: int | None, handle: int) -> None:
    """Queue a wait on `handle` for what the producer's stream holds now. None says that there is nothing."""
    if producer is None or producer == (handle or _LEGACY_STREAM):
        return
    if producer == 0:
        raise ArgumentValueError(
            f"array: the __cuda_array_interface__ of a {type(value).__name__} says stream 0, which the "
            "protocol forbids; 1 is the legacy default stream, 2 the per-thread one"
        )
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(gpu.device):
        event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        try:
            runtime.eventRecord(event, producer)
            runtime.streamWaitEvent(handle, event)
        finally:
            runtime.eventDestroy(event)  # the wait that is queued stays


def _numpy_array(value: Any, writable: bool) -> np.ndarray:
    lent = dlpack.borrow(value, None)
    _check_writable(value, lent.read_only, writable)
    if 0 in lent.shape:
        return np.empty(lent.shape, lent.dtype)
    bits = np.dtype(f"u{lent.dtype.itemsize}")
    return np.asarray(_HostMemory(lent, bits)).view(lent.dtype)


class _HostMemory:
    """Memory of the CPU as NumPy asks for it; arrays over it keep its owner."""

    def __init__(self, lent: dlpack.DLTensor, bits: np.dtype[Any]) -> None:
        self._owner = lent.owner
        self.__array_interface__ = {
            "data": (lent.address, lent.read_only),
            "shape": lent.shape,
            "strides": lent.strides,
            "typestr": bits.str,
            "version": 3,
        }


def _check_device(value: object, index: int, own: int) -> None:
    if index != own:
        raise ArgumentValueError(
            f"array: got a {type(value).__name__} on device {index}, this backend is of device {own}"
        )


def _check_writable(value: object, read_only: bool, writable: bool) -> None:
    if read_only and writable:
        raise ArgumentValueError(
            f"array: got a {type(value).__name__} that must not be written, where a result goes; allocate "
            "one with gpu.empty"
        )
