"""The kernels beside attention: tokens gathered, blocks copied, states merged. No compile-time constants."""

from __future__ import annotations

from collections.abc import Callable

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import MAX_GRID_YZ, Constants, DeviceLimits, Grid, KernelEntry, Scalars
from cupaged.registry.terms import div_ceil, larger, smaller

READ_GROUP = 16  # values one thread of a gather takes
MERGE_VECTOR = 4  # values one lane of a merge takes at once

_THREADS = 256
_MERGE_WARPS = 4  # rows of a block of threads
_COPY_BYTES = 16 * _THREADS  # bytes that one step of a block of threads copies


def _head_dim_check(multiple: int) -> Callable[[Scalars], dict[str, int]]:
    def check(scalars: Scalars) -> dict[str, int]:
        head_dim = scalars["head_dim"]
        if head_dim < 1 or head_dim % multiple:
            raise ArgumentValueError(
                f"head_dim: got {head_dim}, allowed are positive multiples of {multiple}"
            )
        return {}

    return check


def _gather_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    seq_len, num_kv_heads, head_dim = values
    return (div_ceil(seq_len * num_kv_heads * (head_dim // READ_GROUP), _THREADS), 1, 1)


def _gather_entry(output: str) -> KernelEntry:
    strides = ("block_stride_bytes", "token_stride_bytes", "head_stride_bytes", "data_section_bytes")
    return KernelEntry(
        module="cache_blocks",
        entry=f"gather_tokens_{output}",
        spec_names=(),
        specialise=_head_dim_check(READ_GROUP),
        scalar_names=("head_dim",),
        block=lambda constants: (_THREADS, 1, 1),
        grid_names=("seq_len", "num_kv_heads", "head_dim"),
        grid=_gather_grid,
        holds={"pool": "bytes", "block_ids": "i32", "scales": "f32", "output": output},
        multiples={"pool": 16, "block_ids": 4, "scales": 4, "output": 16}
        # A group of 16 NVFP4 values is 8 bytes, those of the other formats are 16 and more.
        | dict.fromkeys(strides, 8),
        nullable={"pool": ("num_blocks",), "scales": ()},
    )


def _copy_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    num_pairs, data_bytes = values
    return (num_pairs, larger(1, smaller(MAX_GRID_YZ, div_ceil(data_bytes, 4 * _COPY_BYTES))), 2)


def _copy_entry() -> KernelEntry:
    return KernelEntry(
        module="cache_blocks",
        entry="copy_cache_blocks",
        spec_names=(),
        specialise=lambda scalars: {},
        scalar_names=(),
        block=lambda constants: (_THREADS, 1, 1),
        grid_names=("num_pairs", "data_bytes"),
        grid=_copy_grid,
        holds=dict.fromkeys(("k_source", "v_source", "k_target", "v_target"), "bytes") | {"pairs": "i32"},
        multiples={"pairs": 4}
        | dict.fromkeys(("k_source", "v_source", "k_target", "v_target"), 16)
        | dict.fromkeys(("source_stride_bytes", "source_section_bytes"), 16)
        | dict.fromkeys(("target_stride_bytes", "target_section_bytes"), 16),
        nullable={"k_source": (), "v_source": ()}
        | {f"{side}_target": (f"{side}_source", "num_target_blocks") for side in "kv"},
    )


def _merge_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (div_ceil(values[0], _MERGE_WARPS), 1, 1)


def _merge_entry(name: str, source: str, target: str) -> KernelEntry:
    vector = {"bf16": 2 * MERGE_VECTOR, "f16": 2 * MERGE_VECTOR, "f32": 4 * MERGE_VECTOR}
    return KernelEntry(
        module="merge_states",
        entry=name,
        spec_names=(),
        specialise=_head_dim_check(MERGE_VECTOR),
        scalar_names=("head_dim",),
        block=lambda constants: (32 * _MERGE_WARPS, 1, 1),
        grid_names=("num_rows",),
        grid=_merge_grid,
        holds={"outputs": source, "lses": "f32", "out": target, "out_lse": "f32"},
        multiples={"outputs": vector[source], "lses": 4, "out": vector[target], "out_lse": 4}
        | {"part_stride": MERGE_VECTOR},
        strided=frozenset({"outputs", "lses"}),
        nullable={"out_lse": ()},
    )


ENTRIES = (
    _gather_entry("f32"),
    _gather_entry("bf16"),
    _copy_entry(),
    _merge_entry("merge_states_bf16", "bf16", "bf16"),
    _merge_entry("merge_states_f32", "f32", "f32"),
    _merge_entry("merge_states_f32_to_bf16", "f32", "bf16"),
    _merge_entry("merge_states_f16", "f16", "f16"),
    _merge_entry("merge_states_f32_to_f16", "f32", "f16"),
)
