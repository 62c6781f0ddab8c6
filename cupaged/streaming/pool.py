"""Records on the GPU: tails, and blocks that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupaged import ops
from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.ops._checks import check_shape, check_size
from cupaged.pointers import DevicePtr
from cupaged.streaming.device import Bytes, Device
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store import BlockStore

_STAGING_BYTES = 4 << 20


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
        name = f"reshape_and_cache_{shape.layout.format.name}"
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
        for row, record in zip(self._staging, targets, strict=False):
            self._device.to_device(self._at(record), row, stream)
        self._gpu.synchronize()

    def download(self, record: int, stream: int) -> Bytes:
        """A record after what is queued on the stream, which this waits for. Valid until the next call."""
        row: Bytes = self._staging[0]
        self._device.to_host(row, self._at(record), stream)
        self._copied.record(stream)
        self._copied.synchronize()
        return row

    def check_rows(self, key: Any, value: Any, num_tokens: int) -> None:
        """Key and value are BF16, contiguous, and hold so many tokens of these heads."""
        row = (self._shape.layout.num_kv_heads, self._shape.layout.head_dim)
        for position, (name, array) in enumerate((("key", key), ("value", value))):
            self._writer.check_array(position, array)
            check_tight_rows(name, array, num_tokens, row)

    def write(self, key: Any, value: Any, slot_mapping: int, num_tokens: int, stream: int) -> None:
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
        return by_format[pool.format.name]


def check_tight_rows(name: str, array: Any, count: int, row: tuple[int, int]) -> None:
    """Raise ArgumentValueError unless an array holds `count` such rows, one right behind the other."""
    check_shape(name, array, row)
    check_size(name, array, count * row[0] * row[1])
    strides, shape = getattr(array, "strides", None), getattr(array, "shape", None)
    if not strides or not shape or shape[0] < 2:
        return
    expected = array.size // shape[0] * array.dtype.itemsize
    if strides[0] != expected:
        raise ArgumentValueError(
            f"{name}: got {strides[0]} bytes between rows, allowed are contiguous rows of {expected}"
        )


def rows_of(gpu: Any, array: Any, row_bytes: int, first: int, count: int) -> DevicePtr:
    """Rows of a contiguous array, or behind an address."""
    address = array if type(array) is int else int(gpu.pointer(array))
    return DevicePtr(address + first * row_bytes, count * row_bytes)
