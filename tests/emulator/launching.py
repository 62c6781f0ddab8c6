"""Short ways to launch the kernels in ``tests/emulator/kernels``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.backends.emulator import EmulatorBackend
from cupaged.launch import KernelLaunch

KERNELS = Path(__file__).resolve().parent / "kernels"


def launch(
    gpu: EmulatorBackend,
    module: str,
    entry: str,
    *arguments: Any,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: int | tuple[int, int, int] = 32,
    shared_mem: int = 0,
    cooperative: bool = False,
    **defines: int,
) -> None:
    """Launch one kernel: arrays go as pointers, numbers as the kind of their parameter."""
    kernel = gpu.kernel(KERNELS / f"{module}.cu", entry, **defines)
    threads = (block, 1, 1) if isinstance(block, int) else block
    if cooperative:
        _launch_cooperatively(gpu, kernel, arguments, grid, threads, shared_mem)
        return
    builder = KernelLaunch(gpu, kernel).grid(grid).block(threads).shared_mem(shared_mem)
    for parameter, value in zip(kernel.parameters, arguments, strict=True):
        getattr(builder, f"arg_{parameter.kind}")(value)
    builder.launch(gpu.null_stream())


def _launch_cooperatively(
    gpu: EmulatorBackend, kernel: Any, arguments: Any, grid: Any, block: Any, shared_mem: int
) -> None:
    values = [gpu.pointer(a) if isinstance(a, np.ndarray) else a for a in arguments]
    buffer = bytearray(kernel.layout.size)
    kernel.layout.pack_into(buffer, values)
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    base = ctypes.addressof(view)
    pointers = (ctypes.c_void_p * len(values))(*[base + offset for offset in kernel.layout.offsets])
    loaded = kernel.select(values).loaded
    gpu.launch_packed(loaded, grid, block, shared_mem, ctypes.addressof(pointers), 0, {}, cooperative=True)
