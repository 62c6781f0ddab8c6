"""Per-tensor FP8 scales from the largest magnitude seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.formats import E4M3_MAX
from cupaged.ops import bf16_absmax_rows

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


class Fp8Calibration:
    """Running absmax of BF16 data on a device, and the dequantisation scale absmax / 448 that follows.

    Args:
        gpu: the backend that holds the data.
    """

    def __init__(self, gpu: GpuBackend) -> None:
        self._gpu = gpu
        self._kernel = self._gpu.kernel("bf16_absmax", "bf16_absmax_rows")
        self.absmax = self._gpu.zeros(1, "float32")

    def reset(self, stream: Any) -> None:
        """Forget everything seen, ordered on the stream."""
        gpu = self._gpu
        gpu.memset(gpu.pointer(self.absmax), 0, 4, gpu.stream_handle(stream))

    def update(self, data: Any, num_rows: int, row_elems: int, row_stride: int, stream: Any) -> None:
        """Take in num_rows rows of row_elems BF16 values, row_stride elements apart."""
        bf16_absmax_rows(self._gpu, self._kernel, data, self.absmax, num_rows, row_elems, row_stride, stream)

    def scale(self) -> float:
        """absmax / 448, or 1.0 where everything seen was zero. Reads the device: synchronises.

        A NaN or an infinity among the data gives a scale that the launchers refuse.
        """
        absmax = float(self._gpu.to_host(self.absmax)[0])
        return absmax / E4M3_MAX if absmax != 0.0 else 1.0
