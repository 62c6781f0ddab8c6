"""Dequantisation scales: one for a tensor, or one for each KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FP8, CacheLayout, checked_scale, checked_scales
from cupaged.interop import device_array, is_lent


@dataclass(frozen=True)
class Scale:
    """A checked scale, as the kernels take it.

    Attributes:
        tensor: for all heads; 1 where each head has its own.
        heads: F32 ``[num_kv_heads]`` on the device, or None.
    """

    tensor: float
    heads: Any = None


def scale_of(gpu: Any, name: str, value: Any, num_kv_heads: int) -> Scale:
    """A scale from what a caller gives.

    Args:
        gpu: the backend.
        name: what an error calls it.
        value: a real number; or one for each KV head: a host array or a list, which is checked and copied, or
            an F32 array on a GPU, of any library, which is taken at its word (reading it would wait for the
            device) and must be ready on the default stream.
        num_kv_heads: of the cache.

    Raises:
        ArgumentTypeError, ArgumentValueError: not finite and above 0, or not one for each head.
    """
    if not isinstance(value, np.ndarray) and is_lent(value):
        value = device_array(gpu, value, gpu.null_stream())
    if hasattr(type(value), "__cuda_array_interface__"):
        if str(value.dtype) != "float32":
            raise ArgumentTypeError(f"{name}: got dtype {value.dtype}, allowed: float32")
        _check_count(name, tuple(value.shape), num_kv_heads)
        gpu.pointer(value)  # it lives on this backend
        return Scale(1.0, value)
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        host = np.asarray(value)
        _check_count(name, host.shape, num_kv_heads)
        return Scale(1.0, gpu.asarray(checked_scales(name, host)))
    return Scale(checked_scale(name, value))


def check_given(layout: CacheLayout, name: str, scale: Any) -> None:
    """Raise ArgumentValueError where a cache of this layout needs a scale and has none, or the reverse."""
    if scale is None and layout.format == FP8:
        raise ArgumentValueError(
            f"{name}: got None, an fp8 cache needs it (cupaged.calibration finds one; set_scales changes it)"
        )
    if scale is not None and layout.format == BF16:
        raise ArgumentValueError(f"{name}: got {scale}; a bf16 cache has none")


def _check_count(name: str, shape: tuple[int, ...], num_kv_heads: int) -> None:
    if shape != (num_kv_heads,):
        raise ArgumentValueError(f"{name}: got shape {shape}, allowed are one number and ({num_kv_heads},)")
