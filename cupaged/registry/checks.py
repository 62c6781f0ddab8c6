"""The kernels of checked mode (``kernels/input_checks.cu``): one size each, no compile-time constants."""

from __future__ import annotations

from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry
from cupaged.registry.terms import div_ceil, smaller

INPUT_CHECKS = "input_checks"  # the module

_THREADS = 256
_MAX_BLOCKS = 1024


def _by_elements(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (smaller(_MAX_BLOCKS, div_ceil(values[0], _THREADS)), 1, 1)


def _by_rows(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (smaller(_MAX_BLOCKS, values[0]), 1, 1)


def _entry(name: str, count: str, holds: dict[str, str], *, rows: bool = False) -> KernelEntry:
    sizes = {"half": 2, "bytes": 1, "i32": 4, "i64": 8, "f32": 4}
    pointers = {**holds, "first": "i64"}
    return KernelEntry(
        module=INPUT_CHECKS,
        entry=name,
        spec_names=(),
        specialise=lambda scalars: {},
        scalar_names=(),
        block=lambda constants: (_THREADS, 1, 1),
        grid_names=(count,),
        grid=_by_rows if rows else _by_elements,
        holds=pointers,
        multiples={pointer: sizes[kind] for pointer, kind in pointers.items()},
        nullable={"tables": ("width",)} if "tables" in holds else {},
    )


_TABLES = {"tables": "i32", "seq_lens": "i32"}

ENTRIES = (
    _entry("input_range", "count", {"values": "i32"}),
    _entry("input_slots", "num_tokens", {"slots": "i64"}),
    _entry("input_blocks", "num_seqs", _TABLES, rows=True),
    _entry("input_finite", "num_rows", {"rows": "half"}, rows=True),
    _entry("input_scales", "count", {"scales": "f32"}),
    _entry("input_sinks", "count", {"sinks": "f32"}),
    _entry("input_scale_bytes", "num_seqs", {"pool": "bytes", **_TABLES}, rows=True),
    _entry("input_value", "num_bytes", {"data": "bytes"}),
)
