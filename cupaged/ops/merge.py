"""Launchers that merge attention results over disjoint sets of keys. Source: ``kernels/merge_states.cu``.

All of them: outputs ``[num_parts, num_rows, head_dim]``, normalised, part_stride elements between parts; lses
F32 ``[num_parts, num_rows]``, natural logarithms, -inf for a part without keys, lse_stride elements between
parts; out ``[num_rows, head_dim]`` and out_lse F32 ``[num_rows]`` (0 to leave it out) are written. A row is
one (sequence, query head). out and out_lse may be one of the parts, where both are of the same type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import check_positive, check_row_stride, check_size, item_bytes, launcher

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


def _merge(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    check_positive(num_parts=num_parts, head_dim=head_dim)
    row = num_rows * head_dim
    in_bytes, out_bytes = item_bytes(kernel, "outputs"), item_bytes(kernel, "out")
    check_row_stride("part_stride", part_stride, row, num_parts, outputs, "outputs", in_bytes)
    check_row_stride("lse_stride", lse_stride, num_rows, num_parts, lses, "lses", 4)
    check_size("out", out, row, out_bytes)
    check_size("out_lse", out_lse, num_rows)
    if num_rows == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(outputs)
        .arg_ptr(lses)
        .arg_ptr(out)
        .arg_ptr(out_lse)
        .arg_u32(num_parts)
        .arg_u64(num_rows)
        .arg_u32(head_dim)
        .arg_u64(part_stride)
        .arg_u64(lse_stride)
        .launch(stream)
    )


@launcher
def merge_states_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    """Merge BF16 outputs into a BF16 one.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _merge(
        gpu, kernel, outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride, lse_stride,
        stream,
    )  # fmt: skip


@launcher
def merge_states_f32(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    """Merge F32 outputs into an F32 one.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _merge(
        gpu, kernel, outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride, lse_stride,
        stream,
    )  # fmt: skip


@launcher
def merge_states_f32_to_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    """Merge F32 outputs into a BF16 one.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _merge(
        gpu, kernel, outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride, lse_stride,
        stream,
    )  # fmt: skip


@launcher
def merge_states_f16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    """Merge F16 outputs into an F16 one.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _merge(
        gpu, kernel, outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride, lse_stride,
        stream,
    )  # fmt: skip


@launcher
def merge_states_f32_to_f16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    outputs: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    num_parts: int,
    num_rows: int,
    head_dim: int,
    part_stride: int,
    lse_stride: int,
    stream: Any,
) -> None:
    """Merge F32 outputs into an F16 one.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    _merge(
        gpu, kernel, outputs, lses, out, out_lse, num_parts, num_rows, head_dim, part_stride, lse_stride,
        stream,
    )  # fmt: skip
