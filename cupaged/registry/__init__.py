"""What the package knows about its own kernels, without a device.

One `KernelEntry` for each entry point: which compile-time constants it takes and how they follow from
the launch's scalars, its launch geometry, and what its arguments must look like. Launchers, backends and
the manifests of `cupaged.ahead` read it; no other module holds launch numbers. Those that a kernel's source
states for itself (`MERGE_VECTOR`, ``__launch_bounds__``) are compared with these by tests.
"""

from __future__ import annotations

import difflib

from cupaged.errors import KernelSourceError
from cupaged.registry import checks, decode, direct, tiled, upkeep
from cupaged.registry.buffers import buffer_expressions
from cupaged.registry.entry import (
    DTYPES,
    MAX_GRID_X,
    MAX_GRID_YZ,
    Constants,
    DeviceLimits,
    Grid,
    KernelEntry,
    Scalars,
    dtype_names,
    limits_of_capability,
)
from cupaged.registry.nulls import NullPointers
from cupaged.registry.rules import (
    MAX_BLOCK_SIZE,
    MAX_GQA_RATIO,
    SUPPORTED_HEAD_DIMS,
    check_constant,
    gqa_ratio,
    head_tiles,
)
from cupaged.registry.terms import div_ceil

__all__ = [
    "DTYPES",
    "MAX_BLOCK_SIZE",
    "MAX_GQA_RATIO",
    "MAX_GRID_X",
    "MAX_GRID_YZ",
    "SUPPORTED_HEAD_DIMS",
    "Constants",
    "DeviceLimits",
    "Grid",
    "KernelEntry",
    "NullPointers",
    "Scalars",
    "buffer_expressions",
    "check_constant",
    "div_ceil",
    "dtype_names",
    "entries",
    "find",
    "gqa_ratio",
    "head_tiles",
    "limits_of_capability",
]

_ENTRIES: dict[tuple[str, str], KernelEntry] = {
    (entry.module, entry.entry): entry
    for entry in (*direct.ENTRIES, *tiled.ENTRIES, *decode.ENTRIES, *checks.ENTRIES, *upkeep.ENTRIES)
}

_MOST_NEAREST = 3


def entries() -> tuple[KernelEntry, ...]:
    """Every kernel of the package."""
    return tuple(_ENTRIES.values())


def find(module: str, entry: str) -> KernelEntry:
    """The package's kernel of that module and entry.

    Raises:
        KernelSourceError: there is none; the message has the nearest names, or all where none is near.
    """
    try:
        return _ENTRIES[module, entry]
    except KeyError:
        homes = [m for m, e in _ENTRIES if e == entry]
        if homes:
            hint = f'did you mean gpu.kernel("{homes[0]}", "{entry}")?'
        else:
            names = {f"{m}:{e}": m for m, e in sorted(_ENTRIES)}
            near = [name for name, m in names.items() if m == module]
            near = near or difflib.get_close_matches(f"{module}:{entry}", names, _MOST_NEAREST)
            hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(names)}"
        raise KernelSourceError(f"no kernel {module}:{entry}; {hint}") from None
