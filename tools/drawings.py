"""Draws docs/pictures/: `python -m tools.drawings` writes them, --check only says whether they are as drawn.

Byte offsets and numbers in the drawings are computed, the layouts' by `cupaged.formats`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

from cupaged.formats import BF16, FP8, NVFP4, NVFP4_GROUP, CacheLayout
from tools.svg import WIDTH, Drawing

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
MARGIN = 10


def paged_cache() -> Drawing:
    """From a position to a block and a slot."""
    block_size, table, position, blocks = 16, [7, 2, 9, 4], 37, 10
    column, offset = divmod(position, block_size)
    picture = Drawing(232, "A block table names the blocks of a pool that hold a sequence")
    picture.text(MARGIN, 20, "block_tables: one row for each sequence", bold=True)
    for i, block in enumerate(table):
        picture.box(40 + 60 * i, 30, 60, 26, str(block), "key" if i == column else "plain")
        picture.text(70 + 60 * i, 70, f"{i * block_size}-{(i + 1) * block_size - 1}", anchor="middle")
    picture.text(40 + 60 * len(table) + 8, 70, "positions")
    picture.text(MARGIN, 100, f"pool: {blocks} blocks of {block_size} tokens, in any order", bold=True)
    for block in range(blocks):
        x = MARGIN + 40 * block
        fill = "key" if block == table[column] else "plain" if block in table else "free"
        picture.box(x, 112, 40, 30, str(block), fill)
    picture.line(70 + 60 * column, 74, MARGIN + 40 * table[column] + 20, 110, arrow=True)
    slot = table[column] * block_size + offset
    for i, line in enumerate(
        (
            f"position {position}: column {position} // {block_size} = {column}, "
            f"offset {position} % {block_size} = {offset}",
            f"block = block_tables[s, {column}] = {table[column]}",
            f"slot = block * {block_size} + offset = {slot}",
            "grey: free, or another sequence's",
        )
    ):
        picture.text(MARGIN, 166 + 18 * i, line)
    return picture


EXAMPLE = {"num_kv_heads": 2, "head_dim": 32, "block_size": 2}  # small enough to draw every row


def _rows(picture: Drawing, y: float, first: int, row_bytes: int, fill: str, words: str) -> int:
    """The rows of a section with their byte offsets; returns the offset of its end."""
    for i in range(EXAMPLE["block_size"] * EXAMPLE["num_kv_heads"]):
        token, head = divmod(i, EXAMPLE["num_kv_heads"])
        picture.box(MARGIN + 100 * i, y, 100, 26, f"t{token} h{head}{words}", fill)
        picture.text(MARGIN + 100 * i + 2, y + 40, str(first + i * row_bytes))
    return first + EXAMPLE["block_size"] * EXAMPLE["num_kv_heads"] * row_bytes


def _zoom(picture: Drawing, y: float, cells: list[str], fill: str) -> None:
    """The first bytes of a section, a cell each, under the first row."""
    width = 400 / len(cells)
    for i, cell in enumerate(cells):
        picture.box(MARGIN + width * i, y, width, 24, cell, fill)


def layout_bf16() -> Drawing:
    """Rows of a block, and the bytes of one."""
    layout = CacheLayout(BF16, **EXAMPLE)
    picture = Drawing(170, "A BF16 block byte by byte")
    picture.text(MARGIN, 20, f"BF16 block, {layout.block_bytes} bytes (offsets below)", bold=True)
    end = _rows(picture, 30, 0, layout.bytes_per_token_head, "key", "")
    picture.text(WIDTH - MARGIN, 70, str(end), anchor="end")
    picture.text(MARGIN, 98, f"row t0 h0: {layout.head_dim} values, {layout.bytes_per_token_head} bytes")
    _zoom(picture, 106, ["low", "high", "low", "high", "..."], "key")
    for i, label in enumerate(("byte 0", "1", "2", "3")):
        picture.text(MARGIN + 80 * i + 2, 144, label)
    picture.text(MARGIN, 162, "value 0 = bytes 0, 1; value 1 = bytes 2, 3 (little-endian)")
    return picture


def layout_fp8() -> Drawing:
    """Rows of a block, and the bytes of one."""
    layout = CacheLayout(FP8, **EXAMPLE)
    picture = Drawing(170, "An FP8 block byte by byte")
    picture.text(MARGIN, 20, f"FP8 block, {layout.block_bytes} bytes (offsets below)", bold=True)
    end = _rows(picture, 30, 0, layout.bytes_per_token_head, "key", "")
    picture.text(WIDTH - MARGIN, 70, str(end), anchor="end")
    picture.text(MARGIN, 98, f"row t0 h0: {layout.head_dim} values, one E4M3 byte each")
    _zoom(picture, 106, [*(f"value {i}" for i in range(4)), "..."], "key")
    picture.text(MARGIN + 2, 144, "byte 0")
    picture.text(MARGIN, 162, "a byte holds x / scale; the scale is an argument, not in the pool")
    return picture


def layout_nvfp4() -> Drawing:
    """Both sections of a block, and the bytes of each."""
    layout = CacheLayout(NVFP4, **EXAMPLE)
    picture = Drawing(322, "An NVFP4 block byte by byte")
    padding = layout.block_stride_bytes - layout.block_bytes
    picture.text(
        MARGIN,
        20,
        f"NVFP4 block, {layout.block_bytes} bytes and {padding} of padding (offsets below)",
        bold=True,
    )
    scales = _rows(picture, 30, 0, layout.format.data_bytes(layout.head_dim), "key", " values")
    groups = layout.format.scale_bytes(layout.head_dim)
    end = _rows(picture, 82, scales, groups, "scale", " scales")
    picture.text(MARGIN, 142, f"the block ends at {end}; the next begins at {layout.block_stride_bytes}")
    picture.text(
        MARGIN, 172, f"values of t0 h0: {layout.head_dim} of 4 bits (E2M1), the first in the low half"
    )
    _zoom(picture, 180, ["1 | 0", "3 | 2", "5 | 4", "7 | 6", "..."], "key")
    picture.text(MARGIN + 2, 218, "byte 0: value 1 in bits 7-4, value 0 in bits 3-0")
    picture.text(MARGIN, 248, f"scales of t0 h0: one E4M3 byte for {NVFP4_GROUP} values")
    _zoom(
        picture,
        256,
        [f"values {i * NVFP4_GROUP}-{(i + 1) * NVFP4_GROUP - 1}" for i in range(groups)],
        "scale",
    )
    picture.text(MARGIN + 2, 294, f"byte {scales} (data_section_bytes)")
    picture.text(MARGIN, 314, "value = E2M1 x E4M3 (x a second scale, an argument, 1 by default)")
    return picture


def online_softmax() -> Drawing:
    """One head's state over three tiles, with numbers."""
    tiles, values = [[1.0, 2.0], [4.0, 3.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    picture = Drawing(292, "The running maximum, sum and output over three tiles")
    picture.text(MARGIN, 20, "scores and values of one head (head_dim 1), tile by tile", bold=True)
    m, total, out = -math.inf, 0.0, 0.0
    for i, (scores, tile_values) in enumerate(zip(tiles, values, strict=True)):
        before = m
        m = max(m, *scores)
        shrink = math.exp(before - m)
        weights = [math.exp(score - m) for score in scores]
        total = total * shrink + sum(weights)
        out = out * shrink + sum(w * v for w, v in zip(weights, tile_values, strict=True))
        x, shrunk = MARGIN + 138 * i, "begin" if i == 0 else f"e^(m - m') = {shrink:.3f}"
        picture.box(x, 32, 124, 26, "s " + ", ".join(f"{s:g}" for s in scores), "key")
        picture.box(x, 58, 124, 26, "v " + ", ".join(f"{v:g}" for v in tile_values), "value")
        picture.line(x + 62, 84, x + 62, 106, arrow=True)
        picture.box(x, 108, 124, 66, "", "state")
        for row, words in enumerate((f"m = {m:g}", f"l = {total:.4f}", f"o = {out:.4f}")):
            picture.text(x + 8, 126 + 19 * row, words)
        picture.text(x, 192, shrunk)
        if i:
            picture.line(x - 14, 141, x, 141, arrow=True)
    for row, words in enumerate(
        (
            "m' = max(m, s)",
            "l' = l e^(m - m') + sum of e^(s - m')",
            "o' = o e^(m - m') + sum of e^(s - m') v",
            f"at the end: output = o / l = {out / total:.4f},  LSE = m + ln l = {m + math.log(total):.4f}",
        )
    ):
        picture.text(MARGIN, 222 + 20 * row, words)
    return picture


def split_k() -> Drawing:
    """A sequence cut into parts, and their merge."""
    picture = Drawing(214, "Split-K: parts of a sequence at the same time, then their merge")
    picture.text(MARGIN, 20, "one sequence, cut into num_splits = 3 parts", bold=True)
    for i in range(3):
        x, middle = MARGIN + 136 * i, MARGIN + 136 * i + 64
        picture.box(x, 30, 128, 26, f"tokens of part {i}", "key")
        picture.line(middle, 56, middle, 76, arrow=True)
        picture.box(x, 78, 128, 26, "a block of threads", "plain")
        picture.line(middle, 104, middle, 122, arrow=True)
        picture.box(x, 124, 128, 26, f"o, m, l of part {i}", "state")
        picture.line(middle, 150, WIDTH / 2 + 30 * (i - 1), 172, arrow=True)
    picture.box(90, 174, 240, 26, "sum of o e^(m - M) / sum of l e^(m - M)", "value")
    return picture


def ring() -> Drawing:
    """Three stages: which is filled while which is used."""
    picture = Drawing(228, "A ring of three stages: copies run ahead of the products")
    picture.text(MARGIN, 20, "three stages of shared memory, over time", bold=True)
    picture.text(MARGIN, 40, "number: which stage-full of the sequence")
    for column in range(6):
        x = 80 + 54 * column
        for stage in range(3):
            y = 54 + 34 * stage
            held = column - (column - stage) % 3  # the newest stage-full that was or is used here
            in_use = held == column
            number = column if in_use else held + 3
            picture.box(x, y, 54, 30, f"{'use' if in_use else 'copy'} {number}", "value" if in_use else "key")
    for stage in range(3):
        picture.text(MARGIN, 73 + 34 * stage, f"stage {stage}")
    picture.line(80, 166, 404, 166, arrow=True)
    picture.text(404, 182, "time", anchor="end")
    picture.text(MARGIN, 200, "use: all warps multiply by K, then by V. Between the two, one of them")
    picture.text(MARGIN, 217, "asks for the copy into the stage that was used just before.")
    return picture


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    f"{draw.__name__}.svg": draw
    for draw in (paged_cache, layout_bf16, layout_fp8, layout_nvfp4, online_softmax, split_k, ring)
}


def main(arguments: list[str]) -> int:
    """Write or compare; returns the exit status."""
    status = 0
    for name, draw in DRAWINGS.items():
        file, text = PICTURES / name, draw().svg()
        if "--check" in arguments:
            if not file.exists() or file.read_text() != text:
                print(f"{file} is not up to date: run python -m tools.drawings")
                status = 1
        else:
            file.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
