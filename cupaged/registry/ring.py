"""The streaming decode kernels (``kernels/ring``): how a block is shaped for a format, a model and a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import Constants, DeviceLimits, Grid, KernelEntry, Scalars
from cupaged.registry.rules import check_block_size, check_head_dim, gqa_ratio, head_tiles

TILE_TOKENS = 16
MAX_PLANNED_SEQS = 512  # sequences whose plan fits a block's shared memory
MAX_WARPS = 16  # of a block
_WARPS_PER_SM = 8
_RESERVED_SHARED = 1024  # of every block, by the hardware
_MAX_STAGES = 6

# Clock cycles between the first requests of successive stages: about half the time in which the memory
# delivers one stage to every multiprocessor.
_FILL_DELAY = {"bf16": 2500, "fp8": 1500, "nvfp4": 3000}

# What beginning a sequence costs a block, in tiles.
_SEQUENCE_COST = {"bf16": 1, "fp8": 1, "nvfp4": 8}

# Bytes of a (token, KV head) row as halves of head_dim: (values, scales in 16ths).
_ROW_HALVES = {"bf16": 4, "fp8": 2, "nvfp4": 1}


@dataclass(frozen=True)
class RingShape:
    """How one block streams.

    Attributes:
        token_warps: warps that take alternate tiles of a stage.
        stage_tiles: tiles of 16 tokens a stage holds.
        stages: stages of the ring.
        blocks_per_sm: resident blocks a multiprocessor.
    """

    token_warps: int
    stage_tiles: int
    stages: int
    blocks_per_sm: int


def image_bytes(fmt: str, num_kv_heads: int, head_dim: int) -> int:
    """Shared memory of one tile of K or of V."""
    row = _ROW_HALVES[fmt] * head_dim // 2 + (head_dim // 16 if fmt == "nvfp4" else 0)
    return -(-TILE_TOKENS * num_kv_heads * row // 128) * 128


def _static_shared(groups: int, token_warps: int) -> int:
    """Bytes for the plan, the barriers, the merge of parts, and the exchange between token warps."""
    warps = groups * token_warps
    exchange = warps // 2 * 3 * 512 if token_warps > 1 else 0
    return 8 * (MAX_PLANNED_SEQS + 1) + 256 + warps * 136 + exchange


def _warp_tiles(fmt: str, groups: int) -> tuple[int, ...]:
    """Tiles a warp works on at once, the best first.

    Conversions need independent work: NVFP4 wants most of it, BF16, which has none, least. With more than
    8 warps a block the registers allow one tile only.
    """
    if groups > 8 or fmt == "bf16":
        return (1,)
    if fmt == "fp8":
        return (2, 1)
    return (4, 2, 1) if groups == 8 else (3, 2, 1)


def ring_shape(
    fmt: str, num_kv_heads: int, ratio: int, head_dim: int, limits: DeviceLimits
) -> RingShape | None:
    """The shape that measured best, scaled to what fits; None where not even two stages do."""
    groups = num_kv_heads * head_tiles(ratio)
    if groups > MAX_WARPS or (groups > 8 and head_dim > 128):  # registers for 16 warps: 128 each
        return None
    # Few heads leave NVFP4's conversions room for a second, smaller block.
    blocks_per_sm = 2 if fmt == "nvfp4" and groups < 8 else 1
    room = min(limits.shared_per_block, limits.shared_per_sm // blocks_per_sm - _RESERVED_SHARED)
    most = 1
    while 2 * most * groups * blocks_per_sm <= _WARPS_PER_SM:
        most *= 2
    for warp_tiles in _warp_tiles(fmt, groups):
        for token_warps in (most >> i for i in range(most.bit_length())):
            stage = token_warps * warp_tiles * 2 * image_bytes(fmt, num_kv_heads, head_dim)
            stages = min(_MAX_STAGES, (room - _static_shared(groups, token_warps)) // stage)
            if stages >= 3:
                return RingShape(token_warps, token_warps * warp_tiles, stages, blocks_per_sm)
    two_tiles = 2 * 2 * image_bytes(fmt, num_kv_heads, head_dim)
    fits = two_tiles + _static_shared(groups, 1) <= limits.shared_per_block
    return RingShape(1, 1, 2, 1) if fits else None


def _spec(fmt: str, scalars: Scalars) -> dict[str, int]:
    check_head_dim(scalars["head_dim"])
    check_block_size(scalars["block_size"])
    spec = {
        "head_dim": scalars["head_dim"],
        "gqa_ratio": gqa_ratio(scalars["num_q_heads"], scalars["num_kv_heads"]),
        "num_kv_heads": scalars["num_kv_heads"],
        "block_size": scalars["block_size"],
    }
    if fmt == "nvfp4":
        tight = spec["block_size"] * spec["num_kv_heads"] * spec["head_dim"] // 2
        spec["joined"] = int(spec["block_size"] == TILE_TOKENS and scalars["data_section_bytes"] == tight)
        _check_scale_copies(spec)
    return spec


def _check_scale_copies(spec: Constants) -> None:
    """NVFP4 scales of a run of tokens come by a copy of their own, of a multiple of 16 bytes."""
    run = math.gcd(spec["block_size"], TILE_TOKENS)
    scale_bytes = run * spec["num_kv_heads"] * spec["head_dim"] // 16
    if not spec["joined"] and scale_bytes % 16:
        raise ArgumentValueError(
            f"block_size: got {spec['block_size']}, with {spec['num_kv_heads']} KV heads of "
            f"{spec['head_dim']}; the scales of {run} tokens are {scale_bytes} bytes, which the copy engine "
            "cannot fetch. Use a multiple of 16, or the single-pass or split-K launchers"
        )


def _derived(fmt: str, spec: Constants, limits: DeviceLimits) -> dict[str, int]:
    shape = ring_shape(fmt, spec["num_kv_heads"], spec["gqa_ratio"], spec["head_dim"], limits)
    if shape is None or not limits.bulk_copies:
        raise ArgumentValueError(
            f"num_kv_heads: got {spec['num_kv_heads']} KV heads of {spec['head_dim']} with ratio "
            f"{spec['gqa_ratio']}, which this GPU's shared memory, registers or copy engine do not allow; "
            "use the split-K launchers"
        )
    return {
        "token_warps": shape.token_warps,
        "stage_tiles": shape.stage_tiles,
        "stages": shape.stages,
        "blocks_per_sm": shape.blocks_per_sm,
        "fill_delay": _FILL_DELAY[fmt],
        "sequence_cost": _SEQUENCE_COST[fmt],
    }


def _block(constants: Constants) -> Grid:
    groups = constants["num_kv_heads"] * head_tiles(constants["gqa_ratio"])
    return (32 * groups * constants["token_warps"], 1, 1)


def _grid(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    return (limits.num_sms * constants["blocks_per_sm"] if values[0] else 0, 1, 1)


def _entry(fmt: str) -> KernelEntry:
    name = f"paged_decode_attn_planned_{fmt}"
    layout = ("data_section_bytes",) if fmt == "nvfp4" else ()
    strides = {"bf16": {}, "fp8": {"cache_stride": 16}}.get(
        fmt, {"block_stride_bytes": 16, "data_section_bytes": 16}
    )

    def shared_mem(constants: Constants) -> int:
        image = image_bytes(fmt, constants["num_kv_heads"], constants["head_dim"])
        return constants["stages"] * constants["stage_tiles"] * 2 * image

    return KernelEntry(
        module=name,
        entry=name,
        spec_names=("head_dim", "gqa_ratio", "num_kv_heads", "block_size", *(("joined",) if layout else ())),
        specialise=lambda scalars: _spec(fmt, scalars),
        scalar_names=("head_dim", "block_size", "num_q_heads", "num_kv_heads", *layout),
        derived=lambda spec, limits: _derived(fmt, spec, limits),
        block=_block,
        grid_names=("num_seqs",),
        grid=_grid,
        holds={
            "q": "bf16",
            "k_cache": fmt,
            "v_cache": fmt,
            "output": "bf16",
            "lse": "f32",
            "part_o": "f32",
            "part_state": "f32",
            "counters": "u32",
            "block_tables": "i32",
            "seq_lens": "i32",
        },
        multiples={"q": 16, "k_cache": 16, "v_cache": 16, "output": 16, "lse": 4, "part_o": 16, "q_stride": 8}
        | {"part_state": 8, "counters": 4, "block_tables": 4, "seq_lens": 4}
        | strides,
        strided=frozenset({"q"}),
        shared_mem=shared_mem,
        cooperative=True,
        overlapping=True,
    )


ENTRIES = tuple(_entry(fmt) for fmt in ("bf16", "fp8", "nvfp4"))
