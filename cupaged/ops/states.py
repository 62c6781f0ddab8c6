"""Launchers that end streaming decode: merge the states of a sequence, and write the output.

States are those of `cupaged.ops.tiled`. Source: ``kernels/paged_decode_attn_tiled.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import check_positive, check_size, launcher

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def check_element_strides(**strides: int) -> None:
    """Strides that are not negative.

    Raises:
        ArgumentValueError: the message names the stride.
    """
    for name, stride in strides.items():
        if stride < 0:
            raise ArgumentValueError(f"{name}: got {stride}, allowed is 0 or more")


@launcher
def attention_merge_states(
    gpu: GpuBackend,
    kernel: KernelHandle,
    m_parts: Any,
    l_parts: Any,
    o_parts: Any,
    m_out: Any,
    l_out: Any,
    o_out: Any,
    num_seqs: int,
    num_q_heads: int,
    head_dim: int,
    num_parts: int,
    seq_stride: int,
    part_stride: int,
    stream: Any,
) -> None:
    """Make one state of each sequence's num_parts, which hold disjoint parts of its tokens.

    Args:
        m_parts, l_parts: F32 ``[rows, num_q_heads]``; (seq, part) is row seq * seq_stride + part *
            part_stride.
        o_parts: F32 ``[rows, num_q_heads, head_dim]``, likewise.
        m_out, l_out: F32 ``[num_seqs, num_q_heads]``, written; none of the parts' memory.
        o_out: F32 ``[num_seqs, num_q_heads, head_dim]``, written.
        seq_stride, part_stride: in rows: num_parts and 1 for the splits of the streaming step, 1 and num_seqs
            for states gathered from num_parts devices.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_positive(num_q_heads=num_q_heads, head_dim=head_dim, num_parts=num_parts)
    check_element_strides(seq_stride=seq_stride, part_stride=part_stride)
    if num_seqs == 0:
        return
    rows = ((num_seqs - 1) * seq_stride + (num_parts - 1) * part_stride + 1) * num_q_heads
    written = num_seqs * num_q_heads
    for name, array, needed in (
        ("m_parts", m_parts, rows),
        ("l_parts", l_parts, rows),
        ("o_parts", o_parts, rows * head_dim),
        ("m_out", m_out, written),
        ("l_out", l_out, written),
        ("o_out", o_out, written * head_dim),
    ):
        check_size(name, array, needed)
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(m_parts)
        .arg_ptr(l_parts)
        .arg_ptr(o_parts)
        .arg_ptr(m_out)
        .arg_ptr(l_out)
        .arg_ptr(o_out)
        .arg_u32(num_seqs)
        .arg_u32(num_q_heads)
        .arg_u32(head_dim)
        .arg_u32(num_parts)
        .arg_u64(seq_stride)
        .arg_u64(part_stride)
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
    check_size("output", output, rows * head_dim, 2)
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
