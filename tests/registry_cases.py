"""The kernels of the registry by kind, and usual constants for each."""

from __future__ import annotations

import pytest

from cupaged.registry import (
    DeviceLimits,
    KernelEntry,
    entries,
    limits_of_capability,
)
from cupaged.registry.decode import planned_spec
from cupaged.source import Parameter, kernels_dir, parse_parameters

HOPPER = limits_of_capability(90, 132)
DEVICES = [limits_of_capability(capability, 100) for capability in (80, 86, 89, 90, 100, 120)]
EVERY = pytest.mark.parametrize("entry", entries(), ids=lambda e: e.entry)
ATTENTION = [e for e in entries() if "gqa_ratio" in e.spec_names]
DECODE = [e for e in ATTENTION if e.module in ("paged_decode_attn_bf16", "paged_decode_attn_fp8",
                                               "paged_decode_attn_nvfp4")]  # fmt: skip
PINNED = [e for e in entries() if e.specialise is None]
TILED = [e for e in ATTENTION if "tiled" in e.entry]
WITH_BLOCKS = [e for e in entries() if "block_size" in e.spec_names]
WITH_HEAD_DIM = [e for e in entries() if "head_dim" in e.spec_names]


def text_of(entry: KernelEntry) -> str:
    return (kernels_dir() / f"{entry.module}.cu").read_text()


def parameters_of(entry: KernelEntry) -> dict[str, Parameter]:
    return {p.name: p for p in parse_parameters(text_of(entry), entry.entry)}


def specialise(entry: KernelEntry, **changed: int) -> dict[str, int]:
    usual = {"head_dim": 64, "block_size": 16, "num_q_heads": 8, "num_kv_heads": 2, "gqa_ratio": 4}
    usual |= {"data_section_bytes": 1024} | changed
    if entry.specialise is None:
        spec = {"gqa_ratio": usual["num_q_heads"] // usual["num_kv_heads"]}
        usual |= spec
        return planned_spec(**{name: usual[name] for name in entry.spec_names if name in usual})
    return entry.specialise({name: usual[name] for name in entry.scalar_names})


def constants(entry: KernelEntry, limits: DeviceLimits = HOPPER, **changed: int) -> dict[str, int]:
    return entry.constants(specialise(entry, **changed), limits)


def grid_of(entry: KernelEntry, **sizes: int) -> tuple[int, int, int]:
    return entry.grid(tuple(sizes[name] for name in entry.grid_names), constants(entry), HOPPER)
