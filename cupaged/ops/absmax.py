"""Launchers of the BF16 absmax. Source: ``kernels/bf16_absmax.cu``.

Both accumulate into out_max F32 ``[1]``, which must hold a non-negative number (0 to begin) or NaN. A NaN
among the values makes it NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import check_row_stride, check_size, launcher

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


@launcher
def bf16_absmax(
    gpu: GpuBackend, kernel: KernelHandle, data: Any, out_max: Any, n_elems: int, stream: Any
) -> None:
    """Largest magnitude of n_elems contiguous BF16 values; no launch where there are none."""
    check_size("data", data, n_elems, 2)
    check_size("out_max", out_max, 1)
    if n_elems == 0:
        return
    (KernelLaunch(gpu, kernel).arg_ptr(data).arg_ptr(out_max).arg_u32(n_elems).launch(stream))


@launcher
def bf16_absmax_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    data: Any,
    out_max: Any,
    num_rows: int,
    row_elems: int,
    row_stride: int,
    stream: Any,
) -> None:
    """Largest magnitude of num_rows rows of row_elems BF16 values, row_stride elements apart.

    What lies between the rows is not read.
    """
    check_row_stride("row_stride", row_stride, row_elems, num_rows, data, "data")
    check_size("out_max", out_max, 1)
    if num_rows == 0 or row_elems == 0:
        return
    (
        KernelLaunch(gpu, kernel)
        .arg_ptr(data)
        .arg_ptr(out_max)
        .arg_u32(num_rows)
        .arg_u32(row_elems)
        .arg_u64(row_stride)
        .launch(stream)
    )
