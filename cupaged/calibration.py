"""FP8 scales, for a tensor or for each KV head, from the largest magnitude seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentValueError
from cupaged.formats import E4M3_MAX, checked_scale
from cupaged.interop import address_of, named_array
from cupaged.launch import as_integer
from cupaged.ops import bf16_absmax_rows
from cupaged.ops._checks import check_row_stride
from cupaged.pointers import DevicePtr

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_BF16_BYTES = 2
_F32_BYTES = 4


class Fp8Calibration:
    """Running absmax of BF16 data on a device, and the dequantisation scale headroom * absmax / 448.

    Args:
        gpu: the backend that holds the data.
        num_heads: KV heads, to follow each by itself; None for one absmax of all.
        headroom: at least 1: how many times what was seen must still fit; what is larger saturates.

    Attributes:
        absmax: F32 ``[num_heads or 1]`` on the device.

    Raises:
        ArgumentValueError: an argument that is not allowed.
    """

    def __init__(self, gpu: GpuBackend, *, num_heads: int | None = None, headroom: float = 1.0) -> None:
        self._heads = 1 if num_heads is None else as_integer("num_heads", num_heads)
        if self._heads < 1:
            raise ArgumentValueError(f"num_heads: got {num_heads}, allowed is 1 or more, and None")
        self._headroom = checked_scale("headroom", headroom)
        if self._headroom < 1.0:
            raise ArgumentValueError(f"headroom: got {headroom}, allowed is 1 or more")
        self._gpu = gpu
        self._kernel = self._gpu.kernel("bf16_absmax", "bf16_absmax_rows")
        self.absmax = self._gpu.zeros(self._heads, "float32")

    def reset(self, stream: Any) -> None:
        """Forget everything seen, ordered on the stream."""
        gpu = self._gpu
        gpu.memset(gpu.pointer(self.absmax), 0, _F32_BYTES * self._heads, gpu.stream_handle(stream))

    def update(self, data: Any, num_rows: int, row_elems: int, row_stride: int, stream: Any) -> None:
        """Take in num_rows rows of row_elems BF16 values, row_stride elements apart.

        With num_heads, a row is ``[num_heads, row_elems / num_heads]``.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        data = named_array(self._gpu, "data", data, stream)
        if self._heads == 1:
            self._launch(data, self.absmax, num_rows, row_elems, row_stride, stream)
            return
        num_rows, row_elems = as_integer("num_rows", num_rows), as_integer("row_elems", row_elems)
        row_stride = as_integer("row_stride", row_stride)
        if row_elems % self._heads:
            raise ArgumentValueError(
                f"row_elems: got {row_elems}, allowed are multiples of {self._heads} heads"
            )
        self._kernel.check_array(0, data)
        check_row_stride("row_stride", row_stride, row_elems, num_rows, data, "data")
        first, maxima = address_of(self._gpu, "data", data), self._gpu.pointer(self.absmax)
        head_dim = row_elems // self._heads
        reach = _BF16_BYTES * (max(0, num_rows - 1) * row_stride + head_dim)  # bytes, of one head's rows
        for head in range(self._heads):
            rows = DevicePtr(first + _BF16_BYTES * head * head_dim, reach)
            absmax = DevicePtr(maxima + _F32_BYTES * head, _F32_BYTES)
            self._launch(rows, absmax, num_rows, head_dim, row_stride, stream)

    def _launch(
        self, data: Any, absmax: Any, num_rows: int, row_elems: int, row_stride: int, stream: Any
    ) -> None:
        bf16_absmax_rows(self._gpu, self._kernel, data, absmax, num_rows, row_elems, row_stride, stream)

    def scale(self) -> float:
        """The scale for all heads, or 1.0 where everything seen was zero. Reads the device: synchronises.

        A NaN or an infinity among the data gives a scale that the launchers refuse.
        """
        absmax = self._gpu.to_host(self.absmax)
        largest = float(np.max(absmax))  # a NaN wins
        return self._headroom * largest / E4M3_MAX if largest != 0.0 else 1.0

    def scales(self) -> npt.NDArray[np.float32]:
        """A scale for each head, on the host as `KVCache` takes them; otherwise as `scale`."""
        absmax = self._gpu.to_host(self.absmax).astype(np.float64)
        scaled = self._headroom * absmax / E4M3_MAX
        result: npt.NDArray[np.float32] = np.where(absmax == 0.0, 1.0, scaled).astype(np.float32)
        return result
