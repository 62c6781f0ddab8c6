"""Host references of the tiled attention: one key at a time in float32, as the contract states it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import ElementStrides, decode_bf16
from cupaged.formats.bf16 import BFLOAT16
from cupaged.formats.layout import checked_size


class AttnState:
    """Online-softmax state of a batch: begins with no key seen, `step_tile_ref` folds tiles in.

    Attributes:
        m: largest score so far, float32 ``[num_seqs, num_q_heads]``; begins -inf.
        l: sum of e^(s - m), float32 ``[num_seqs, num_q_heads]``; begins 0.
        o: sum of e^(s - m) v, float32 ``[num_seqs, num_q_heads, head_dim]``; begins 0.
    """

    def __init__(self, num_seqs: int, num_q_heads: int, head_dim: int) -> None:
        """A state with no key seen.

        Raises:
            ArgumentTypeError: a size that is no integer.
            ArgumentValueError: num_seqs < 0, or another size < 1.
        """
        self.num_seqs = checked_size("num_seqs", num_seqs, minimum=0)
        self.num_q_heads = checked_size("num_q_heads", num_q_heads)
        self.head_dim = checked_size("head_dim", head_dim)
        self.m = np.full((self.num_seqs, self.num_q_heads), -np.inf, np.float32)
        self.l = np.zeros((self.num_seqs, self.num_q_heads), np.float32)
        self.o = np.zeros((self.num_seqs, self.num_q_heads, self.head_dim), np.float32)


def step_tile_ref(
    state: AttnState,
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    tile_blocks: npt.NDArray[Any],
    tile_block_counts: npt.NDArray[Any],
    num_kv_heads: int,
    block_size: int,
    tile_capacity: int,
    gqa_ratio: int,
    blk_stride: int,
    tok_stride: int,
    kvh_stride: int,
    last_block_valid_slots: int,
    *,
    inv_sqrt_d: float | None = None,
    last_block_valid_slots_per_seq: npt.NDArray[Any] | None = None,
) -> None:
    """Fold one tile of every sequence into ``state``, in place; `paged_decode_attn_tiled` on the host.

    Sizes that the state holds (num_seqs, num_q_heads, head_dim) are not repeated as arguments.

    A block outside its pool makes that sequence's l and o NaN. A key whose score is -inf has weight
    exactly 0.

    Args:
        state: updated.
        q: BF16 (bfloat16 or uint16) ``[num_seqs, num_q_heads, head_dim]``.
        k_pool: BF16, C-contiguous, any shape: element (block b, token t, head h, lane d) is number
            ``b * blk_stride + t * tok_stride + h * kvh_stride + d`` of the flat array.
        v_pool: likewise; for a scratch pool, the flat pool from its first V on.
        tile_blocks: int32 ``[num_seqs, tile_capacity]``.
        tile_block_counts: int32 ``[num_seqs]``: blocks of this tile, 0 to tile_capacity.
        num_kv_heads: KV heads.
        block_size: tokens of one block.
        tile_capacity: columns of tile_blocks.
        gqa_ratio: num_q_heads / num_kv_heads, exact.
        blk_stride: elements between blocks, see `paged_strides` and `scratch_strides`.
        tok_stride: elements between tokens.
        kvh_stride: elements between KV heads.
        last_block_valid_slots: tokens used of the last block of every sequence's tile, 0 to block_size.
        inv_sqrt_d: factor on q.k, used as float32; None = 1/sqrt(head_dim).
        last_block_valid_slots_per_seq: int32 ``[num_seqs]``, in place of last_block_valid_slots.

    Raises:
        ArgumentTypeError: a dtype that is not allowed.
        ArgumentValueError: shapes, counts or the GQA ratio that do not fit.
    """
    num_kv_heads, gqa_ratio = checked_size("num_kv_heads", num_kv_heads), checked_size("gqa_ratio", gqa_ratio)
    block_size = checked_size("block_size", block_size)
    tile_capacity = checked_size("tile_capacity", tile_capacity, minimum=0)
    strides = ElementStrides(
        checked_size("blk_stride", blk_stride),
        checked_size("tok_stride", tok_stride),
        checked_size("kvh_stride", kvh_stride),
    )
    num_seqs = state.num_seqs
    _require_shape("q", q, (num_seqs, state.num_q_heads, state.head_dim))
    _require_shape("tile_blocks", tile_blocks, (num_seqs, tile_capacity))
    _require_shape("tile_block_counts", tile_block_counts, (num_seqs,))
    if gqa_ratio * num_kv_heads != state.num_q_heads:
        raise ArgumentValueError(
            f"gqa_ratio: got {gqa_ratio}, which times num_kv_heads {num_kv_heads} must give num_q_heads "
            f"{state.num_q_heads}"
        )
    valid_slots = last_block_valid_slots_per_seq
    if valid_slots is None:
        last = checked_size("last_block_valid_slots", last_block_valid_slots, minimum=0)
        valid_slots = np.full(num_seqs, last, np.int64)
    _require_shape("last_block_valid_slots_per_seq", valid_slots, (num_seqs,))
    _require_range("last_block_valid_slots", valid_slots, block_size)
    _require_range("tile_block_counts", tile_block_counts, tile_capacity)

    keys = _Pool(k_pool, "k_pool", num_kv_heads, state.head_dim, block_size, strides)
    values = _Pool(v_pool, "v_pool", num_kv_heads, state.head_dim, block_size, strides)
    factor = np.float32(1.0 / math.sqrt(state.head_dim) if inv_sqrt_d is None else inv_sqrt_d)
    for seq in range(num_seqs):
        query = decode_bf16(q[seq])
        blocks = tile_blocks[seq, : int(tile_block_counts[seq])]
        for column, block in enumerate(int(b) for b in blocks):
            tokens = int(valid_slots[seq]) if column == len(blocks) - 1 else block_size
            if not (keys.holds(block) and values.holds(block)):
                state.l[seq] = np.nan
                state.o[seq] = np.nan
                break
            for token in range(tokens):
                key = np.repeat(keys.token(block, token), gqa_ratio, axis=0)
                value = np.repeat(values.token(block, token), gqa_ratio, axis=0)
                _fold(state, seq, query, key, value, factor)


def finalize_ref(state: AttnState) -> npt.NDArray[Any]:
    """Output o / l, rounded once to bfloat16 ``[num_seqs, num_q_heads, head_dim]``; 0 where l is 0."""
    empty = (state.l == 0)[..., None]
    divisor = np.where(empty, np.float32(1), state.l[..., None])
    with np.errstate(all="ignore"):
        quotient = np.where(empty, np.float32(0), state.o / divisor)
        return quotient.astype(BFLOAT16)


class _Pool:
    """A BF16 pool of the tiled kernel, addressed by element strides."""

    def __init__(
        self,
        pool: npt.NDArray[Any],
        name: str,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        strides: ElementStrides,
    ) -> None:
        if not isinstance(pool, np.ndarray):
            raise ArgumentTypeError(f"{name}: got {type(pool).__name__}, allowed is a NumPy array")
        if pool.dtype != BFLOAT16 and pool.dtype != np.uint16:
            raise ArgumentTypeError(f"{name}: got dtype {pool.dtype}, allowed are bfloat16 and uint16")
        if not pool.flags.c_contiguous:
            raise ArgumentValueError(f"{name}: got strides {pool.strides} (bytes), allowed is C order")
        self._elements = pool.reshape(-1).view(np.uint16)
        self._strides = strides
        lanes = np.arange(head_dim, dtype=np.int64)
        heads = np.arange(num_kv_heads, dtype=np.int64)
        self._head_offsets = heads[:, None] * strides.kvh + lanes  # [num_kv_heads, head_dim]
        self._block_extent = (block_size - 1) * strides.tok + int(self._head_offsets[-1, -1]) + 1

    def holds(self, block: int) -> bool:
        end = block * self._strides.blk + self._block_extent
        return block >= 0 and end <= self._elements.size

    def token(self, block: int, token: int) -> npt.NDArray[np.float32]:
        """One token of all heads, float32 ``[num_kv_heads, head_dim]``."""
        base = block * self._strides.blk + token * self._strides.tok
        return decode_bf16(self._elements[base + self._head_offsets])


def _fold(
    state: AttnState,
    seq: int,
    query: npt.NDArray[np.float32],
    key: npt.NDArray[np.float32],
    value: npt.NDArray[np.float32],
    inv_sqrt_d: np.float32,
) -> None:
    """One key and value, ``[num_q_heads, head_dim]`` like the query, into one sequence's state."""
    with np.errstate(all="ignore"):
        scores = np.einsum("hd,hd->h", query, key, dtype=np.float32) * inv_sqrt_d
        before = state.m[seq].copy()
        after = np.maximum(before, scores)
        # -inf minus -inf would be NaN: nothing seen yet, and a key of score -inf, both weigh exactly 0.
        keep = np.where(before == -np.inf, np.float32(0), np.exp(before - after))
        weight = np.where(scores == -np.inf, np.float32(0), np.exp(scores - after))
        # 0 times an infinite value would be NaN, so that a key of score -inf adds nothing instead.
        added = np.where((scores == -np.inf)[:, None], np.float32(0), weight[:, None] * value)
        state.m[seq] = after
        state.l[seq] = state.l[seq] * keep + weight
        state.o[seq] = state.o[seq] * keep[:, None] + added


def _require_shape(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"{name}: got {type(array).__name__}, allowed is a NumPy array")
    if array.shape != shape:
        raise ArgumentValueError(f"{name}: got shape {array.shape}, allowed is {shape}")


def _require_range(name: str, array: npt.NDArray[Any], maximum: int) -> None:
    if array.size and (int(array.min()) < 0 or int(array.max()) > maximum):
        raise ArgumentValueError(
            f"{name}: got values from {int(array.min())} to {int(array.max())}, allowed are 0 to {maximum}"
        )
