"""Dequantisation scales of an FP8 cache, from the tokens at hand when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupaged.backends.base import GpuBackend
from cupaged.calibration import Fp8Calibration

# Tokens to come may be larger than those seen, the more so the fewer there were, and what exceeds 448 times
# the scale is cut off. E4M3 is a floating-point format: three of its 15 normal binades kept free above the
# largest value seen cost no precision, only the smallest values.
HEADROOM = 8.0


def fp8_scales(gpu: GpuBackend, tensors: Sequence[Any], stream: Any) -> list[float]:
    """One scale for each tensor: its largest magnitude, times `HEADROOM`, becomes the largest E4M3 value.

    All maxima are queued before the first is read, so the device is waited for once.

    Args:
        gpu: the backend that holds the tensors.
        tensors: BF16 bits, contiguous, tokens along the first axis.
        stream: stream of the launches.
    """
    calibrations = []
    for tensor in tensors:
        calibration = Fp8Calibration(gpu)
        row = tensor[0].size
        calibration.update(tensor, len(tensor), row, row, stream)
        calibrations.append(calibration)
    return [HEADROOM * calibration.scale() for calibration in calibrations]
