"""``cupaged inspect``: where a token's bytes lie in a pool."""

from __future__ import annotations

import argparse
import dataclasses
import json

from cupaged.cli.parsing import Commands, add_format, add_shape, command, not_negative, positive
from cupaged.cli.pool_map import Place, locate, row_of
from cupaged.cli.status import DONE
from cupaged.cli.terminal import Terminal
from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout, cache_format
from cupaged.kv.layouts import checked_layouts
from cupaged.tables import UNUSED_COLUMN

_SHOWN = 6  # rows or columns of a picture
_GAP = "..."


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "inspect",
        summary="show where a token's bytes lie in a pool",
        description="Shows the layout of a K or V pool: its sections and strides, a picture of one block,\n"
        "and the bytes of one token, head and value. It needs no GPU and allocates nothing.",
        examples="  %(prog)s --format nvfp4 --kv-heads 2 --head-dim 64 --token 37 --head 1\n"
        "  %(prog)s --format fp8 --heads-first --table 7,2,9 --token 40 --element 5\n"
        "  %(prog)s --interleaved --token 20          K and V of a block next to each other\n"
        "  %(prog)s --format nvfp4 --json             the same numbers for a program",
    )
    add_format(parser)
    add_shape(parser)
    parser.add_argument(
        "--token", type=not_negative, default=0, metavar="T", help="position in the sequence (0)"
    )
    parser.add_argument("--head", type=not_negative, default=0, metavar="H", help="KV head (0)")
    parser.add_argument("--element", type=not_negative, default=0, metavar="D", help="value of the head (0)")
    parser.add_argument("--table", type=_table, metavar="IDS",
                        help="the sequence's blocks, as 7,2,9; left out: block i is its i-th")  # fmt: skip
    parser.add_argument("--block-stride", type=positive, metavar="BYTES", help="from one block to the next")
    parser.add_argument("--data-section", type=positive, metavar="BYTES",
                        help="from a block's begin to its scales (NVFP4)")  # fmt: skip
    parser.add_argument("--interleaved", action="store_true",
                        help="one allocation [num_blocks, 2, ...]: twice the stride, V after K")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _table(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(word) for word in text.split(","))
    except ValueError:
        ids = (-2,)
    if not all(UNUSED_COLUMN <= block < 2**31 for block in ids):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed are block ids up to {2**31 - 1} with commas, as 7,2,9; -1 where unused"
        )
    return ids


def _layout(options: argparse.Namespace) -> CacheLayout:
    layout = CacheLayout(
        cache_format(options.format),
        options.kv_heads,
        options.head_dim,
        options.block_size,
        block_stride_override=options.block_stride,
        data_section_override=options.data_section,
        heads_first=options.heads_first,
    )
    if not options.interleaved:
        return layout
    return dataclasses.replace(layout, block_stride_override=2 * layout.block_stride_bytes)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Print the layout and one place in it."""
    layout = _layout(options)
    try:
        checked_layouts(layout, None)
    except ArgumentValueError as error:
        terminal.note(f"warning: no kernel takes this layout: {error.detail}")
    place = locate(layout, options.token, options.head, options.element, options.table)
    if options.json:
        terminal.line(json.dumps(_content(layout, place), indent=2))
        return DONE
    order = "head, token (HND)" if layout.heads_first else "token, head (NHD)"
    terminal.line(
        f"{layout.format.name} pool of {layout.num_kv_heads} KV heads x head_dim {layout.head_dim}, "
        f"blocks of {layout.block_size} tokens, rows in the order {order}\n"
    )
    _sections(layout, options.interleaved, terminal)
    terminal.table(["bytes between", *strides(layout)["data"]],
                   [[name, *map(_number, of.values())] for name, of in strides(layout).items()])  # fmt: skip
    terminal.line()
    _picture(layout, place, terminal)
    _place(options, place, terminal)
    return DONE


def strides(layout: CacheLayout) -> dict[str, dict[str, int]]:
    """Bytes between blocks, tokens and heads in each section."""
    sections = {"data": layout.format.data_bytes(layout.head_dim)}
    if scale_bytes := layout.format.scale_bytes(layout.head_dim):
        sections["scales"] = scale_bytes
    return {
        name: {
            "blocks": layout.block_stride_bytes,
            "tokens": row_of(layout, 1, 0) * row_bytes,
            "heads": row_of(layout, 0, 1) * row_bytes,
        }
        for name, row_bytes in sections.items()
    }


def _number(value: int) -> str:
    return f"{value:,}"


def _sections(layout: CacheLayout, interleaved: bool, terminal: Terminal) -> None:
    """The sections of a block, in memory order."""
    parts = [("data", 0, layout.block_size * layout.num_kv_heads * layout.format.data_bytes(layout.head_dim))]
    if layout.block_bytes > layout.data_section_bytes:
        parts.append(("scales", layout.data_section_bytes, layout.block_bytes - layout.data_section_bytes))
    end = layout.block_bytes
    if interleaved:
        half = layout.block_stride_bytes // 2
        parts.append(("V's block", half, layout.block_bytes))
        end = half + layout.block_bytes
    if layout.block_stride_bytes > end:
        parts.append(("padding", end, layout.block_stride_bytes - end))
    bar = "|".join(f" {name} {size:,} B " for name, _, size in parts)
    terminal.line(f"one block, {layout.block_stride_bytes:,} bytes: |{bar}|")
    if interleaved:
        terminal.line(f"offsets below are K's; V's are {layout.block_stride_bytes // 2:,} bytes higher")
    terminal.line()


def _picture(layout: CacheLayout, place: Place, terminal: Terminal) -> None:
    """The rows of one block in memory order, each as its offset in the block; the one asked for in []."""
    row_bytes = layout.format.data_bytes(layout.head_dim)
    head = place.row // layout.block_size if layout.heads_first else place.row % layout.num_kv_heads
    tokens = _window(layout.block_size, place.offset)
    heads = _window(layout.num_kv_heads, head)
    lines, columns = (heads, tokens) if layout.heads_first else (tokens, heads)
    line_name, column_name = ("head", "token") if layout.heads_first else ("token", "head")

    def cell(line: int | None, column: int | None) -> str:
        if line is None or column is None:
            return _GAP
        offset, own_head = (column, line) if layout.heads_first else (line, column)
        row = row_of(layout, offset, own_head)
        text = f"{row * row_bytes:,}"
        return f"[{text}]" if row == place.row else f" {text} "

    def label(name: str, index: int | None) -> str:
        return _GAP if index is None else f"{name} {index}"

    rows = [[label(line_name, line), *(cell(line, column) for column in columns)] for line in lines]
    terminal.table(
        ["", *(label(column_name, column) for column in columns)],
        rows,
        f"byte offsets of the rows of block {place.block}, {row_bytes} bytes each:",
    )
    terminal.line()


def _window(count: int, wanted: int) -> list[int | None]:
    """Indices below count: the first, those around the wanted one, the last; None where some are left out."""
    if count <= _SHOWN:
        return list(range(count))
    shown = sorted({0, 1, count - 1, *(i for i in range(wanted - 1, wanted + 2) if 0 <= i < count)})
    window: list[int | None] = []
    for previous, index in zip([-1, *shown], shown, strict=False):
        window += [None, index] if index > previous + 1 else [index]
    return window


def _place(options: argparse.Namespace, place: Place, terminal: Terminal) -> None:
    nibble = f", its {place.nibble} nibble" if place.nibble else ""
    rows = [
        ["block table column", f"{place.column}"],
        ["block id", f"{place.block}"],
        ["offset in the block", f"{place.offset}"],
        ["slot", f"{place.slot:,}"],
        [f"bytes of head {options.head}", f"{place.data}"],
    ]
    if place.scales is not None:
        rows.append(["bytes of its scales", f"{place.scales}"])
    rows.append([f"byte of value {options.element}", f"{place.element}{nibble}"])
    if place.element_scale is not None:
        rows.append(["byte of its scale", f"{place.element_scale}"])
    terminal.table([f"token {options.token}", "where, counted from the pool's begin"], rows)


def _content(layout: CacheLayout, place: Place) -> dict[str, object]:
    return {
        "format": layout.format.name,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "heads_first": layout.heads_first,
        "block_bytes": layout.block_bytes,
        "block_stride_bytes": layout.block_stride_bytes,
        "data_section_bytes": layout.data_section_bytes,
        "bytes_per_token": layout.bytes_per_token,
        "stride_bytes": strides(layout),
        "place": dataclasses.asdict(place),
    }
