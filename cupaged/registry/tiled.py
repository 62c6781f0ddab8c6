"""The kernels of streaming decode: the step that folds a tile in, merging of states, finalisation."""

from __future__ import annotations

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry, Scalars, grid_of_two
from cupaged.registry.ring import TILE_TOKENS
from cupaged.registry.rules import check_block_size, check_head_dim, gqa_ratio, head_dim_spec, head_tiles
from cupaged.registry.terms import div_ceil

MOST_WARPS = 8  # most of a block of threads; also its most groups of 8 query heads
# (Tiles of 16 tokens that a warp works on at once, blocks of threads for a multiprocessor) by the largest
# head_dim, as registers allow without spills. Narrow formats need more tiles to keep as many bytes in flight.
_SHAPES = {
    "bf16": {64: (2, 3), 128: (1, 3), 192: (1, 2), 256: (1, 1)},
    "fp8": {64: (2, 4), 128: (2, 3), 192: (1, 2), 256: (1, 1)},
    "nvfp4": {64: (2, 3), 128: (2, 2), 192: (1, 2), 256: (1, 1)},
}

# The same for sm_90 and head_dims of 65 to 128: its compiler manages with 128 registers a thread.
_SHAPES_90 = {"bf16": (1, 4), "fp8": (1, 4), "nvfp4": (2, 4)}

# Warps that a multiprocessor of sm_90 holds at least, by the largest head_dim: what their registers leave.
_RESIDENT_WARPS = {64: 16, 128: 12, 256: 8}

_STRIDE_MULTIPLES = {
    "bf16": dict.fromkeys(("blk_stride", "tok_stride", "kvh_stride"), 8),
    "fp8": dict.fromkeys(("blk_stride", "tok_stride", "kvh_stride"), 16),
    "nvfp4": {"block_stride_bytes": 16, "data_section_bytes": 16},
}


def _step_spec(scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    ratio = gqa_ratio(scalars["num_q_heads"], scalars["num_kv_heads"])
    if scalars["gqa_ratio"] != ratio:
        raise ArgumentValueError(
            f"gqa_ratio: got {scalars['gqa_ratio']}, but num_q_heads / num_kv_heads is {ratio}"
        )
    return {"head_dim": scalars["head_dim"], "gqa_ratio": ratio, "block_size": scalars["block_size"]}


def resident_blocks(constants: Constants) -> int:
    """Blocks of threads of the step that a multiprocessor holds at once."""
    warps = next(count for most, count in _RESIDENT_WARPS.items() if constants["head_dim"] <= most)
    return max(constants["blocks_per_sm"], 32 * warps // _step_block(constants)[0])


def _block_tiles(constants: Constants) -> int:
    """Groups of 8 query heads that a block of threads takes."""
    return min(MOST_WARPS, head_tiles(constants["gqa_ratio"]))


def _step_block(constants: Constants) -> Grid:
    return (32 * constants["token_warps"] * _block_tiles(constants), 1, 1)


def head_parts(constants: Constants) -> int:
    """Blocks of threads that share a KV head's query heads."""
    return div_ceil(head_tiles(constants["gqa_ratio"]), _block_tiles(constants))


def _step_grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    num_seqs, num_kv_heads, num_splits = values
    return (num_seqs, num_kv_heads * head_parts(constants), num_splits)


def _pair_block(constants: Constants) -> Grid:
    """A thread for each pair of dims, in whole warps."""
    return (div_ceil(constants["head_dim"] // 2, 32) * 32, 1, 1)


def _step_entry(module: str, fmt: str) -> KernelEntry:
    def derived(spec: Constants, limits: DeviceLimits) -> dict[str, int]:
        tiles, blocks = next(shape for most, shape in _SHAPES[fmt].items() if spec["head_dim"] <= most)
        if limits.capability == 90 and 64 < spec["head_dim"] <= 128:
            tiles, blocks = _SHAPES_90[fmt]
        if fmt == "nvfp4" and spec["block_size"] % TILE_TOKENS:
            tiles = 1  # rows in several blocks take the registers of the second
        heads = _block_tiles(spec)
        warps = next(n for n in (4, 2, 1) if n * heads <= MOST_WARPS)
        return {"token_warps": warps, "warp_tiles": tiles, "blocks_per_sm": max(1, blocks // heads)}

    return KernelEntry(
        module=module,
        entry=module,
        spec_names=("head_dim", "gqa_ratio", "block_size"),
        specialise=_step_spec,
        scalar_names=("head_dim", "block_size", "num_q_heads", "num_kv_heads", "gqa_ratio"),
        derived=derived,
        block=_step_block,
        # Sequences along x, whose limit is 2^31 - 1.
        grid_names=("num_seqs", "num_kv_heads", "num_splits"),
        grid=_step_grid,
        overlapping=True,
        holds={
            "q": "bf16",
            "k_pool": fmt,
            "v_pool": fmt,
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
        | _STRIDE_MULTIPLES[fmt],
        nullable={"tile_blocks": ("tile_capacity",), "last_block_valid_slots_per_seq": ()},
    )


def _state_entry(entry: str, holds: dict[str, str], multiples: dict[str, int]) -> KernelEntry:
    """A kernel that works on whole states, one block for each (sequence, query head)."""
    return KernelEntry(
        module="paged_decode_attn_tiled",
        entry=entry,
        spec_names=("head_dim",),
        specialise=head_dim_spec,
        scalar_names=("head_dim",),
        block=_pair_block,
        grid_names=("num_seqs", "num_q_heads"),
        grid=grid_of_two,
        holds=holds,
        multiples=multiples,
    )


def _merge_entry() -> KernelEntry:
    names = [(state, f"{state}_{side}") for state in "mlo" for side in ("parts", "out")]
    return _state_entry(
        "attention_merge_states",
        {name: "f32" for _, name in names},
        {name: 8 if state == "o" else 4 for state, name in names},
    )


def _finalize_entry() -> KernelEntry:
    return _state_entry(
        "attention_finalize",
        {"l_state": "f32", "o_state": "f32", "output": "bf16"},
        {"l_state": 4, "o_state": 8, "output": 16},
    )


ENTRIES = (
    _step_entry("paged_decode_attn_tiled", "bf16"),
    _step_entry("paged_decode_attn_tiled_fp8", "fp8"),
    _step_entry("paged_decode_attn_tiled_nvfp4", "nvfp4"),
    _merge_entry(),
    _finalize_entry(),
)
