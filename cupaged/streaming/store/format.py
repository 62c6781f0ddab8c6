"""The file format, version 1: the bytes of its header and of its block index. See docs/streaming.md.

    page 0            header, and in its last 32 bytes a checkpoint
    then extents:     index page | BLOCKS_PER_EXTENT records, end padded to a page
                      index page | ...

All integers are little-endian, checksums are CRC-32 (zlib's).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError, CupagedError, StoreFormatError
from cupaged.formats import CacheLayout, cache_format
from cupaged.ops._checks import check_scale
from cupaged.streaming.device import PAGE
from cupaged.streaming.records import RecordLayout

MAGIC = b"CUPAGEKV"
VERSION = 1
BLOCKS_PER_EXTENT = 128

_HEAD = np.dtype([("magic", "S8"), ("version", "<u4"), ("json_bytes", "<u4"), ("json_crc", "<u4")])
# An entry of the block index. `checksum` covers the entry's bytes before it, `data_crc` the record.
ENTRY = np.dtype(
    [
        ("mark", "<u4"),
        ("num_tokens", "<u4"),
        ("position", "<u8"),
        ("data_crc", "<u4"),
        ("reserved", "<u8"),
        ("checksum", "<u4"),
    ]
)
# Says how many complete blocks the disk held for certain.
_CHECKPOINT = np.dtype([("mark", "<u4"), ("checksum", "<u4"), ("num_blocks", "<u8")])
CHECKPOINT_OFFSET = PAGE - 32
_MARK = 0x4B4C4243  # "CBLK"
_COVERED = ENTRY.itemsize - 4
assert ENTRY.itemsize * BLOCKS_PER_EXTENT == PAGE  # the index of an extent is one page


@dataclass(frozen=True)
class Header:
    """What a file says about its blocks.

    Attributes:
        layout: of a block of K or V.
        k_scale: FP8 dequantisation scale of K; 1 for other formats.
        v_scale: of V.
        user: anything that JSON can hold, for the file's owner.
    """

    layout: CacheLayout
    k_scale: float = 1.0
    v_scale: float = 1.0
    user: Any = None

    def __post_init__(self) -> None:
        RecordLayout(self.layout)
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, check_scale(name, getattr(self, name)))

    def pack(self) -> bytes:
        """The header page.

        Raises:
            StoreFormatError: `user` is too large.
            ArgumentTypeError, ArgumentValueError: JSON cannot hold `user`.
        """
        layout = self.layout
        text = _json(
            {
                "format": layout.format.name,
                "num_kv_heads": layout.num_kv_heads,
                "head_dim": layout.head_dim,
                "block_size": layout.block_size,
                "block_stride_bytes": layout.block_stride_bytes,
                "data_section_bytes": layout.data_section_bytes,
                "blocks_per_extent": BLOCKS_PER_EXTENT,
                "k_scale": self.k_scale,
                "v_scale": self.v_scale,
                "user": self.user,
            }
        )
        head = np.array((MAGIC, VERSION, len(text), zlib.crc32(text)), _HEAD)
        page = head.tobytes() + text
        if len(page) > CHECKPOINT_OFFSET:
            raise StoreFormatError(
                f"user: makes a header of {len(page)} bytes, allowed are {CHECKPOINT_OFFSET}"
            )
        return page.ljust(PAGE, b"\0")

    @staticmethod
    def unpack(page: bytes, name: str) -> Header:
        """From the header page.

        Args:
            page: the first bytes of a file.
            name: of the file, for messages.

        Raises:
            StoreFormatError: a foreign file, another version, or a damaged header.
        """
        if len(page) < PAGE or page[: len(MAGIC)] != MAGIC:
            raise StoreFormatError(f"{name}: not a file of cache blocks (it does not begin with {MAGIC!r})")
        head = np.frombuffer(page, _HEAD, 1)[0]
        if int(head["version"]) != VERSION:
            raise StoreFormatError(f"{name}: version {head['version']}, allowed is {VERSION}")
        text = page[_HEAD.itemsize : _HEAD.itemsize + int(head["json_bytes"])]
        if zlib.crc32(text) != int(head["json_crc"]):
            raise StoreFormatError(f"{name}: the header is damaged (its checksum does not agree)")
        try:
            return _header_of(json.loads(text))
        except (KeyError, TypeError, ValueError, RecursionError, CupagedError) as error:
            raise StoreFormatError(f"{name}: the header says what cannot be: {error}") from error


def _json(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields).encode()
    except TypeError as error:
        raise ArgumentTypeError(f"user: got what JSON cannot hold: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError(f"user: got what JSON cannot hold: {error}") from None


def _header_of(fields: dict[str, Any]) -> Header:
    if fields["blocks_per_extent"] != BLOCKS_PER_EXTENT:
        raise ValueError(f"{fields['blocks_per_extent']} blocks an extent, allowed are {BLOCKS_PER_EXTENT}")
    fmt = cache_format(fields["format"])
    layout = CacheLayout(
        fmt,
        fields["num_kv_heads"],
        fields["head_dim"],
        fields["block_size"],
        block_stride_override=fields["block_stride_bytes"],
        data_section_override=fields["data_section_bytes"] if fmt.has_scale_section else None,
    )
    return Header(layout, fields["k_scale"], fields["v_scale"], fields["user"])


@dataclass(frozen=True)
class Places:
    """Where things are in a file."""

    shape: RecordLayout

    @property
    def extent_bytes(self) -> int:
        """From one extent to the next."""
        data = BLOCKS_PER_EXTENT * self.shape.record_bytes
        return PAGE + -(-data // PAGE) * PAGE

    def entry(self, position: int) -> int:
        """Offset of a block's index entry."""
        extent, place = divmod(position, BLOCKS_PER_EXTENT)
        return PAGE + extent * self.extent_bytes + place * ENTRY.itemsize

    def record(self, position: int) -> int:
        """Offset of a block's record."""
        extent, place = divmod(position, BLOCKS_PER_EXTENT)
        return 2 * PAGE + extent * self.extent_bytes + place * self.shape.record_bytes

    def runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Blocks as runs that lie next to each other: (first block, count)."""
        found = []
        end = first + count
        while first < end:
            until = min(end, (first // BLOCKS_PER_EXTENT + 1) * BLOCKS_PER_EXTENT)
            found.append((first, until - first))
            first = until
        return found


def pack_checkpoint(num_blocks: int) -> bytes:
    """The checkpoint that so many blocks are on the disk."""
    count = num_blocks.to_bytes(8, "little")
    return np.array((_MARK, zlib.crc32(count), num_blocks), _CHECKPOINT).tobytes()


def unpack_checkpoint(page: bytes) -> int:
    """Blocks that the disk held for certain; 0 where the header page has no whole checkpoint."""
    found = np.frombuffer(page, _CHECKPOINT, 1, CHECKPOINT_OFFSET)[0]
    count = int(found["num_blocks"])
    right = found["mark"] == _MARK and found["checksum"] == zlib.crc32(count.to_bytes(8, "little"))
    return count if right else 0


def make_entries(first: int, records: npt.NDArray[np.uint8], num_tokens: int) -> npt.NDArray[np.void]:
    """Index entries of records that follow each other, each with so many tokens."""
    entries = np.zeros(len(records), ENTRY)
    entries["mark"] = _MARK
    entries["num_tokens"] = num_tokens
    entries["position"] = np.arange(first, first + len(records), dtype=np.uint64)
    entries["data_crc"] = [zlib.crc32(record.data) for record in records]
    entries["checksum"] = _checksums(entries)
    return entries


def _checksums(entries: npt.NDArray[np.void]) -> list[int]:
    raw = entries.tobytes()
    return [zlib.crc32(raw[at : at + _COVERED]) for at in range(0, len(raw), ENTRY.itemsize)]


def valid_entries(entries: npt.NDArray[np.void], first: int) -> int:
    """How many entries from the front on are right, where the first belongs to block `first`."""
    right = (entries["mark"] == _MARK) & (entries["position"] == np.arange(first, first + len(entries)))
    right &= entries["checksum"] == np.array(_checksums(entries), np.uint32)
    return len(right) if right.all() else int(np.argmin(right))
