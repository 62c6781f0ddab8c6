"""Records on the GPU: tails, and blocks that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupaged import ops
from cupaged.formats import CacheLayout
from cupaged.pointers import DevicePtr
from cupaged.streaming.arguments import device_rows, of_format
from cupaged.streaming.device import Bytes, Device
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store import BlockStore

_STAGING_BYTES = 4 << 20
_WRITERS = {
    "bf16": "reshape_and_cache_bf16",
    "fp8": "reshape_and_cache_fp8",
    "nvfp4": "reshape_and_cache_nvfp4",
}


class RecordPool:
    """An array of records on the device, and which of them are free.

    Args:
        gpu: the backend.
        device: its memory and streams.
        shape: of the records.
        num_records: in the array.
        scales: FP8 dequantisation scales of K and V.
    """

    def __init__(
        self, gpu: Any, device: Device, shape: RecordLayout, num_records: int, scales: tuple[float, float]
    ) -> None:
        self._gpu = gpu
        self._device = device
        self._shape = shape
        self._scales = scales
        self.num_records = num_records
        self._memory = gpu.zeros(num_records * shape.record_bytes, "uint8")
        self.address = int(gpu.pointer(self._memory))
        self._free = list(range(num_records - 1, -1, -1))
        count = max(1, _STAGING_BYTES // shape.record_bytes)
        self._staging = device.pinned(count * shape.record_bytes).reshape(count, -1)
        self._copied = device.event()
        name = of_format(_WRITERS, shape.layout.format)
        self._write, self._writer = getattr(ops, name), gpu.kernel(name, name)

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return int(self._memory.nbytes)

    def take(self) -> int:
        """A free record."""
        return self._free.pop()

    def give_back(self, records: Sequence[int]) -> None:
        """These are free again."""
        self._free += records

    def _at(self, record: int) -> int:
        return self.address + record * self._shape.record_bytes

    def load(self, store: BlockStore, first: int, records: Sequence[int]) -> None:
        """Blocks of a store, from `first` on, into these records; waits for the device before and after."""
        self._gpu.synchronize()
        for begin in range(0, len(records), len(self._staging)):
            targets = records[begin : begin + len(self._staging)]
            store.read(first + begin, self._staging[: len(targets)].reshape(-1))
            self._put(targets)

    def upload(self, data: Bytes, record: int) -> None:
        """One record from host memory; waits likewise."""
        self._gpu.synchronize()
        self._staging[0] = data
        self._put([record])

    def _put(self, targets: Sequence[int]) -> None:
        stream = self._gpu.null_stream()
        try:
            for row, record in zip(self._staging, targets, strict=False):
                self._device.to_device(self._at(record), row, stream)
        finally:
            self._gpu.synchronize()  # after an error too: the next call writes the staging memory

    def download(self, record: int, stream: int) -> Bytes:
        """A record after what is queued on the stream, which this waits for. Valid until the next call."""
        row: Bytes = self._staging[0]
        self._device.to_host(row, self._at(record), stream)
        self._copied.record(stream)
        self._copied.synchronize()
        return row

    def rows(self, key: Any, value: Any, num_tokens: int, stream: int) -> tuple[DevicePtr, DevicePtr]:
        """New tokens of K and V that a caller gives, BF16 and contiguous: at least so many of these heads."""
        row = (self._shape.layout.num_kv_heads, self._shape.layout.head_dim)
        return (
            device_rows(self._gpu, "key", key, "bf16", num_tokens, row, stream),
            device_rows(self._gpu, "value", value, "bf16", num_tokens, row, stream),
        )

    def write(
        self, key: DevicePtr, value: DevicePtr, slot_mapping: int, num_tokens: int, stream: int
    ) -> None:
        """New tokens, contiguous, into slots: record * block_size + offset."""
        layout, pool = self._shape.layout, self._shape.pool
        row = layout.num_kv_heads * layout.head_dim
        scales, behind, keywords = self._format_arguments(pool)
        self._write(
            self._gpu, self._writer, key, value, *self._shape.pools(self.address, self.num_records),
            DevicePtr(slot_mapping, 8 * num_tokens),
            num_tokens, layout.num_kv_heads, layout.head_dim, layout.block_size,
            *scales, row, row, *behind, stream, num_blocks=self.num_records, **keywords,
        )  # fmt: skip

    def _format_arguments(
        self, pool: CacheLayout
    ) -> tuple[tuple[float, ...], tuple[int, ...], dict[str, int]]:
        """What the writer of the format takes before the row strides, after them, and by keyword."""
        by_format: dict[str, tuple[tuple[float, ...], tuple[int, ...], dict[str, int]]] = {
            "bf16": ((), (), {"cache_stride": pool.cache_stride}),
            "fp8": (self._scales, (pool.cache_stride,), {}),
            "nvfp4": ((), (pool.block_stride_bytes, pool.data_section_bytes), {}),
        }
        return of_format(by_format, pool.format)


def row_span(rows: DevicePtr, row_bytes: int, first: int, count: int) -> DevicePtr:
    """Some of the rows."""
    return DevicePtr(rows.address + first * row_bytes, count * row_bytes)
