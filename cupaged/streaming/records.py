"""Records: how a block travels between host, file and GPU. A record is a block of K, then one of V."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout, gather_tokens, write_tokens
from cupaged.launch import in_range
from cupaged.ops._checks import check_scale
from cupaged.pointers import DevicePtr

_ALIGNMENT = 16  # bytes, of what kernels read


@dataclass(frozen=True)
class RecordLayout:
    """Records of one cache layout.

    Attributes:
        layout: of a block of K or V; its strides are those within a record.
    """

    layout: CacheLayout

    def __post_init__(self) -> None:
        if not isinstance(self.layout, CacheLayout):
            raise ArgumentTypeError(f"layout: got {self.layout!r}, allowed is a CacheLayout")
        if self.layout.heads_first:
            raise ArgumentValueError(
                "layout: heads_first is True; blocks are streamed as [block_size, num_kv_heads, ...] only"
            )
        if self.value_offset % _ALIGNMENT:
            raise ArgumentValueError(
                f"layout: its blocks are {self.value_offset} bytes apart, allowed are multiples of "
                f"{_ALIGNMENT}"
            )

    def agrees_with(self, other: RecordLayout) -> bool:
        """Whether records of both mean the same, however their layouts were written down."""
        names = (
            "format",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "block_stride_bytes",
            "data_section_bytes",
        )
        return all(getattr(self.layout, name) == getattr(other.layout, name) for name in names)

    @property
    def value_offset(self) -> int:
        """Bytes from a record's begin to its V block."""
        return self.layout.block_stride_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return 2 * self.layout.block_stride_bytes

    @property
    def pool(self) -> CacheLayout:
        """Layout of K, and of V ``value_offset`` bytes further on, in an array of records."""
        return dataclasses.replace(self.layout, block_stride_override=self.record_bytes)

    @property
    def block_size(self) -> int:
        """Tokens of a record."""
        return self.layout.block_size

    def pools(self, address: int, num_records: int) -> tuple[DevicePtr, DevicePtr]:
        """The K pool and the V pool in an array of records on a device."""
        size, offset = num_records * self.record_bytes, self.value_offset
        return DevicePtr(address, size), DevicePtr(address + offset, size - offset)

    def halves(self, records: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Views of the K pool and the V pool in records ``[n, record_bytes]``, flat, in the pool's dtype."""
        flat = records.reshape(-1)
        dtype = self.layout.pool_dtype
        return flat.view(dtype), flat[self.value_offset :].view(dtype)


def encode_records(
    layout: CacheLayout,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[npt.NDArray[np.uint8], int]:
    """Records of a sequence's tokens, encoded on the host.

    Args:
        layout: of the blocks.
        key: ``[num_tokens, num_kv_heads, head_dim]``, float32, float64 or bfloat16.
        value: likewise.
        k_scale: FP8 dequantisation scale of K.
        v_scale: of V.

    Returns:
        Records uint8 ``[ceil(num_tokens / block_size), record_bytes]`` and the tokens in the last of them (0
        without any record). Slots beyond the last token are zero.

    Raises:
        ArgumentValueError, ArgumentTypeError: the message names the argument.
    """
    shape = RecordLayout(layout)
    keys, values = np.asarray(key), np.asarray(value)
    row = (layout.num_kv_heads, layout.head_dim)
    if keys.ndim != 3 or keys.shape[1:] != row:
        raise ArgumentValueError(f"key: got shape {keys.shape}, allowed is (n, {row[0]}, {row[1]})")
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    if keys.shape != values.shape:
        raise ArgumentValueError(f"value: got shape {values.shape}, allowed is that of key, {keys.shape}")
    count = -(-len(keys) // layout.block_size)
    records = np.zeros((count, shape.record_bytes), np.uint8)
    slots = np.arange(len(keys))
    for half, rows, scale in zip(shape.halves(records), (keys, values), (k_scale, v_scale), strict=True):
        if count:
            write_tokens(half, shape.pool, rows, slots, scale=scale)
    return records, len(keys) - max(0, count - 1) * layout.block_size


def decode_records(
    layout: CacheLayout,
    records: npt.NDArray[np.uint8],
    num_tokens: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The dequantised K and V of records, float32 ``[num_tokens, num_kv_heads, head_dim]`` each.

    Args:
        layout: of the blocks.
        records: uint8 ``[n, record_bytes]``.
        num_tokens: of the first blocks, n * block_size at most.
        k_scale: FP8 dequantisation scale of K.
        v_scale: of V.
    """
    shape = RecordLayout(layout)
    if not isinstance(records, np.ndarray) or records.dtype != np.uint8:
        found = getattr(records, "dtype", type(records).__name__)
        raise ArgumentTypeError(f"records: got {found}, allowed is a NumPy array of uint8")
    if records.ndim != 2 or records.shape[1] != shape.record_bytes:
        raise ArgumentValueError(f"records: got shape {records.shape}, allowed is (n, {shape.record_bytes})")
    num_tokens = in_range("num_tokens", num_tokens, 0, len(records) * layout.block_size)
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    key, value = shape.halves(np.ascontiguousarray(records))
    table = np.arange(len(records))
    return (
        gather_tokens(key, shape.pool, table, num_tokens, scale=k_scale),
        gather_tokens(value, shape.pool, table, num_tokens, scale=v_scale),
    )
