"""``cuLaunchKernelEx``, which CuPy does not bind: launches that may overlap the end of the kernel before.

With programmatic stream serialisation a kernel's blocks may become resident while the kernel before is still
finishing; the kernel itself waits (``griddepcontrol.wait``) before it touches memory. It saves the launch
latency between kernels that follow each other closely, in streams and in captured graphs.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cupaged.errors import BackendUnavailableError, LaunchError

_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_VARYING = struct.Struct("=7I4xQ")  # of Config: grid, block, shared_mem, stream


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig, with the attributes asked for and no others: each costs the driver time."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )

    def __init__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        stream: int,
        cooperative: bool,
        overlapping: bool,
    ) -> None:
        super().__init__(grid, block, shared_mem, stream)
        asked = ((_PROGRAMMATIC_STREAM_SERIALIZATION, overlapping), (_COOPERATIVE, cooperative))
        ids = [which for which, is_asked in asked if is_asked]
        self.attributes = (_Attribute * 2)(*[_Attribute(which, 0, 1) for which in ids])  # kept alive
        self.num_attributes = len(ids)


class _ThreadConfig(threading.local):
    """Two configurations a thread, filled anew for each launch.

    Attributes:
        plain, cooperative: the address of a configuration, and its bytes.
    """

    def __init__(self) -> None:
        configs = [Config((0, 0, 0), (0, 0, 0), 0, 0, cooperative, True) for cooperative in (False, True)]
        self.plain, self.cooperative = ((ctypes.addressof(c), memoryview(c).cast("B")) for c in configs)
        self._keep = configs


_thread = _ThreadConfig()


@functools.cache
def _launch_function() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise BackendUnavailableError(f"the CUDA driver has no cuLaunchKernelEx ({error})") from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_mem: int,
    params: int,
    stream: int,
    cooperative: bool,
) -> None:
    """Launch with programmatic stream serialisation, co-operatively if asked.

    Raises:
        LaunchError: the driver refused; the message has its error number.
    """
    address, content = _thread.cooperative if cooperative else _thread.plain
    _VARYING.pack_into(content, 0, *grid, *block, shared_mem, stream)
    status = _launch_function()(address, function, params, None)
    if status:
        raise error(status)


def error(status: int) -> LaunchError:
    """What the driver's error number means."""
    return LaunchError(f"cuLaunchKernelEx: CUDA error {status}")


def prepare(function: int, config: Config, parameters: bytes, offsets: Sequence[int]) -> Callable[[], int]:
    """A launch, to be made any number of times, by threads at once too: nothing writes to what it reads.

    Args:
        function: the driver's handle.
        config: geometry, stream and attributes.
        parameters: packed as the kernel takes them.
        offsets: of each parameter in these bytes.

    Returns:
        launches, and returns the driver's error number, 0 for none.
    """
    head = 8 * len(offsets)  # bytes: an array of pointers, the parameters behind it
    memory = ctypes.create_string_buffer(head + len(parameters))
    base = ctypes.addressof(memory) + head
    memory.raw = struct.pack(f"{len(offsets)}Q", *[base + offset for offset in offsets]) + parameters
    # What is cast is kept alive by the result.
    config_at, pointers_at = (ctypes.cast(x, ctypes.c_void_p) for x in (ctypes.pointer(config), memory))
    return functools.partial(_launch_function(), config_at, function, pointers_at, None)
