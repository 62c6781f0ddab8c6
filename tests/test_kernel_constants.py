"""Numbers that a kernel's source and the registry both state are the same."""

from __future__ import annotations

import re

import pytest

from cupaged.registry import direct, entries, find, ring, rules, tiled, upkeep
from cupaged.source import kernels_dir

WARP = 32


def stated(file: str, name: str) -> int:
    """What ``constexpr ... name = number;`` of a source says."""
    found = re.findall(rf"^constexpr \w+ {name} = (\d+);", (kernels_dir() / file).read_text(), re.MULTILINE)
    assert len(found) == 1, (file, name)
    return int(found[0])


@pytest.mark.parametrize(
    ("file", "name", "declared"),
    [
        ("merge_states.cu", "MERGE_VECTOR", upkeep.MERGE_VECTOR),
        ("cache/dequantise.cuh", "READ_GROUP", upkeep.READ_GROUP),
        ("bf16_absmax.cu", "ABSMAX_WARPS", find("bf16_absmax", "bf16_absmax").block({})[0] // WARP),
        ("bf16_absmax.cu", "PIECE_LOADS", direct.ABSMAX_PIECE // WARP),
        ("bf16_absmax.cu", "VECTOR", 8),
        ("input_checks.cu", "CHECK_THREADS", find("input_checks", "input_range").block({})[0]),
        ("ring/planned.cuh", "MAX_PLANNED_SEQS", ring.MAX_PLANNED_SEQS),
        ("ring/spec.cuh", "LATENCY_LEVELS", rules.LATENCY_LEVELS),
        ("attention/fragments.cuh", "TILE_TOKENS", ring.TILE_TOKENS),
        ("attention/fragments.cuh", "TILE_HEADS", ring.TILE_ROWS),
        ("attention/tiled.cuh", "MAX_HEAD_TILES", tiled.MOST_WARPS),
    ],
)
def test_kernel_and_registry_agree(file: str, name: str, declared: int) -> None:
    assert stated(file, name) == declared


def test_bounds_in_sources_are_the_threads_of_launches() -> None:
    bounds = {}
    for module in {entry.module for entry in entries()}:
        text = (kernels_dir() / f"{module}.cu").read_text()
        bounds |= {
            (module, name): int(threads)
            for threads, name in re.findall(r"__launch_bounds__\((\d+)\)\s+(\w+)\(", text)
        }
    assert len(bounds) > 20
    for key, threads in bounds.items():
        assert find(*key).block({}) == (threads, 1, 1), key
