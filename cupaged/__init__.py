"""Paged-KV-cache decode attention for NVIDIA GPUs, without a framework.

The launchers are in `cupaged.ops`, cache layouts and packers in `cupaged.formats`, host references in
`cupaged.reference`. Importing the package loads neither CuPy nor a compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cupaged.backends.base import GpuBackend
from cupaged.errors import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailableError,
    CheckedModeError,
    CompileError,
    CupagedError,
    KernelFault,
    KernelSourceError,
    LaunchError,
    OutOfBlocksError,
)
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.pointers import DevicePtr
from cupaged.registry import div_ceil
from cupaged.version import __version__

if TYPE_CHECKING:
    from cupaged.backends.cupy import CupyBackend
    from cupaged.backends.emulator import EmulatorBackend
    from cupaged.blocks import BlockAllocator
    from cupaged.checked import checked_mode
    from cupaged.kv import KVCache
    from cupaged.merge import merge_states
    from cupaged.streaming import StreamingDecoder

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendUnavailableError",
    "BlockAllocator",
    "CheckedModeError",
    "CompileError",
    "CupagedError",
    "CupyBackend",
    "DevicePtr",
    "EmulatorBackend",
    "GpuBackend",
    "KVCache",
    "KernelFault",
    "KernelHandle",
    "KernelLaunch",
    "KernelSourceError",
    "LaunchError",
    "OutOfBlocksError",
    "StreamingDecoder",
    "__version__",
    "checked_mode",
    "div_ceil",
    "merge_states",
]


_SUBMODULES = (
    "ahead",
    "blocks",
    "calibration",
    "cascade",
    "decode",
    "formats",
    "interop",
    "kv",
    "ops",
    "reference",
    "streaming",
    "support",
    "tables",
)

# Public names that are loaded when they are first asked for -> the module that has them.
_LAZY = {
    "BlockAllocator": "cupaged.blocks",
    "CupyBackend": "cupaged.backends.cupy",
    "EmulatorBackend": "cupaged.backends.emulator",
    "KVCache": "cupaged.kv",
    "StreamingDecoder": "cupaged.streaming",
    "checked_mode": "cupaged.checked",
    "merge_states": "cupaged.merge",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"cupaged.{name}")
    raise AttributeError(f"module 'cupaged' has no attribute {name!r}")
