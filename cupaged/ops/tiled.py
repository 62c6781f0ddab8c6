"""Launchers of streaming decode: fold one tile of blocks into running states.

States: m and l F32 ``[num_seqs, num_splits, num_q_heads]``, o F32 ``[num_seqs, num_splits, num_q_heads,
head_dim]``; they begin as (-inf, 0, 0). With num_splits 1, the default, the axis may be left out. With more,
each of a sequence's states takes its own part of every tile, so that one long sequence keeps the whole GPU
busy; `cupaged.ops.states` makes one state of them, and the output. Sources:
``kernels/paged_decode_attn_tiled*.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    check_heads,
    check_positive,
    check_scale,
    check_score_scale,
    check_size,
    check_splits,
    launcher,
)
from cupaged.ops._pools import nvfp4_pools, strided_pools
from cupaged.ops.states import check_element_strides
from cupaged.registry.rules import check_head_dim

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def _check_step(
    q: Any,
    tile_blocks: Any,
    tile_block_counts: Any,
    states: tuple[Any, Any, Any],
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_capacity: int,
    last_block_valid_slots: int,
    last_block_valid_slots_per_seq: Any,
    num_splits: int,
) -> None:
    """What the step of every format asks of its arguments."""
    check_heads(num_q_heads, num_kv_heads)
    check_positive(head_dim=head_dim, block_size=block_size)
    check_head_dim(head_dim)
    check_splits(num_splits)
    if not 0 <= last_block_valid_slots <= block_size:
        raise ArgumentValueError(
            f"last_block_valid_slots: got {last_block_valid_slots}, allowed is 0 to block_size, {block_size}"
        )
    rows = num_seqs * num_q_heads
    check_size("q", q, rows * head_dim, 2)
    for name, array, needed in (
        ("tile_blocks", tile_blocks, num_seqs * tile_capacity),
        ("tile_block_counts", tile_block_counts, num_seqs),
        ("m_state", states[0], rows * num_splits),
        ("l_state", states[1], rows * num_splits),
        ("o_state", states[2], rows * num_splits * head_dim),
        ("last_block_valid_slots_per_seq", last_block_valid_slots_per_seq, num_seqs),
    ):
        check_size(name, array, needed)


_POOLS = ("k_pool", "v_pool")


def _step_scale(inv_sqrt_d: float | None, head_dim: int, k_scale: float = 1.0) -> float:
    return check_score_scale("inv_sqrt_d", head_dim**-0.5 if inv_sqrt_d is None else inv_sqrt_d, k_scale)


@launcher
def paged_decode_attn_tiled(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    tile_blocks: Any,
    tile_block_counts: Any,
    m_state: Any,
    l_state: Any,
    o_state: Any,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_capacity: int,
    gqa_ratio: int,
    blk_stride: int,
    tok_stride: int,
    kvh_stride: int,
    last_block_valid_slots: int,
    stream: Any,
    *,
    inv_sqrt_d: float | None = None,
    last_block_valid_slots_per_seq: Any = None,
    num_blocks: int | None = None,
    num_splits: int = 1,
) -> None:
    """Fold one tile of BF16 blocks into (m, l, o).

    Args:
        q: BF16 ``[num_seqs, num_q_heads, head_dim]``, contiguous.
        k_pool, v_pool: element (block, token, kv_head, dim) at block * blk_stride + token * tok_stride +
            kv_head * kvh_stride + dim. A paged cache and a scratch pool differ only in the strides.
        tile_blocks: int32 ``[num_seqs, tile_capacity]``, block ids of the tile.
        tile_block_counts: int32 ``[num_seqs]``, how many of them count (0: the states stay as they are).
        m_state, l_state, o_state: the states, updated in place.
        blk_stride, tok_stride, kvh_stride: in elements, multiples of 8.
        last_block_valid_slots: tokens that count in a tile's last block; all others are full.
        inv_sqrt_d: softmax scale, 1 / sqrt(head_dim) by default.
        last_block_valid_slots_per_seq: int32 ``[num_seqs]``, used instead of the scalar where given.
        num_blocks: size of the pools in blocks; an id outside makes its row's l and o NaN.
        num_splits: states of each sequence. A step fills the GPU once with multiprocessors times
            `cupaged.registry.tiled.resident_blocks`, divided by num_seqs * num_kv_heads.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_step(
        q, tile_blocks, tile_block_counts, (m_state, l_state, o_state), num_seqs, num_q_heads, num_kv_heads,
        head_dim, block_size, tile_capacity, last_block_valid_slots, last_block_valid_slots_per_seq,
        num_splits,
    )  # fmt: skip
    scale = _step_scale(inv_sqrt_d, head_dim)
    check_element_strides(blk_stride=blk_stride, tok_stride=tok_stride, kvh_stride=kvh_stride)
    pools = strided_pools(2, block_size, num_kv_heads, head_dim, blk_stride, tok_stride, kvh_stride)
    blocks = pools.readable_blocks(num_blocks, k_pool, v_pool, num_seqs, _POOLS)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_pool)
        .arg_ptr(v_pool)
        .arg_ptr(tile_blocks)
        .arg_ptr(tile_block_counts)
        .arg_ptr(m_state)
        .arg_ptr(l_state)
        .arg_ptr(o_state)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(tile_capacity)
        .arg_u32(gqa_ratio)
        .arg_i64(blk_stride)
        .arg_i64(tok_stride)
        .arg_i64(kvh_stride)
        .arg_i32(last_block_valid_slots)
        .arg_f32(scale)
        .arg_ptr(0 if last_block_valid_slots_per_seq is None else last_block_valid_slots_per_seq)
        .arg_u32(blocks)
        .arg_u32(num_splits)
        .launch(stream)
    )


@launcher
def paged_decode_attn_tiled_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    tile_blocks: Any,
    tile_block_counts: Any,
    m_state: Any,
    l_state: Any,
    o_state: Any,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_capacity: int,
    gqa_ratio: int,
    blk_stride: int,
    tok_stride: int,
    kvh_stride: int,
    k_scale: float,
    v_scale: float,
    last_block_valid_slots: int,
    stream: Any,
    *,
    inv_sqrt_d: float | None = None,
    last_block_valid_slots_per_seq: Any = None,
    num_blocks: int | None = None,
    num_splits: int = 1,
) -> None:
    """Fold one tile of FP8 blocks into (m, l, o).

    Args:
        q: BF16 ``[num_seqs, num_q_heads, head_dim]``, contiguous.
        k_pool, v_pool: as for BF16, E4M3 codes.
        tile_blocks: int32 ``[num_seqs, tile_capacity]``, block ids of the tile.
        tile_block_counts: int32 ``[num_seqs]``, how many of them count (0: the states stay as they are).
        m_state, l_state, o_state: the states, updated in place.
        blk_stride, tok_stride, kvh_stride: in elements, multiples of 16.
        k_scale, v_scale: dequantisation scales; o is in real units.
        last_block_valid_slots: tokens that count in a tile's last block; all others are full.
        inv_sqrt_d: softmax scale, 1 / sqrt(head_dim) by default.
        last_block_valid_slots_per_seq: int32 ``[num_seqs]``, used instead of the scalar where given.
        num_blocks: size of the pools in blocks; an id outside makes its row's l and o NaN.
        num_splits: states of each sequence. A step fills the GPU once with multiprocessors times
            `cupaged.registry.tiled.resident_blocks`, divided by num_seqs * num_kv_heads.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_step(
        q, tile_blocks, tile_block_counts, (m_state, l_state, o_state), num_seqs, num_q_heads, num_kv_heads,
        head_dim, block_size, tile_capacity, last_block_valid_slots, last_block_valid_slots_per_seq,
        num_splits,
    )  # fmt: skip
    check_element_strides(blk_stride=blk_stride, tok_stride=tok_stride, kvh_stride=kvh_stride)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    scale = _step_scale(inv_sqrt_d, head_dim, k_scale)
    pools = strided_pools(1, block_size, num_kv_heads, head_dim, blk_stride, tok_stride, kvh_stride)
    blocks = pools.readable_blocks(num_blocks, k_pool, v_pool, num_seqs, _POOLS)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_pool)
        .arg_ptr(v_pool)
        .arg_ptr(tile_blocks)
        .arg_ptr(tile_block_counts)
        .arg_ptr(m_state)
        .arg_ptr(l_state)
        .arg_ptr(o_state)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(tile_capacity)
        .arg_u32(gqa_ratio)
        .arg_i64(blk_stride)
        .arg_i64(tok_stride)
        .arg_i64(kvh_stride)
        .arg_f32(k_scale)
        .arg_f32(v_scale)
        .arg_i32(last_block_valid_slots)
        .arg_f32(scale)
        .arg_ptr(0 if last_block_valid_slots_per_seq is None else last_block_valid_slots_per_seq)
        .arg_u32(blocks)
        .arg_u32(num_splits)
        .launch(stream)
    )


@launcher
def paged_decode_attn_tiled_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    tile_blocks: Any,
    tile_block_counts: Any,
    m_state: Any,
    l_state: Any,
    o_state: Any,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_capacity: int,
    gqa_ratio: int,
    block_stride_bytes: int,
    data_section_bytes: int,
    last_block_valid_slots: int,
    stream: Any,
    *,
    inv_sqrt_d: float | None = None,
    last_block_valid_slots_per_seq: Any = None,
    num_blocks: int | None = None,
    num_splits: int = 1,
) -> None:
    """Fold one tile of NVFP4 blocks into (m, l, o).

    Args:
        q: BF16 ``[num_seqs, num_q_heads, head_dim]``, contiguous.
        k_pool, v_pool: blocks of a data section ``[block_size, num_kv_heads, head_dim / 2]`` and scales
            ``[block_size, num_kv_heads, head_dim / 16]``.
        tile_blocks: int32 ``[num_seqs, tile_capacity]``, block ids of the tile.
        tile_block_counts: int32 ``[num_seqs]``, how many of them count (0: the states stay as they are).
        m_state, l_state, o_state: the states, updated in place.
        block_stride_bytes: between blocks, a multiple of 16.
        data_section_bytes: from a block's begin to its scales, a multiple of 16.
        last_block_valid_slots: tokens that count in a tile's last block; all others are full.
        inv_sqrt_d: softmax scale, 1 / sqrt(head_dim) by default.
        last_block_valid_slots_per_seq: int32 ``[num_seqs]``, used instead of the scalar where given.
        num_blocks: size of the pools in blocks; an id outside makes its row's l and o NaN.
        num_splits: states of each sequence. A step fills the GPU once with multiprocessors times
            `cupaged.registry.tiled.resident_blocks`, divided by num_seqs * num_kv_heads.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _check_step(
        q, tile_blocks, tile_block_counts, (m_state, l_state, o_state), num_seqs, num_q_heads, num_kv_heads,
        head_dim, block_size, tile_capacity, last_block_valid_slots, last_block_valid_slots_per_seq,
        num_splits,
    )  # fmt: skip
    scale = _step_scale(inv_sqrt_d, head_dim)
    pools = nvfp4_pools(block_size, num_kv_heads, head_dim, block_stride_bytes, data_section_bytes)
    blocks = pools.readable_blocks(num_blocks, k_pool, v_pool, num_seqs, _POOLS)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(q)
        .arg_ptr(k_pool)
        .arg_ptr(v_pool)
        .arg_ptr(tile_blocks)
        .arg_ptr(tile_block_counts)
        .arg_ptr(m_state)
        .arg_ptr(l_state)
        .arg_ptr(o_state)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_u32(tile_capacity)
        .arg_u32(gqa_ratio)
        .arg_u64(block_stride_bytes)
        .arg_u64(data_section_bytes)
        .arg_i32(last_block_valid_slots)
        .arg_f32(scale)
        .arg_ptr(0 if last_block_valid_slots_per_seq is None else last_block_valid_slots_per_seq)
        .arg_u32(blocks)
        .arg_u32(num_splits)
        .launch(stream)
    )
