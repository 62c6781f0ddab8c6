"""Paged decode cases as NumPy arrays, in which everything that no live token owns is poison.

Keys and values are written by `cupaged.formats`; the dense arrays come from the oracle's own decoders.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout, write_tokens
from tests import oracle
from tests.oracle import F64

BF16_NAN = 0x7FC0
GUARD_BYTE = 0xA5
GUARD_BYTES = 4096
ALIGNMENT = 128


class Poison(enum.Enum):
    """What fills pool bytes that no live token owns."""

    NAN = "nan"
    INF = "inf"  # the largest finite value where the format has no infinity
    STALE = "stale"  # the largest finite value
    QUIET = "quiet"  # zero: the twin that a poisoned run must equal bit for bit


# BF16 pattern; FP8 byte; NVFP4 code byte and scale byte
_FILL_BF16 = {Poison.NAN: BF16_NAN, Poison.INF: 0x7F80, Poison.STALE: 0x7F7F, Poison.QUIET: 0}
_FILL_FP8 = {Poison.NAN: 0x7F, Poison.INF: 0x7E, Poison.STALE: 0x7E, Poison.QUIET: 0}
_FILL_NVFP4 = {
    Poison.NAN: (0xFF, 0x7F),
    Poison.INF: (0x77, 0x7E),
    Poison.STALE: (0x77, 0x7E),
    Poison.QUIET: (0, 0),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a case."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


@dataclass(frozen=True)
class Options:
    """How a case lies in memory.

    Attributes:
        poison: fill of unowned pool bytes.
        seed: of block assignment and of random values.
        unused_column: value of table columns that no sequence owns.
        table_width: columns of the table; None = as many as the longest sequence needs, at least 1.
        spare_blocks: blocks that nobody owns, besides block 0, which is never owned.
        block_padding: bytes of padding after each FP8 or NVFP4 block.
        section_padding: bytes between the data and the scale section of an NVFP4 block.
        q_gap: elements between the rows of q, BF16 NaN.
        k_scale: FP8 dequantisation scale of K.
        v_scale: FP8 dequantisation scale of V.
    """

    poison: Poison = Poison.NAN
    seed: int = 0
    unused_column: int = 0x7FFFFFFF
    table_width: int | None = None
    spare_blocks: int = 3
    block_padding: int = 0
    section_padding: int = 0
    q_gap: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Guarded:
    """An array inside a larger buffer whose other bytes must never change.

    Attributes:
        storage: uint8, all bytes; to test on a device, copy it there and slice [offset, offset + nbytes).
        array: the view inside; its address is 128-byte aligned.
        offset: bytes of storage before the array.
    """

    storage: npt.NDArray[np.uint8]
    array: npt.NDArray[Any]
    offset: int

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Guarded:
        """An array of unspecified content with at least 4096 guard bytes on either side."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        storage = np.full(nbytes + 2 * GUARD_BYTES + ALIGNMENT, GUARD_BYTE, np.uint8)
        offset = GUARD_BYTES + -(storage.ctypes.data + GUARD_BYTES) % ALIGNMENT
        inside = storage[offset : offset + nbytes].view(dtype).reshape(shape)
        return Guarded(storage, inside, offset)

    def assert_intact(self, storage: npt.NDArray[np.uint8] | None = None) -> None:
        """Check this storage, or a copy of it that came back from a device."""
        found = self.storage if storage is None else storage
        outside = np.ones(found.size, bool)
        outside[self.offset : self.offset + self.array.nbytes] = False
        changed = np.flatnonzero(outside & (found != GUARD_BYTE))
        assert changed.size == 0, f"guard byte {int(changed[0]) - self.offset} from the array's begin changed"


@dataclass(frozen=True)
class PagedCase:
    """A batch of decode attention over poisoned paged pools.

    Attributes:
        layout: of both pools.
        q: bfloat16 ``[num_seqs, num_q_heads, head_dim]``, contiguous; see `q_storage` for gaps.
        k_guarded: the K pool, ``layout.pool_shape(num_blocks)``, between guards.
        v_guarded: the V pool, likewise.
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``.
        seq_lens: int32 ``[num_seqs]``.
        inv_sqrt_d: factor on q.k, a float32 value.
        window: newest keys attended, 0 = all.
        options: as given.
        k_dense: per sequence, the dequantised float64 ``[seq_len, num_kv_heads, head_dim]``.
        v_dense: likewise.
    """

    layout: CacheLayout
    q: npt.NDArray[Any]
    k_guarded: Guarded
    v_guarded: Guarded
    block_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    inv_sqrt_d: float
    window: int
    options: Options
    k_dense: tuple[F64, ...]
    v_dense: tuple[F64, ...]

    @property
    def k_pool(self) -> npt.NDArray[Any]:
        return self.k_guarded.array

    @property
    def v_pool(self) -> npt.NDArray[Any]:
        return self.v_guarded.array

    @property
    def k_scale(self) -> float:
        return self.options.k_scale

    @property
    def v_scale(self) -> float:
        return self.options.v_scale

    @property
    def num_seqs(self) -> int:
        return int(self.q.shape[0])

    @property
    def num_q_heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def num_blocks(self) -> int:
        return int(self.k_pool.shape[0])

    @property
    def max_blocks_per_seq(self) -> int:
        return int(self.block_tables.shape[1])

    @property
    def q_stride(self) -> int:
        """Elements between the q rows of two sequences."""
        return self.num_q_heads * self.layout.head_dim + self.options.q_gap

    def q_storage(self) -> npt.NDArray[Any]:
        """A copy of q with its gaps, bfloat16 ``[num_seqs, q_stride]``: upload this and pass ``q_stride``."""
        return with_gaps(self.q, self.q_stride)

    def expected(self) -> tuple[F64, F64]:
        """The oracle's out ``[num_seqs, num_q_heads, head_dim]`` and lse ``[num_seqs, num_q_heads]``."""
        outs, lses = np.empty(self.q.shape), np.empty(self.q.shape[:2])
        for seq in range(self.num_seqs):
            outs[seq], lses[seq] = oracle.attention_float64(
                self.q[seq], self.k_dense[seq], self.v_dense[seq], self.inv_sqrt_d, self.window
            )
        return outs, lses

    def assert_guards_intact(self) -> None:
        self.k_guarded.assert_intact()
        self.v_guarded.assert_intact()


def build_case(
    fmt: CacheFormat,
    q: npt.ArrayLike,
    keys: Sequence[npt.NDArray[Any]],
    values: Sequence[npt.NDArray[Any]],
    *,
    block_size: int = 16,
    inv_sqrt_d: float | None = None,
    window: int = 0,
    options: Options | None = None,
) -> PagedCase:
    """Put given tokens into poisoned pools at random blocks.

    Args:
        fmt: cache format.
        q: ``[num_seqs, num_q_heads, head_dim]``.
        keys: per sequence ``[n, num_kv_heads, head_dim]``, n may be 0.
        values: likewise.
        block_size: tokens of one block.
        inv_sqrt_d: factor on q.k; None = 1/sqrt(head_dim).
        window: newest keys attended, 0 = all.
        options: memory layout; None = `Options()`.
    """
    options = options or Options()
    query = np.asarray(q, np.float32).astype(ml_dtypes.bfloat16)
    layout = _layout(fmt, keys[0].shape[1], query.shape[2], block_size, options)
    lengths = [len(k) for k in keys]
    tables, num_blocks = _assign_blocks(lengths, block_size, options)
    pools = [_poisoned_pool(layout, num_blocks, options.poison) for _ in range(2)]
    for seq, (key, value) in enumerate(zip(keys, values, strict=True)):
        tokens = np.arange(lengths[seq])
        slots = tables[seq, tokens // block_size].astype(np.int64) * block_size + tokens % block_size
        write_tokens(pools[0].array, layout, key, slots, scale=options.k_scale)
        write_tokens(pools[1].array, layout, value, slots, scale=options.v_scale)
    factor = 1.0 / math.sqrt(query.shape[2]) if inv_sqrt_d is None else inv_sqrt_d
    dense = [
        decode_pool(pool.array, layout, scale)
        for pool, scale in zip(pools, (options.k_scale, options.v_scale), strict=True)
    ]
    return PagedCase(
        layout=layout,
        q=query,
        k_guarded=pools[0],
        v_guarded=pools[1],
        block_tables=tables,
        seq_lens=np.array(lengths, np.int32),
        inv_sqrt_d=float(np.float32(factor)),
        window=window,
        options=options,
        k_dense=_dense_sequences(dense[0], tables, lengths),
        v_dense=_dense_sequences(dense[1], tables, lengths),
    )


def random_case(
    fmt: CacheFormat,
    seq_lens: Sequence[int],
    shape: Shape | None = None,
    *,
    window: int = 0,
    options: Options | None = None,
) -> PagedCase:
    """Normally distributed q, K and V; FP8 scales that use the range, unless ``options`` gives others."""
    shape, options = shape or Shape(), options or Options()
    if fmt == FP8 and options.k_scale == options.v_scale == 1.0:
        options = dataclasses.replace(options, k_scale=0.0171, v_scale=0.0123)
    rng = np.random.default_rng(options.seed)
    q = rng.standard_normal((len(seq_lens), shape.num_q_heads, shape.head_dim))
    sizes = [(n, shape.num_kv_heads, shape.head_dim) for n in seq_lens]
    keys = [rng.standard_normal(size).astype(ml_dtypes.bfloat16) for size in sizes]
    values = [rng.standard_normal(size).astype(ml_dtypes.bfloat16) for size in sizes]
    return build_case(fmt, q, keys, values, block_size=shape.block_size, window=window, options=options)


def with_gaps(rows: npt.NDArray[Any], stride: int) -> npt.NDArray[Any]:
    """BF16 ``[num_rows, ...]`` copied to ``[num_rows, stride]`` with NaN after each row's elements.

    For key and value of the writers, whose row strides are arguments.
    """
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    wide: npt.NDArray[Any] = np.full((len(rows), stride), BF16_NAN, np.uint16).view(ml_dtypes.bfloat16)
    wide[:, : flat.shape[1]] = flat
    return wide


def decode_pool(pool: npt.NDArray[Any], layout: CacheLayout, scale: float = 1.0) -> F64:
    """The oracle's view of a pool: float64 ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    if layout.heads_first:  # the same rows, with the names of the two axes swapped
        return _decode_rows(pool, layout, layout.block_size, layout.num_kv_heads, scale).swapaxes(1, 2)
    return _decode_rows(pool, layout, layout.num_kv_heads, layout.block_size, scale)


def _decode_rows(pool: npt.NDArray[Any], layout: CacheLayout, inner: int, outer: int, scale: float) -> F64:
    """Float64 ``[num_blocks, outer, inner, head_dim]``, in the order of the pool's rows."""
    sizes = (inner, layout.head_dim, outer)
    if layout.format == BF16:
        return oracle.decode_bf16_pool(pool, *sizes, layout.cache_stride)
    if layout.format == FP8:
        return oracle.decode_fp8_pool(pool, *sizes, layout.cache_stride, scale)
    return oracle.decode_nvfp4_pool(pool, *sizes, layout.block_stride_bytes, layout.data_section_bytes)


def _layout(
    fmt: CacheFormat, num_kv_heads: int, head_dim: int, block_size: int, options: Options
) -> CacheLayout:
    layout = CacheLayout(fmt, num_kv_heads, head_dim, block_size)
    if options.section_padding:
        section = layout.data_section_bytes + options.section_padding
        layout = dataclasses.replace(layout, data_section_override=section)
    if options.block_padding:
        stride = layout.block_bytes + options.block_padding
        layout = dataclasses.replace(layout, block_stride_override=stride)
    return layout


def _assign_blocks(
    lengths: Sequence[int], block_size: int, options: Options
) -> tuple[npt.NDArray[np.int32], int]:
    needed = [-(-n // block_size) for n in lengths]
    width = max([1, *needed]) if options.table_width is None else options.table_width
    assert width >= max([0, *needed]), "table_width is too small for the longest sequence"
    num_blocks = 1 + sum(needed) + options.spare_blocks
    free = iter(np.random.default_rng(options.seed).permutation(np.arange(1, num_blocks)))
    tables = np.full((len(lengths), width), options.unused_column, np.int32)
    for seq, count in enumerate(needed):
        tables[seq, :count] = [next(free) for _ in range(count)]
    return tables, num_blocks


def _poisoned_pool(layout: CacheLayout, num_blocks: int, poison: Poison) -> Guarded:
    guarded = Guarded.allocate(layout.pool_shape(num_blocks), layout.pool_dtype)
    if layout.format == BF16:
        guarded.array.view(np.uint16)[...] = _FILL_BF16[poison]
    elif layout.format == FP8:
        guarded.array[...] = _FILL_FP8[poison]
    else:
        assert layout.format == NVFP4
        codes, scale = _FILL_NVFP4[poison]
        guarded.array[:, : layout.data_section_bytes] = codes
        guarded.array[:, layout.data_section_bytes :] = scale
    return guarded


def _dense_sequences(dense: F64, tables: npt.NDArray[np.int32], lengths: Sequence[int]) -> tuple[F64, ...]:
    block_size = dense.shape[1]
    sequences = []
    for seq, length in enumerate(lengths):
        tokens = np.arange(length)
        sequences.append(dense[tables[seq, tokens // block_size], tokens % block_size])
    return tuple(sequences)
