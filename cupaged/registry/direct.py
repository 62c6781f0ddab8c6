"""The kernels that read and write pools directly: writers, reduction, absmax."""

from __future__ import annotations

from collections.abc import Callable

from cupaged.registry.decode import CACHE_MULTIPLES
from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry, Scalars, grid_of_two
from cupaged.registry.rules import check_block_size, check_head_dim, head_dim_spec
from cupaged.registry.terms import div_ceil, larger, smaller

WRITE_VALUES = {"bf16": 8, "fp8": 16, "nvfp4": 16}  # that one thread of a writer takes, of K and of V
ABSMAX_PIECE = 512  # 16-byte vectors that a warp of absmax takes at a time
ABSMAX_BLOCKS = 32_768  # of 8 warps each, at most


def _writer_spec(scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    return {"head_dim": scalars["head_dim"], "block_size": scalars["block_size"]}


def _reduce_entry(fmt: str) -> KernelEntry:
    return KernelEntry(
        module="paged_decode_attn_reduce",
        entry=f"paged_decode_attn_reduce_{fmt}",
        spec_names=("head_dim",),
        specialise=head_dim_spec,
        scalar_names=("head_dim",),
        block=lambda constants: (32, 1, 1),
        grid_names=("num_seqs", "num_q_heads"),
        grid=grid_of_two,
        holds={"workspace": "f32", "output": "bf16", "seq_lens": "i32"},
        multiples={"workspace": 8, "output": 16, "seq_lens": 4},
    )


def _writer_entry(fmt: str) -> KernelEntry:
    def grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
        num_tokens, num_kv_heads = values
        groups = constants["head_dim"] // WRITE_VALUES[fmt]
        return (div_ceil(num_tokens * num_kv_heads * groups, 256), 1, 1)

    return KernelEntry(
        module=f"reshape_and_cache_{fmt}",
        entry=f"reshape_and_cache_{fmt}",
        spec_names=("head_dim", "block_size"),
        specialise=_writer_spec,
        scalar_names=("head_dim", "block_size"),
        block=lambda constants: (256, 1, 1),
        grid_names=("num_tokens", "num_kv_heads"),
        grid=grid,
        holds={"key": "bf16", "value": "bf16", "k_cache": fmt, "v_cache": fmt, "slot_mapping": "i64"}
        | ({"k_scales": "f32", "v_scales": "f32"} if fmt != "bf16" else {}),
        multiples={
            "key": 16,
            "value": 16,
            "k_cache": 16,
            "v_cache": 16,
            "slot_mapping": 8,
            "key_stride": 8,
            "value_stride": 8,
        }
        | CACHE_MULTIPLES[fmt]
        | ({"cache_stride": 8} if fmt == "bf16" else {"k_scales": 4, "v_scales": 4}),
        strided=frozenset({"key", "value"}),
        nullable={"key": (), "value": (), "k_cache": ("key", "num_slots"), "v_cache": ("value", "num_slots")}
        | ({"k_scales": (), "v_scales": ()} if fmt != "bf16" else {}),
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
    return _absmax_rows_grid((1, *values), constants, limits)


def _absmax_rows_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    num_rows, row_elems = values
    pieces = larger(1, div_ceil(row_elems // 8, ABSMAX_PIECE))
    return (smaller(ABSMAX_BLOCKS, div_ceil(num_rows * pieces, 8)) * smaller(1, row_elems), 1, 1)


ENTRIES = (
    *(_writer_entry(fmt) for fmt in ("bf16", "fp8", "nvfp4")),
    *(_reduce_entry(fmt) for fmt in ("fp8", "nvfp4")),
    _absmax_entry("bf16_absmax", ("n_elems",), _absmax_grid),
    _absmax_entry("bf16_absmax_rows", ("num_rows", "row_elems"), _absmax_rows_grid),
)
