"""Where one value of one token lies in a pool, in bytes: the arithmetic that the kernels do."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.formats.nvfp4 import NVFP4_GROUP


@dataclass(frozen=True)
class Span:
    """Bytes in a row.

    Attributes:
        begin: the first, counted from the pool's begin.
        num_bytes: how many.
    """

    begin: int
    num_bytes: int

    def __str__(self) -> str:
        last = self.begin + self.num_bytes - 1
        return f"{self.begin:,}" if self.num_bytes == 1 else f"{self.begin:,} .. {last:,}"


@dataclass(frozen=True)
class Place:
    """Where a row (one token of one KV head) and one value of it are.

    Attributes:
        column: of the block table.
        block: id of the block in the pool.
        offset: of the token in its block.
        slot: block * block_size + offset, as in slot_mapping.
        row: of the row among those of its block, in memory order.
        data: the row's values.
        scales: the row's scales, or None.
        element: the byte or bytes of the value.
        nibble: ``"low"`` or ``"high"``: the half of that byte, or an empty string.
        element_scale: the byte of the value's scale, or None.
    """

    column: int
    block: int
    offset: int
    slot: int
    row: int
    data: Span
    scales: Span | None
    element: Span
    nibble: str
    element_scale: Span | None


def locate(layout: CacheLayout, token: int, head: int, element: int, table: tuple[int, ...] | None) -> Place:
    """Find a value.

    Args:
        layout: of the pool.
        token: position in the sequence.
        head: KV head.
        element: of the head's head_dim values.
        table: the sequence's row of the block table; None: block i is its i-th.

    Raises:
        ArgumentValueError: one of them is outside what there is.
    """
    for name, value, count in (
        ("head", head, layout.num_kv_heads),
        ("element", element, layout.head_dim),
        ("token", token, None if table is None else len(table) * layout.block_size),
    ):
        if value < 0 or (count is not None and value >= count):
            raise ArgumentValueError(
                f"{name}: got {value}, allowed is 0 to {'...' if count is None else count - 1}"
            )
    column, offset = divmod(token, layout.block_size)
    block = column if table is None else table[column]
    if block < 0:
        raise ArgumentValueError(f"table: column {column}, which token {token} needs, is {block}")
    row = row_of(layout, offset, head)
    begin = block * layout.block_stride_bytes
    data_bytes = layout.format.data_bytes(layout.head_dim)
    data = Span(begin + row * data_bytes, data_bytes)
    scale_bytes = layout.format.scale_bytes(layout.head_dim)
    scales = Span(begin + layout.data_section_bytes + row * scale_bytes, scale_bytes) if scale_bytes else None
    width = max(1, data_bytes // layout.head_dim)
    return Place(
        column,
        block,
        offset,
        block * layout.block_size + offset,
        row,
        data,
        scales,
        Span(data.begin + element * data_bytes // layout.head_dim, width),
        ("low", "high")[element % 2] if data_bytes < layout.head_dim else "",
        None if scales is None else Span(scales.begin + element // NVFP4_GROUP, 1),
    )


def row_of(layout: CacheLayout, offset: int, head: int) -> int:
    """Position of a token's row among the rows of its block."""
    if layout.heads_first:
        return head * layout.block_size + offset
    return offset * layout.num_kv_heads + head
