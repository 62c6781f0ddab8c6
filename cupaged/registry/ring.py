"""How a block of the streaming decode kernels (``kernels/ring``) is shaped, for a cache and a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cupaged.errors import ArgumentValueError
from cupaged.registry.entry import Constants, DeviceLimits
from cupaged.registry.rules import head_tiles
from cupaged.registry.terms import div_ceil, larger

TILE_TOKENS = 16
TILE_ROWS = 8  # query rows
MAX_PLANNED_SEQS = 512  # sequences whose plan fits a block's shared memory
FORMATS = ("bf16", "fp8", "nvfp4")  # by the number that the kernels know them by

_WIDE_HEAD_DIM = 128  # above, registers allow 8 warps
_NARROW_HEAD_DIM = 64  # up to here a tile is so little work that twice as many pay
_WARPS_PER_SM = 8
# Groups of 8 query rows that a warp's registers hold at most, by the largest head_dim.
_MOST_ROW_TILES = {128: 3, 192: 2, 256: 1}
_RESERVED_SHARED = 1024  # of every block, by the hardware
_MAX_STAGES = 6

# Clock cycles between the first requests of successive stages, for each KiB of a stage: about half the
# time in which the memory delivers one to every multiprocessor.
_FILL_DELAY = {"bf16": 39, "fp8": 23, "nvfp4": 41}

# Rooms for tokens (what a batch's tables can hold) up to which a launch's own beginning and end take more
# and more of its time. There, smaller stages are faster: latency level 1 has at most three tiles a warp,
# level 2 two, level 3 one.
LATENCY_TOKENS = (1 << 17, (1 << 16) - 1, 1 << 14)
_LATENCY_TILES = (8, 3, 2, 1)

# What beginning a sequence costs a block, in tiles.
_SEQUENCE_COST = {"bf16": 1, "fp8": 1, "nvfp4": 8}

# Bytes of a (token, KV head) row for 16 dims: (values, scales).
_ROW_SIXTEENTHS = {"bf16": (32, 0), "fp8": (16, 0), "nvfp4": (8, 1)}


@dataclass(frozen=True)
class RingProblem:
    """What a streaming kernel is asked to do.

    Attributes:
        key_format, value_format: names of cache formats.
        num_kv_heads, head_dim, block_size: of the cache.
        head_rows: query rows of a KV head: its query heads times the query tokens.
        heads_first: blocks are [kv_heads, tokens, d] instead of [tokens, kv_heads, d].
        joined: a block of the pool is one tile whose scales follow its values.
        latency: level for small batches, see `latency_level`; 0 for large ones.
        most_warps: that a block may have without spilling registers, where a warp has one group of 8 query
            rows.
        most_row_tiles: groups of 8 query rows that a warp may have without spilling registers.
    """

    key_format: str
    value_format: str
    num_kv_heads: int
    head_dim: int
    block_size: int
    head_rows: int
    heads_first: bool = False
    joined: bool = False
    latency: int = 0
    most_warps: int = 12
    most_row_tiles: int = 3

    @property
    def run(self) -> int:
        """Tokens of a tile that lie in one block."""
        return math.gcd(self.block_size, TILE_TOKENS)


@dataclass(frozen=True)
class RingShape:
    """How one block streams.

    Attributes:
        block_heads: KV heads of a block.
        block_head_tiles: groups of 8 query rows of each.
        warp_row_tiles: of those, what one warp has: what it reads and converts serves all of them.
        token_warps: warps that take alternate tiles of a stage.
        stage_tiles: tiles of 16 tokens a stage holds.
        stages: stages of the ring.
        blocks_per_sm: resident blocks a multiprocessor.
        bulk: whether bulk copies fill the ring (else the lanes of a warp do, 16 bytes each).
    """

    block_heads: int
    block_head_tiles: int
    warp_row_tiles: int
    token_warps: int
    stage_tiles: int
    stages: int
    blocks_per_sm: int
    bulk: bool

    @property
    def groups(self) -> int:
        """Warps that work on the same tokens."""
        return self.block_heads * self.block_head_tiles // self.warp_row_tiles

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.groups * self.token_warps

    def slices(self, num_kv_heads: int, head_rows: int) -> int:
        """Grid rows: parts of the heads and rows that different blocks have."""
        return num_kv_heads // self.block_heads * div_ceil(head_tiles(head_rows), self.block_head_tiles)


def image_bytes(fmt: str, heads: int, head_dim: int) -> int:
    """Shared memory of one tile of K or of V."""
    values, scales = _ROW_SIXTEENTHS[fmt]
    row = (values + scales) * head_dim // 16
    return -(-TILE_TOKENS * heads * row // 128) * 128


def tile_bytes(problem: RingProblem, heads: int) -> int:
    """Shared memory of one tile, K and V."""
    formats = (problem.key_format, problem.value_format)
    return sum(image_bytes(fmt, heads, problem.head_dim) for fmt in formats)


def _static_shared(groups: int, token_warps: int) -> int:
    """Bytes for the plan, the barriers, the merge of parts, and the exchange between token warps."""
    warps = groups * token_warps
    exchange = warps // 2 * 3 * 512 if token_warps > 1 else 0
    return 8 * (MAX_PLANNED_SEQS + 1) + 256 + warps * 136 + exchange


def latency_level(capacity: int) -> int:
    """Of a batch with room for so many tokens."""
    return sum(capacity <= most for most in LATENCY_TOKENS)


def _warp_tiles(problem: RingProblem, groups: int, row_tiles: int) -> tuple[int, ...]:
    """Tiles a warp works on at once, the best first.

    Conversions need independent work: NVFP4 wants most of it, BF16, which has none, least. With more than
    8 warps a block the registers allow one tile only.
    """
    formats = {problem.key_format, problem.value_format}
    if row_tiles > 2 or (row_tiles == 2 and len(formats) == 2) or groups > _WARPS_PER_SM:
        return (1,)
    if formats == {"bf16"}:
        most = row_tiles
    elif "nvfp4" not in formats or problem.head_dim > _WIDE_HEAD_DIM:
        most = 2
    elif groups < _WARPS_PER_SM:
        most = 3 if groups > 1 else 2
    else:
        most = 8 if problem.head_dim <= _NARROW_HEAD_DIM else 4
    most = min(most, _LATENCY_TILES[problem.latency])
    return tuple(tiles for tiles in (8, 4, 3, 2, 1) if tiles <= most)


def can_bulk(problem: RingProblem, heads: int, limits: DeviceLimits) -> bool:
    """Whether every piece of a stage is a multiple of 16 bytes, and the GPU has bulk copies."""
    all_heads = heads == problem.num_kv_heads
    tokens = problem.run if problem.heads_first or all_heads else 1
    whole = problem.block_size == TILE_TOKENS and all_heads
    rows = tokens * (1 if problem.heads_first and not whole else heads)
    sizes = []
    for fmt in (problem.key_format, problem.value_format):
        values, scales = (rows * x * problem.head_dim // 16 for x in _ROW_SIXTEENTHS[fmt])
        sizes += [values + scales] if problem.joined and all_heads else [values, scales]
    return limits.bulk_copies and not any(size % 16 for size in sizes)


def most_row_tiles(problem: RingProblem) -> int:
    """Groups of 8 query rows that a warp's registers hold."""
    most = next(most for widest, most in _MOST_ROW_TILES.items() if problem.head_dim <= widest)
    return min(most, problem.most_row_tiles)


def _warp_row_tiles(problem: RingProblem) -> int:
    """Groups of 8 query rows of a warp: as equal as can be, as many as registers hold."""
    tiles, most = head_tiles(problem.head_rows), most_row_tiles(problem)
    return div_ceil(tiles, div_ceil(tiles, most))


def _head_shares(problem: RingProblem) -> Iterator[tuple[int, int]]:
    """(KV heads, row tiles of each) that a block may have, most first."""
    row_tiles = _warp_row_tiles(problem)
    warps = div_ceil(head_tiles(problem.head_rows), row_tiles)  # of a KV head
    most = problem.most_warps if problem.head_dim <= _WIDE_HEAD_DIM and row_tiles == 1 else _WARPS_PER_SM
    for heads in range(problem.num_kv_heads, 0, -1):
        if problem.num_kv_heads % heads == 0 and heads * warps <= most:
            yield heads, warps * row_tiles
    if warps > most:
        yield 1, most * row_tiles


def _shape_of(problem: RingProblem, heads: int, tiles: int, limits: DeviceLimits) -> RingShape | None:
    """The shape for that share of the heads; None where fewer than three stages fit."""
    row_tiles = _warp_row_tiles(problem)
    groups = heads * tiles // row_tiles
    # Few heads leave NVFP4's conversions room for further, smaller blocks.
    formats = (problem.key_format, problem.value_format)
    blocks_per_sm = 1
    if "nvfp4" in formats and groups < _WARPS_PER_SM:
        blocks_per_sm = 3 if groups == 1 and row_tiles == 1 and problem.head_dim <= _WIDE_HEAD_DIM else 2
    room = min(limits.shared_per_block, limits.shared_per_sm // blocks_per_sm - _RESERVED_SHARED)
    most = 1
    while 2 * most * groups * min(blocks_per_sm, 2) <= _WARPS_PER_SM:
        most *= 2
    tile = tile_bytes(problem, heads)
    bulk = can_bulk(problem, heads, limits)
    for warp_tiles in _warp_tiles(problem, groups, row_tiles):
        for token_warps in (most >> i for i in range(most.bit_length())):
            stage_tiles = token_warps * warp_tiles
            stages = (room - _static_shared(groups, token_warps)) // (stage_tiles * tile)
            if stages >= 3:
                few = problem.latency >= (1 if "nvfp4" in formats else 2)
                stages = 3 if few else min(_MAX_STAGES, stages)
                return RingShape(
                    heads, tiles, row_tiles, token_warps, stage_tiles, stages, blocks_per_sm, bulk
                )
    return None


def ring_shape(problem: RingProblem, limits: DeviceLimits) -> RingShape:
    """The shape that measured best, scaled to what fits: as many heads a block as leave three stages.

    Raises:
        ArgumentValueError: three stages of one head do not fit (on no GPU that kernels are compiled for).
    """
    for heads, tiles in _head_shares(problem):
        shape = _shape_of(problem, heads, tiles, limits)
        if shape is not None:
            return shape
    raise ArgumentValueError(
        f"head_dim: got {problem.head_dim}, of which three stages do not fit the {limits.shared_per_block} "
        "bytes of shared memory that a block has"
    )


def ring_constants(problem: RingProblem, limits: DeviceLimits) -> dict[str, int]:
    """The compile-time constants that follow from a shape."""
    shape = ring_shape(problem, limits)
    slowest = max((problem.key_format, problem.value_format), key=FORMATS.index)
    stage_bytes = shape.stage_tiles * tile_bytes(problem, shape.block_heads)
    return {
        "block_heads": shape.block_heads,
        "block_head_tiles": shape.block_head_tiles,
        "warp_row_tiles": shape.warp_row_tiles,
        "token_warps": shape.token_warps,
        "stage_tiles": shape.stage_tiles,
        "stages": shape.stages,
        "blocks_per_sm": shape.blocks_per_sm,
        "bulk": int(shape.bulk),
        # Of some of the heads, values and scales are apart.
        "joined": int(problem.joined and shape.block_heads == problem.num_kv_heads),
        "fill_delay": _FILL_DELAY[slowest] * stage_bytes // 1024 if shape.bulk else 0,
        "sequence_cost": _SEQUENCE_COST[slowest],
    }


def shared_bytes(problem: RingProblem, constants: Constants) -> int:
    """Dynamic shared memory of a block."""
    return constants["stages"] * constants["stage_tiles"] * tile_bytes(problem, constants["block_heads"])


def num_threads(constants: Constants) -> int:
    """Threads of a block."""
    groups = constants["block_heads"] * constants["block_head_tiles"] // constants["warp_row_tiles"]
    return 32 * groups * constants["token_warps"]


def num_slices(problem: RingProblem, constants: Constants) -> int:
    """Rows of the grid."""
    head_slices = div_ceil(head_tiles(problem.head_rows), constants["block_head_tiles"])
    return problem.num_kv_heads // constants["block_heads"] * head_slices


def blocks_of_slice(problem: RingProblem, constants: Constants, limits: DeviceLimits) -> int:
    """Columns of a persistent grid: as many blocks as are resident, shared among the slices."""
    resident = limits.num_sms * constants["blocks_per_sm"]
    return larger(1, resident // num_slices(problem, constants))
