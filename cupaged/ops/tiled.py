"""Launchers of streaming decode: fold one tile of blocks into running states, then finalise.

States: m and l F32 ``[num_seqs, num_q_heads]``, o F32 ``[num_seqs, num_q_heads, head_dim]``; they begin as
(-inf, 0, 0). Source: ``kernels/paged_decode_attn_tiled.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import (
    check_heads,
    check_num_blocks,
    check_positive,
    check_scale,
    check_size,
    launcher,
)
from cupaged.ops._pools import check_readable

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


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

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_heads(num_q_heads, num_kv_heads)
    check_positive(head_dim=head_dim, block_size=block_size)
    scale = head_dim**-0.5 if inv_sqrt_d is None else inv_sqrt_d
    check_scale("inv_sqrt_d", scale)
    if not 0 <= last_block_valid_slots <= block_size:
        raise ArgumentValueError(
            f"last_block_valid_slots: got {last_block_valid_slots}, allowed is 0 to block_size, {block_size}"
        )
    strides = {"blk_stride": blk_stride, "tok_stride": tok_stride, "kvh_stride": kvh_stride}
    for name, stride in strides.items():
        if stride < 0:
            raise ArgumentValueError(f"{name}: got {stride}, allowed is 0 or more")
    rows = num_seqs * num_q_heads
    for name, array, needed in (
        ("q", q, rows * head_dim),
        ("tile_blocks", tile_blocks, num_seqs * tile_capacity),
        ("tile_block_counts", tile_block_counts, num_seqs),
        ("m_state", m_state, rows),
        ("l_state", l_state, rows),
        ("o_state", o_state, rows * head_dim),
        ("last_block_valid_slots_per_seq", last_block_valid_slots_per_seq, num_seqs),
    ):
        check_size(name, array, needed)
    blocks = check_num_blocks(num_blocks)
    if num_seqs == 0:
        return
    check_readable(check_num_blocks(num_blocks))
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
        .launch(stream)
    )


@launcher
def attention_finalize(
    gpu: GpuBackend,
    kernel: KernelHandle,
    l_state: Any,
    o_state: Any,
    output: Any,
    num_seqs: int,
    num_q_heads: int,
    head_dim: int,
    stream: Any,
) -> None:
    """Write o / l as BF16 into output ``[num_seqs, num_q_heads, head_dim]``; zeros where l is 0.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    rows = num_seqs * num_q_heads
    check_size("l_state", l_state, rows)
    check_size("o_state", o_state, rows * head_dim)
    check_size("output", output, rows * head_dim)
    if num_seqs == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(l_state)
        .arg_ptr(o_state)
        .arg_ptr(output)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(head_dim)
        .launch(stream)
    )
