"""Tokens in and out of paged pools on the host: what the device writers and readers do."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats.bf16 import as_float32, decode_bf16, encode_bf16
from cupaged.formats.fp8 import checked_scale, checked_scales, decode_e4m3, encode_e4m3
from cupaged.formats.layout import BF16, FP8, NVFP4, CacheLayout, checked_size
from cupaged.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4

# dtype of the bit patterns of each format, and the dtypes that a pool of it may have
_BITS: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp8": np.dtype(np.uint8),
    "nvfp4": np.dtype(np.uint8),
}
_ALIASES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}


def pool_num_blocks(pool: npt.NDArray[Any], layout: CacheLayout) -> int:
    """Whole blocks in a pool; the last needs no padding behind it.

    Args:
        pool: C-contiguous, any shape. BF16: bfloat16 or uint16; FP8: uint8 or float8_e4m3fn; NVFP4: uint8.
        layout: of the pool.

    Raises:
        ArgumentTypeError: a pool of another dtype.
        ArgumentValueError: a pool that is not C-contiguous.
    """
    allowed = [_BITS[layout.format.name], _ALIASES.get(layout.format.name)]
    if not isinstance(pool, np.ndarray) or pool.dtype not in allowed:
        names = " and ".join(str(dtype) for dtype in allowed if dtype is not None)
        found = f"dtype {pool.dtype}" if isinstance(pool, np.ndarray) else type(pool).__name__
        raise ArgumentTypeError(f"pool: got {found}, allowed for {layout.format.name} are {names}")
    if not pool.flags.c_contiguous:
        raise ArgumentValueError(f"pool: got strides {pool.strides} (bytes), allowed is C order")
    return layout.blocks_in(pool.nbytes)


def block_sections(pool: npt.NDArray[Any], layout: CacheLayout) -> tuple[npt.NDArray[Any], ...]:
    """Views of a pool's sections, as bit patterns.

    Returns:
        BF16: one view uint16 ``[num_blocks, block_size, num_kv_heads, head_dim]``; FP8: the same in uint8;
        NVFP4: codes uint8 ``[..., head_dim / 2]`` and scales uint8 ``[..., head_dim / 16]``. Of a layout with
        heads first too, by strides.

    Raises:
        ArgumentTypeError, ArgumentValueError: as `pool_num_blocks`.
    """
    num_blocks = pool_num_blocks(pool, layout)
    raw = pool.reshape(-1).view(np.uint8)
    bits = _BITS[layout.format.name]
    data = _section(raw, bits, layout, num_blocks, 0, layout.format.data_bytes(layout.head_dim))
    if not layout.format.has_scale_section:
        return (data,)
    scale_bytes = layout.format.scale_bytes(layout.head_dim)
    return data, _section(raw, bits, layout, num_blocks, layout.data_section_bytes, scale_bytes)


def _section(
    raw: npt.NDArray[np.uint8],
    bits: np.dtype[Any],
    layout: CacheLayout,
    num_blocks: int,
    offset: int,
    head_bytes: int,
) -> npt.NDArray[Any]:
    token_rows = 1 if layout.heads_first else layout.num_kv_heads
    head_rows = layout.block_size if layout.heads_first else 1
    section: npt.NDArray[Any] = np.ndarray(
        shape=(num_blocks, layout.block_size, layout.num_kv_heads, head_bytes // bits.itemsize),
        dtype=bits,
        buffer=raw,
        offset=offset if num_blocks else 0,
        strides=(
            layout.block_stride_bytes,
            token_rows * head_bytes,
            head_rows * head_bytes,
            bits.itemsize,
        ),
    )
    return section


def write_tokens(
    pool: npt.NDArray[Any],
    layout: CacheLayout,
    values: npt.ArrayLike,
    slot_mapping: npt.ArrayLike,
    *,
    scale: object = 1.0,
) -> None:
    """Encode tokens into their slots of a K or V pool, in place.

    Args:
        pool: see `pool_num_blocks`; written only in the slots named.
        layout: of the pool.
        values: ``[num_tokens, num_kv_heads, head_dim]``, dtypes of `as_float32`.
        slot_mapping: integers ``[num_tokens]``, slot = block * block_size + offset in the block.
            Negative slots are skipped, slots beyond the pool are dropped; of equal slots the last wins.
        scale: dequantisation scale (x / scale is stored), one or ``[num_kv_heads]``: that of FP8, or the
            second level of NVFP4; BF16 allows only 1.

    Raises:
        ArgumentTypeError: wrong dtype.
        ArgumentValueError: wrong shape or scale.
    """
    sections = block_sections(pool, layout)
    array = np.asarray(values)
    slots = _integers("slot_mapping", slot_mapping, ndim=1)
    expected = (slots.size, layout.num_kv_heads, layout.head_dim)
    if array.shape != expected:
        raise ArgumentValueError(
            f"values: got shape {array.shape}, allowed is [num_tokens, num_kv_heads, head_dim], {expected}"
        )
    capacity = sections[0].shape[0] * layout.block_size
    live = (slots >= 0) & (slots < capacity)
    blocks, offsets = np.divmod(slots[live], layout.block_size)
    for section, rows in zip(sections, _encode(layout, array[live], scale), strict=True):
        section[blocks, offsets] = rows


def gather_tokens(
    pool: npt.NDArray[Any],
    layout: CacheLayout,
    block_table: npt.ArrayLike,
    seq_len: int,
    *,
    scale: object = 1.0,
) -> npt.NDArray[np.float32]:
    """The dequantised tokens of one sequence, in order.

    Args:
        pool: see `pool_num_blocks`.
        layout: of the pool.
        block_table: integers ``[max_blocks_per_seq]``; columns past the sequence's last block are not read.
        seq_len: tokens of the sequence.
        scale: see `write_tokens`.

    Returns:
        float32 ``[seq_len, num_kv_heads, head_dim]``. A token whose block is outside the pool, or past the
        table's width, reads NaN.

    Raises:
        ArgumentTypeError: wrong dtype.
        ArgumentValueError: wrong shape or scale, or a negative length.
    """
    sections = block_sections(pool, layout)
    table = _integers("block_table", block_table, ndim=1)
    seq_len = checked_size("seq_len", seq_len, minimum=0)
    columns, offsets = np.divmod(np.arange(seq_len, dtype=np.int64), layout.block_size)
    blocks = np.full(seq_len, -1, np.int64)
    in_table = columns < table.size
    blocks[in_table] = table[columns[in_table]]
    live = (blocks >= 0) & (blocks < sections[0].shape[0])
    tokens = np.full((seq_len, layout.num_kv_heads, layout.head_dim), np.nan, np.float32)
    rows = tuple(section[blocks[live], offsets[live]] for section in sections)
    tokens[live] = _decode(layout, rows, scale)
    return tokens


def _encode(layout: CacheLayout, values: npt.NDArray[Any], scale: object) -> tuple[npt.NDArray[Any], ...]:
    if layout.format == FP8:
        return (encode_e4m3(values, _head_scales(layout, scale)),)
    if layout.format == BF16:
        _require_unit_scale(layout, scale)
        return (encode_bf16(values),)
    _require_nvfp4(layout)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = as_float32("values", values) / checked_scales("scale", _head_scales(layout, scale))
    return quantize_nvfp4(scaled)


def _decode(
    layout: CacheLayout, rows: tuple[npt.NDArray[Any], ...], scale: object
) -> npt.NDArray[np.float32]:
    if layout.format == FP8:
        return decode_e4m3(rows[0], _head_scales(layout, scale))
    if layout.format == BF16:
        _require_unit_scale(layout, scale)
        return decode_bf16(rows[0])
    _require_nvfp4(layout)
    with np.errstate(over="ignore", under="ignore"):
        product: npt.NDArray[np.float32] = dequantize_nvfp4(*rows) * checked_scales(
            "scale", _head_scales(layout, scale)
        )
    return product


def _head_scales(layout: CacheLayout, scale: object) -> object:
    """A scale for each KV head as it broadcasts against ``[..., num_kv_heads, head_dim]``; one as it is."""
    if not isinstance(scale, np.ndarray) or scale.ndim == 0:
        return scale
    if scale.shape != (layout.num_kv_heads,):
        raise ArgumentValueError(
            f"scale: got shape {scale.shape}, allowed are () and ({layout.num_kv_heads},)"
        )
    return scale[:, None]


def _require_nvfp4(layout: CacheLayout) -> None:
    if layout.format != NVFP4:
        raise ArgumentValueError(f"format: got {layout.format.name!r}, allowed are bf16, fp8 and nvfp4")


def _require_unit_scale(layout: CacheLayout, scale: object) -> None:
    if checked_scale("scale", scale) != 1.0:
        raise ArgumentValueError(
            f"scale: got {scale!r}, allowed is 1: {layout.format.name} has no pool scale"
        )


def _integers(name: str, array: npt.ArrayLike, *, ndim: int) -> npt.NDArray[np.int64]:
    result = np.asarray(array)
    if result.size == 0:
        result = result.astype(np.int64)
    if result.dtype.kind not in "iu" or result.dtype == np.uint64:
        raise ArgumentTypeError(f"{name}: got dtype {result.dtype}, allowed are integers up to int64")
    if result.ndim != ndim:
        raise ArgumentValueError(f"{name}: got {result.ndim} dimensions, allowed are {ndim}")
    return result.astype(np.int64)
