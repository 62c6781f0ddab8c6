"""The decode kernels: single pass and split-K over each format, and what `Decoder` runs."""

from __future__ import annotations

from collections.abc import Callable

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry, Scalars
from cupaged.registry.ring import (
    FORMATS,
    TILE_ROWS,
    TILE_TOKENS,
    RingProblem,
    blocks_of_slice,
    most_row_tiles,
    num_slices,
    num_threads,
    ring_constants,
    shared_bytes,
)
from cupaged.registry.rules import (
    LATENCY_LEVELS,
    MAX_GROUP_TOKENS,
    check_block_size,
    check_head_dim,
    gqa_ratio,
)
from cupaged.registry.terms import smaller

_SHARED_ROWS = 32

CACHE_MULTIPLES: dict[str, dict[str, int]] = {
    "bf16": {},
    "fp8": {"cache_stride": 16},
    "nvfp4": {"block_stride_bytes": 16, "data_section_bytes": 16},
}


def is_joined(block_size: int, num_kv_heads: int, head_dim: int, data_section_bytes: int) -> bool:
    """Whether an NVFP4 block is one tile, its scales right behind its values: then one copy fetches it."""
    return block_size == TILE_TOKENS and data_section_bytes == block_size * num_kv_heads * head_dim // 2


# ---- single pass and split-K -------------------------------------------------------------------------


def _split_spec(fmt: str, scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    spec = {
        "head_dim": scalars["head_dim"],
        "gqa_ratio": gqa_ratio(scalars["num_q_heads"], scalars["num_kv_heads"]),
        "num_kv_heads": scalars["num_kv_heads"],
        "block_size": scalars["block_size"],
    }
    if fmt == "nvfp4":
        spec["joined"] = int(
            is_joined(
                spec["block_size"], spec["num_kv_heads"], spec["head_dim"], scalars["data_section_bytes"]
            )
        )
    return spec


def _split_problem(fmt: str, spec: Constants) -> RingProblem:
    return RingProblem(
        fmt,
        fmt,
        spec["num_kv_heads"],
        spec["head_dim"],
        spec["block_size"],
        spec["gqa_ratio"],
        joined=bool(spec.get("joined")),
    )


def _split_entry(fmt: str, split: bool) -> KernelEntry:
    target = {"workspace": "f32"} if split else {"output": "bf16"}
    layout = ("data_section_bytes",) if fmt == "nvfp4" else ()

    def derived(spec: Constants, limits: DeviceLimits) -> dict[str, int]:
        return {**ring_constants(_split_problem(fmt, spec), limits), "split": int(split)}

    def grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
        pieces = values[0] * values[1] if split else values[0]
        problem = _split_problem(fmt, constants)
        return (
            smaller(pieces, blocks_of_slice(problem, constants, limits)),
            num_slices(problem, constants),
            1,
        )

    return KernelEntry(
        module=f"paged_decode_attn_{fmt}",
        entry=f"paged_decode_attn_{'splitk_' if split else ''}{fmt}",
        spec_names=("head_dim", "gqa_ratio", "num_kv_heads", "block_size", *(("joined",) if layout else ())),
        specialise=lambda scalars: _split_spec(fmt, scalars),
        scalar_names=("head_dim", "block_size", "num_q_heads", "num_kv_heads", *layout),
        derived=derived,
        block=lambda constants: (num_threads(constants), 1, 1),
        grid_names=("num_seqs", *(("num_splits",) if split else ())),
        grid=grid,
        holds={"q": "bf16", "k_cache": fmt, "v_cache": fmt, "block_tables": "i32", "seq_lens": "i32"}
        | target,
        multiples={"q": 16, "k_cache": 16, "v_cache": 16, "block_tables": 4, "seq_lens": 4, "q_stride": 8}
        | ({"workspace": 8} if split else {"output": 16})
        | CACHE_MULTIPLES[fmt],
        strided=frozenset({"q"}),
        nullable={"block_tables": ("max_blocks_per_seq",)},
        shared_mem=lambda constants: shared_bytes(_split_problem(fmt, constants), constants),
        overlapping=True,
    )


# ---- what Decoder runs -------------------------------------------------------------------------------

_PLANNED_SPEC = (
    "key_format",
    "value_format",
    "head_dim",
    "gqa_ratio",
    "num_kv_heads",
    "block_size",
    "heads_first",
    "joined",
    "query_tokens",
    "causal",
    "soft_cap",
    "query_f16",
    "many",
    "latency",
)


def planned_spec(**given: int) -> dict[str, int]:
    """Every compile-time constant of the planned kernels, with defaults for those not given."""
    spec = dict.fromkeys(_PLANNED_SPEC, 0) | {"query_tokens": 1} | given
    if set(spec) != set(_PLANNED_SPEC):
        unknown = sorted(set(spec) - set(_PLANNED_SPEC))
        raise ArgumentValueError(f"got the constants {unknown}, allowed are {', '.join(_PLANNED_SPEC)}")
    check_head_dim(spec["head_dim"])
    check_block_size(spec["block_size"])
    return spec


def planned_problem(spec: Constants, chunked: bool = False) -> RingProblem:
    """What the planned kernels of a specialisation do, or those that decode chunks."""
    key_format, value_format = FORMATS[spec["key_format"]], FORMATS[spec["value_format"]]
    most_warps, most_row_tiles = 12, 3 if key_format == value_format else 2
    if spec["query_f16"] and key_format == "bf16":
        most_warps, most_row_tiles = 8, 1  # q takes two operands
    elif key_format == "bf16" and spec["query_tokens"] > 1:
        most_row_tiles = 2
    elif key_format == value_format != "bf16" and not chunked:
        most_warps = 16
    return RingProblem(
        key_format,
        value_format,
        spec["num_kv_heads"],
        spec["head_dim"],
        spec["block_size"],
        spec["gqa_ratio"] * spec["query_tokens"],
        bool(spec["heads_first"]),
        bool(spec["joined"]),
        spec["latency"],
        most_warps,
        most_row_tiles,
    )


def group_tokens(spec: Constants) -> int:
    """Query tokens that best read K and V together where all of them see all of it.

    As many as one warp has rows for; where that is few, what several warps have, which share a stage.
    """
    most = most_row_tiles(planned_problem(spec))
    rows = TILE_ROWS * most if most > 1 else _SHARED_ROWS
    return max(1, min(MAX_GROUP_TOKENS, rows // spec["gqa_ratio"]))


def latency_levels(spec: Constants, limits: DeviceLimits) -> tuple[int, ...]:
    """For each latency level the lowest one whose blocks have the same shape."""
    levels = range(LATENCY_LEVELS)
    shapes = [ring_constants(planned_problem({**spec, "latency": level}), limits) for level in levels]
    return tuple(shapes.index(shape) for shape in shapes)


def _planned_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    problem = planned_problem(constants)
    columns = smaller(1, values[0]) * blocks_of_slice(problem, constants, limits)
    return (columns, num_slices(problem, constants), 1)


def num_parts(constants: Constants, limits: DeviceLimits) -> int:
    """Rows of the planned kernels' workspace: two parts of every query row for each block of a slice."""
    problem = planned_problem(constants)
    rows = min(problem.head_rows, TILE_ROWS * constants["block_head_tiles"]) * constants["block_heads"]
    return blocks_of_slice(problem, constants, limits) * (2 * num_slices(problem, constants) * rows)


def check_resident(spec: Constants, limits: DeviceLimits) -> None:
    """Raise ArgumentValueError where the device cannot hold all blocks of the co-operative launch at once."""
    problem = planned_problem(spec)
    constants = ring_constants(problem, limits)
    slices = num_slices(problem, constants)
    blocks, threads = blocks_of_slice(problem, constants, limits) * slices, num_threads(constants)
    if limits.cooperative_threads is None:
        fits = blocks <= limits.num_sms * constants["blocks_per_sm"]
        most = f"{limits.num_sms * constants['blocks_per_sm']} such blocks"
    else:
        fits = blocks * threads <= limits.cooperative_threads
        most = f"{limits.cooperative_threads} threads"
    if not fits:
        heads = spec["num_kv_heads"]
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {heads * spec['gqa_ratio']}, {heads}, which take {blocks} "
            f"blocks of {threads} threads that must be resident together; this device holds {most} "
            "(with split_tokens, they need not be)"
        )


def _chunked_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    problem = planned_problem(constants, chunked=True)
    pieces = values[0] * values[1]
    return (smaller(pieces, blocks_of_slice(problem, constants, limits)), num_slices(problem, constants), 1)


_INPUTS = {"q": "half", "k_cache": "bytes", "v_cache": "bytes", "block_tables": "i32", "seq_lens": "i32"} | {
    "k_scales": "f32",
    "v_scales": "f32",
}
_INPUT_MULTIPLES = dict.fromkeys(
    ("q", "k_cache", "v_cache", "k_block_stride", "v_block_stride", "k_scale_section", "v_scale_section"), 16
) | {"block_tables": 4, "seq_lens": 4, "k_scales": 4, "v_scales": 4, "q_stride": 8}


def _pinned_entry(
    number: int,
    entry: str,
    grid_names: tuple[str, ...],
    grid: Callable[[tuple[int, ...], Constants, DeviceLimits], Grid],
    holds: dict[str, str],
    multiples: dict[str, int],
    threads: int | None = None,
) -> KernelEntry:
    """An entry of the planned module: its specialisation is pinned when the handle is made."""

    def derived(spec: Constants, limits: DeviceLimits) -> dict[str, int]:
        return {**ring_constants(planned_problem(spec, chunked=number == 1), limits), "entry": number}

    return KernelEntry(
        module="paged_decode_attn_planned",
        entry=entry,
        spec_names=_PLANNED_SPEC,
        specialise=None,
        scalar_names=(),
        derived=derived,
        block=lambda constants: (threads or num_threads(constants), 1, 1),
        grid_names=grid_names,
        grid=grid,
        holds=holds,
        multiples=multiples,
        strided=frozenset({"q"} & holds.keys()),
        nullable=({"block_tables": ("max_blocks_per_seq",)} if "block_tables" in holds else {})
        | dict.fromkeys({"k_scales", "v_scales", "sinks", "lse"} & holds.keys(), ())
        | ({"plan": ()} if number == 0 else {}),
        shared_mem=lambda c: 0 if threads else shared_bytes(planned_problem(c, chunked=number == 1), c),
        cooperative=number == 0,
        overlapping=True,
    )


_PLANNED = _pinned_entry(
    0,
    "paged_decode_attn_planned",
    ("num_seqs",),
    _planned_grid,
    {**_INPUTS, "output": "half", "lse": "f32", "part_o": "f32", "part_state": "f32", "counters": "u32"}
    | {"plan": "u32", "sinks": "f32"},
    {**_INPUT_MULTIPLES, "output": 16, "lse": 4, "part_o": 16, "part_state": 8}
    | dict.fromkeys(("counters", "plan", "sinks"), 4),
)
_CHUNKED = _pinned_entry(
    1,
    "paged_decode_attn_chunked",
    ("num_seqs", "max_chunks"),
    _chunked_grid,
    {**_INPUTS, "states": "f32", "sinks": "f32"},
    {**_INPUT_MULTIPLES, "states": 8, "sinks": 4},
)
_MERGE_CHUNKS = _pinned_entry(
    2,
    "paged_decode_attn_merge_chunks",
    ("num_seqs",),
    lambda values, constants, limits: (
        values[0],
        constants["num_kv_heads"] * constants["gqa_ratio"] * constants["query_tokens"],
        1,
    ),
    {"states": "f32", "output": "half", "lse": "f32", "seq_lens": "i32", "sinks": "f32"},
    {"states": 8, "output": 16, "lse": 4, "seq_lens": 4, "sinks": 4},
    threads=32,
)
_PLAN = _pinned_entry(
    3,
    "paged_decode_attn_plan",
    ("num_seqs",),
    lambda values, constants, limits: (smaller(1, values[0]), 1, 1),
    {"plan": "u32", "seq_lens": "i32"},
    {"plan": 4, "seq_lens": 4},
    threads=1024,
)

ENTRIES = (
    *(_split_entry(fmt, split) for fmt in FORMATS for split in (False, True)),
    _PLANNED,
    _CHUNKED,
    _MERGE_CHUNKS,
    _PLAN,
)
