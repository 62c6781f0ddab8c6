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
from typing import Any

from cupaged.errors import BackendUnavailableError, LaunchError

_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_VARYING = struct.Struct("=7I4xQ")  # of _Config: grid, block, shared_mem, stream


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class _ThreadConfig(threading.local):
    """One configuration a thread, filled anew for each launch."""

    def __init__(self) -> None:
        attributes = (_Attribute * 2)()
        attributes[0].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[0].value = 1
        attributes[1].id = _COOPERATIVE
        self.cooperative = attributes[1]
        self.config = _Config()
        self.config.attributes = attributes
        self.config.num_attributes = 2
        self.address = ctypes.byref(self.config)
        self.bytes = memoryview(self.config).cast("B")


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
    thread = _thread
    _VARYING.pack_into(thread.bytes, 0, *grid, *block, shared_mem, stream)
    thread.cooperative.value = cooperative
    status = _launch_function()(thread.address, function, params, None)
    if status:
        raise LaunchError(f"cuLaunchKernelEx: CUDA error {status}")
