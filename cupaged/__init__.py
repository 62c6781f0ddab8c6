"""Paged-KV-cache decode attention for NVIDIA GPUs, without a framework.

The launchers are in `cupaged.ops`, cache layouts and packers in `cupaged.formats`, host references in
`cupaged.reference`. Importing the package loads neither CuPy nor a compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cupaged.backends.base import GpuBackend
from cupaged.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailableError,
    CompileError,
    CupagedError,
    KernelFault,
    KernelSourceError,
    LaunchError,
)
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.pointers import DevicePtr
from cupaged.registry import div_ceil

if TYPE_CHECKING:
    from cupaged.backends.cupy import CupyBackend
    from cupaged.backends.emulator import EmulatorBackend

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendUnavailableError",
    "CompileError",
    "CupagedError",
    "CupyBackend",
    "DevicePtr",
    "EmulatorBackend",
    "GpuBackend",
    "KernelFault",
    "KernelHandle",
    "KernelLaunch",
    "KernelSourceError",
    "LaunchError",
    "__version__",
    "div_ceil",
]


_SUBMODULES = ("calibration", "decode", "formats", "ops", "reference")


def __getattr__(name: str) -> object:
    if name == "CupyBackend":
        from cupaged.backends.cupy import CupyBackend

        return CupyBackend
    if name == "EmulatorBackend":
        from cupaged.backends.emulator import EmulatorBackend

        return EmulatorBackend
    if name in _SUBMODULES:
        return importlib.import_module(f"cupaged.{name}")
    raise AttributeError(f"module 'cupaged' has no attribute {name!r}")
