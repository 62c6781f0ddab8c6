"""The kernels that read and write pools directly: writers, decode, reduction, streaming, absmax."""

from __future__ import annotations

from collections.abc import Callable

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry, Scalars, div_ceil
from cupaged.registry.rules import check_block_size, check_head_dim, gqa_ratio, head_tiles

WRITE_GROUP = 16  # values one thread of a writer takes


def _attention_spec(scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    return {
        "head_dim": scalars["head_dim"],
        "gqa_ratio": gqa_ratio(scalars["num_q_heads"], scalars["num_kv_heads"]),
        "block_size": scalars["block_size"],
    }


def _tiled_spec(scalars: Scalars) -> dict[str, int]:
    spec = _attention_spec(scalars)
    if scalars["gqa_ratio"] != spec["gqa_ratio"]:
        raise ArgumentValueError(
            f"gqa_ratio: got {scalars['gqa_ratio']}, but num_q_heads / num_kv_heads is {spec['gqa_ratio']}"
        )
    return spec


def _writer_spec(scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    return {"head_dim": scalars["head_dim"], "block_size": scalars["block_size"]}


def _head_dim_spec(scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    return {"head_dim": scalars["head_dim"]}


TOKEN_WARPS = 4


def _attention_constants(spec: Constants, limits: DeviceLimits) -> dict[str, int]:
    return {"token_warps": TOKEN_WARPS}


def _attention_block(constants: Constants) -> Grid:
    return (32 * constants["token_warps"] * head_tiles(constants["gqa_ratio"]), 1, 1)


def _copy_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (values[0], values[1] if len(values) > 1 else 1, values[2] if len(values) > 2 else 1)


_ATTENTION_SCALARS = ("head_dim", "block_size", "num_q_heads", "num_kv_heads")
_CACHE_MULTIPLES = {
    "bf16": {},
    "fp8": {"cache_stride": 16},
    "nvfp4": {"block_stride_bytes": 16, "data_section_bytes": 16},
}


def _decode_entry(fmt: str, split: bool) -> KernelEntry:
    target = {"workspace": "f32"} if split else {"output": "bf16"}
    return KernelEntry(
        module=f"paged_decode_attn_{fmt}",
        entry=f"paged_decode_attn_{'splitk_' if split else ''}{fmt}",
        spec_names=("head_dim", "gqa_ratio", "block_size"),
        specialise=_attention_spec,
        scalar_names=_ATTENTION_SCALARS,
        derived=_attention_constants,
        block=_attention_block,
        # Sequences along x, whose limit is 2^31 - 1.
        grid_names=("num_seqs", "num_kv_heads", *(("num_splits",) if split else ())),
        grid=_copy_grid,
        holds={"q": "bf16", "k_cache": fmt, "v_cache": fmt, "block_tables": "i32", "seq_lens": "i32"}
        | target,
        multiples={"q": 16, "k_cache": 16, "v_cache": 16, "block_tables": 4, "seq_lens": 4, "q_stride": 8}
        | ({"workspace": 8} if split else {"output": 16})
        | _CACHE_MULTIPLES[fmt],
        strided=frozenset({"q"}),
    )


def _reduce_entry(fmt: str) -> KernelEntry:
    return KernelEntry(
        module="paged_decode_attn_reduce",
        entry=f"paged_decode_attn_reduce_{fmt}",
        spec_names=("head_dim",),
        specialise=_head_dim_spec,
        scalar_names=("head_dim",),
        block=lambda constants: (32, 1, 1),
        grid_names=("num_seqs", "num_q_heads"),
        grid=_copy_grid,
        holds={"workspace": "f32", "output": "bf16", "seq_lens": "i32"},
        multiples={"workspace": 8, "output": 16, "seq_lens": 4},
    )


def _writer_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    num_tokens, num_kv_heads = values
    return (div_ceil(num_tokens * num_kv_heads * (constants["head_dim"] // WRITE_GROUP), 256), 1, 1)


def _writer_entry(fmt: str) -> KernelEntry:
    return KernelEntry(
        module=f"reshape_and_cache_{fmt}",
        entry=f"reshape_and_cache_{fmt}",
        spec_names=("head_dim", "block_size"),
        specialise=_writer_spec,
        scalar_names=("head_dim", "block_size"),
        block=lambda constants: (256, 1, 1),
        grid_names=("num_tokens", "num_kv_heads"),
        grid=_writer_grid,
        holds={"key": "bf16", "value": "bf16", "k_cache": fmt, "v_cache": fmt, "slot_mapping": "i64"},
        multiples={
            "key": 16,
            "value": 16,
            "k_cache": 16,
            "v_cache": 16,
            "slot_mapping": 8,
            "key_stride": 8,
            "value_stride": 8,
        }
        | _CACHE_MULTIPLES[fmt],
        strided=frozenset({"key", "value"}),
    )


def _tiled_entry() -> KernelEntry:
    return KernelEntry(
        module="paged_decode_attn_tiled",
        entry="paged_decode_attn_tiled",
        spec_names=("head_dim", "gqa_ratio", "block_size"),
        specialise=_tiled_spec,
        scalar_names=(*_ATTENTION_SCALARS, "gqa_ratio"),
        derived=_attention_constants,
        block=_attention_block,
        grid_names=("num_seqs", "num_kv_heads"),
        grid=_copy_grid,
        holds={
            "q": "bf16",
            "k_pool": "bf16",
            "v_pool": "bf16",
            "tile_blocks": "i32",
            "tile_block_counts": "i32",
            "m_state": "f32",
            "l_state": "f32",
            "o_state": "f32",
            "last_block_valid_slots_per_seq": "i32",
        },
        multiples={"q": 16, "k_pool": 16, "v_pool": 16, "o_state": 8}
        | dict.fromkeys(("tile_blocks", "tile_block_counts", "last_block_valid_slots_per_seq"), 4)
        | dict.fromkeys(("m_state", "l_state"), 4)
        | dict.fromkeys(("blk_stride", "tok_stride", "kvh_stride"), 8),
    )


def _finalize_entry() -> KernelEntry:
    return KernelEntry(
        module="paged_decode_attn_tiled",
        entry="attention_finalize",
        spec_names=("head_dim",),
        specialise=_head_dim_spec,
        scalar_names=("head_dim",),
        block=lambda constants: (div_ceil(constants["head_dim"] // 2, 32) * 32, 1, 1),
        grid_names=("num_seqs", "num_q_heads"),
        grid=_copy_grid,
        holds={"l_state": "f32", "o_state": "f32", "output": "bf16"},
        multiples={"l_state": 4, "o_state": 8, "output": 16},
    )


def _absmax_entry(name: str, grid_names: tuple[str, ...], grid: Callable[..., Grid]) -> KernelEntry:
    return KernelEntry(
        module="bf16_absmax",
        entry=name,
        spec_names=(),
        specialise=lambda scalars: {},
        scalar_names=(),
        block=lambda constants: (256, 1, 1),
        grid_names=grid_names,
        grid=grid,
        holds={"data": "bf16", "out_max": "f32"},
        multiples={"data": 2, "out_max": 4},
        strided=frozenset({"data"}) if name.endswith("rows") else frozenset(),
    )


def _absmax_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (min(256, div_ceil(values[0], 512)), 1, 1)


def _absmax_rows_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    num_rows, row_elems = values
    return (min(1024, num_rows) if row_elems else 0, 1, 1)


ENTRIES = (
    *(_writer_entry(fmt) for fmt in ("bf16", "fp8", "nvfp4")),
    *(_decode_entry(fmt, split) for fmt in ("bf16", "fp8", "nvfp4") for split in (False, True)),
    *(_reduce_entry(fmt) for fmt in ("fp8", "nvfp4")),
    _tiled_entry(),
    _finalize_entry(),
    _absmax_entry("bf16_absmax", ("n_elems",), _absmax_grid),
    _absmax_entry("bf16_absmax_rows", ("num_rows", "row_elems"), _absmax_rows_grid),
)
