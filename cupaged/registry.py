"""What the package knows about its own kernels, without a device.

One `KernelEntry` for each entry point: which compile-time constants it takes and how they follow from
the launch's scalars, its launch geometry, and what its arguments must look like. Launchers and backends
read it; nothing else holds launch numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cupaged.errors import ArgumentTypeError, ArgumentValueError, KernelSourceError

Grid = tuple[int, int, int]
Scalars = Mapping[str, int]
Spec = Mapping[str, int]

SUPPORTED_HEAD_DIMS = (64, 128, 192, 256)
MAX_BLOCK_SIZE = 256
MAX_GQA_RATIO = 16
WRITE_GROUP = 16
MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535

# Allowed array dtypes by what a pointer parameter holds. Narrow formats come typed or as raw bits.
DTYPES: dict[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "uint16"),
    "fp8": ("float8_e4m3fn", "uint8"),
    "nvfp4": ("uint8",),
    "f32": ("float32",),
    "i32": ("int32",),
    "i64": ("int64",),
}


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below a / b, for a >= 0 and b > 0."""
    return -(-a // b)


@dataclass(frozen=True)
class KernelEntry:
    """One entry point of one module.

    Attributes:
        module: stem of the ``.cu`` file.
        entry: function name.
        spec_names: compile-time constants that callers may pin; each is the macro ``SPEC_<NAME>``.
        specialise: spec from the launch's scalars; raises ArgumentValueError for what is unsupported.
        derived: further constants that follow from the spec (never pinned).
        scalar_names: the scalars that `specialise` reads.
        block: threads from the constants.
        grid_names: the scalars that `grid` reads.
        grid: grid from the scalars and the constants; a zero in it means that there is nothing to do.
        holds: what each pointer parameter holds (a key of `DTYPES`); all are checked if given as arrays.
        multiples: parameter -> what its value must be a multiple of (bytes for pointers).
        strided: pointer parameters that may have any stride along their first axis.
    """

    module: str
    entry: str
    spec_names: tuple[str, ...]
    specialise: Callable[[Scalars], dict[str, int]]
    scalar_names: tuple[str, ...]
    block: Callable[[Spec], Grid]
    grid_names: tuple[str, ...]
    grid: Callable[[tuple[int, ...], Spec], Grid]
    holds: Mapping[str, str]
    multiples: Mapping[str, int] = field(default_factory=dict)
    derived: Callable[[Spec], dict[str, int]] = lambda spec: {}
    strided: frozenset[str] = frozenset()

    def constants(self, spec: Spec) -> dict[str, int]:
        """Every compile-time constant of a specialisation."""
        return {**spec, **self.derived(spec)}

    def defines(self, spec: Spec) -> tuple[tuple[str, str], ...]:
        """Macro definitions of a specialisation."""
        return tuple((f"SPEC_{name.upper()}", str(value)) for name, value in self.constants(spec).items())


def head_tiles(gqa_ratio: int) -> int:
    """Groups of 8 query heads that one warp works on."""
    return div_ceil(gqa_ratio, 8)


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in SUPPORTED_HEAD_DIMS:
        allowed = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
        raise ArgumentValueError(f"head_dim: got {head_dim}, allowed are {allowed}")


def _check_block_size(block_size: int) -> None:
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ArgumentValueError(f"block_size: got {block_size}, allowed is 1 to {MAX_BLOCK_SIZE}")


def check_constant(name: str, value: int | str) -> None:
    """Raise ArgumentValueError, or ArgumentTypeError, for a compile-time constant no kernel can have."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed is an int")
    if name == "head_dim":
        _check_head_dim(value)
    elif name == "block_size":
        _check_block_size(value)
    elif name == "gqa_ratio" and not 1 <= value <= MAX_GQA_RATIO:
        raise ArgumentValueError(f"gqa_ratio: got {value}, allowed is 1 to {MAX_GQA_RATIO}")


def gqa_ratio(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads a KV head.

    Raises:
        ArgumentValueError: not a whole ratio of 1 to 16, or no heads at all.
    """
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {num_q_heads}, {num_kv_heads}; "
            "num_q_heads must be a positive multiple of num_kv_heads"
        )
    ratio = num_q_heads // num_kv_heads
    if ratio > MAX_GQA_RATIO:
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {num_q_heads}, {num_kv_heads} (ratio {ratio}); "
            f"allowed are ratios of 1 to {MAX_GQA_RATIO}"
        )
    return ratio


def _attention_spec(scalars: Scalars) -> dict[str, int]:
    _check_head_dim(scalars["head_dim"])
    _check_block_size(scalars["block_size"])
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
    _check_head_dim(scalars["head_dim"])
    _check_block_size(scalars["block_size"])
    return {"head_dim": scalars["head_dim"], "block_size": scalars["block_size"]}


def _head_dim_spec(scalars: Scalars) -> dict[str, int]:
    _check_head_dim(scalars["head_dim"])
    return {"head_dim": scalars["head_dim"]}


TOKEN_WARPS = 4


def _attention_constants(spec: Spec) -> dict[str, int]:
    return {"token_warps": TOKEN_WARPS}


def _attention_block(spec: Spec) -> Grid:
    return (32 * TOKEN_WARPS * head_tiles(spec["gqa_ratio"]), 1, 1)


def _copy_grid(values: tuple[int, ...], spec: Spec) -> Grid:
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
        block=lambda spec: (32, 1, 1),
        grid_names=("num_seqs", "num_q_heads"),
        grid=_copy_grid,
        holds={"workspace": "f32", "output": "bf16", "seq_lens": "i32"},
        multiples={"workspace": 8, "output": 16, "seq_lens": 4},
    )


def _writer_grid(values: tuple[int, ...], spec: Spec) -> Grid:
    num_tokens, num_kv_heads = values
    return (div_ceil(num_tokens * num_kv_heads * (spec["head_dim"] // WRITE_GROUP), 256), 1, 1)


def _writer_entry(fmt: str) -> KernelEntry:
    return KernelEntry(
        module=f"reshape_and_cache_{fmt}",
        entry=f"reshape_and_cache_{fmt}",
        spec_names=("head_dim", "block_size"),
        specialise=_writer_spec,
        scalar_names=("head_dim", "block_size"),
        block=lambda spec: (256, 1, 1),
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
        block=lambda spec: (div_ceil(spec["head_dim"] // 2, 32) * 32, 1, 1),
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
        block=lambda spec: (256, 1, 1),
        grid_names=grid_names,
        grid=grid,
        holds={"data": "bf16", "out_max": "f32"},
        multiples={"data": 2, "out_max": 4},
        strided=frozenset({"data"}) if name.endswith("rows") else frozenset(),
    )


def _absmax_grid(values: tuple[int, ...], spec: Spec) -> Grid:
    return (min(256, div_ceil(values[0], 512)), 1, 1)


def _absmax_rows_grid(values: tuple[int, ...], spec: Spec) -> Grid:
    num_rows, row_elems = values
    return (min(1024, num_rows) if row_elems else 0, 1, 1)


_ENTRIES: dict[tuple[str, str], KernelEntry] = {
    (entry.module, entry.entry): entry
    for entry in (
        *(_writer_entry(fmt) for fmt in ("bf16", "fp8", "nvfp4")),
        *(_decode_entry(fmt, split) for fmt in ("bf16", "fp8", "nvfp4") for split in (False, True)),
        *(_reduce_entry(fmt) for fmt in ("fp8", "nvfp4")),
        _tiled_entry(),
        _finalize_entry(),
        _absmax_entry("bf16_absmax", ("n_elems",), _absmax_grid),
        _absmax_entry("bf16_absmax_rows", ("num_rows", "row_elems"), _absmax_rows_grid),
    )
}


def entries() -> tuple[KernelEntry, ...]:
    """Every kernel of the package."""
    return tuple(_ENTRIES.values())


def find(module: str, entry: str) -> KernelEntry:
    """The package's kernel of that module and entry.

    Raises:
        KernelSourceError: there is none; the message lists those there are.
    """
    try:
        return _ENTRIES[module, entry]
    except KeyError:
        known = ", ".join(f"{m}:{e}" for m, e in sorted(_ENTRIES))
        raise KernelSourceError(f"no kernel {module}:{entry}; there are {known}") from None
