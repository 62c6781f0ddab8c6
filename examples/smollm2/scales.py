"""Dequantisation scales of a cache that needs them, from the tokens at hand when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupaged.backends.base import GpuBackend
from cupaged.calibration import Fp8Calibration


def absmax_scales(
    gpu: GpuBackend, tensors: Sequence[Any], largest: float, headroom: float, stream: Any
) -> list[float]:
    """One scale for each tensor: its largest magnitude, times ``headroom``, becomes ``largest``.

    All maxima are queued before the first is read, so the device is waited for once.

    Args:
        gpu: the backend that holds the tensors.
        tensors: BF16 bits, contiguous, tokens along the first axis.
        largest: `cupaged.formats.CacheFormat.largest`.
        headroom: at least 1: how many times what is seen now must still fit.
        stream: stream of the launches.
    """
    maxima = []
    for tensor in tensors:
        calibration = Fp8Calibration(gpu)  # its maximum serves every format, its `scale()` FP8 alone
        row = tensor[0].size
        calibration.update(tensor, len(tensor), row, row, stream)
        maxima.append(calibration.absmax)
    seen = [float(gpu.to_host(absmax)[0]) for absmax in maxima]
    return [headroom * absmax / largest if absmax != 0.0 else 1.0 for absmax in seen]
