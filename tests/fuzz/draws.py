"""What a random case is, and the hypothesis strategy that draws one.

A case is small and printable: hypothesis shrinks it, and pasting it into `tests.fuzz.check.check` runs it
again. Its tokens come from its seed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hypothesis import strategies as st

from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from tests.poison import Poison, Shape

# Compile-time classes: few of them, so that compiling takes seconds and not minutes.
SHAPES = (
    Shape(2, 1, 64, 16),
    Shape(8, 2, 64, 16),
    Shape(32, 8, 128, 16),
    Shape(16, 1, 128, 64),
    Shape(9, 3, 64, 32),
    Shape(4, 4, 128, 16),
    Shape(28, 4, 128, 16),
    Shape(8, 2, 256, 16),
    Shape(4, 2, 192, 24),
    Shape(12, 2, 64, 1),
    Shape(8, 4, 128, 8),
    Shape(5, 1, 64, 100),
    Shape(10, 2, 128, 256),
)
SPECIALISATIONS = tuple((fmt, shape) for fmt in FORMATS for shape in SHAPES)
EMULATED = tuple((fmt, shape) for fmt in FORMATS for shape in (SHAPES[1], SHAPES[8]))


@dataclass(frozen=True)
class Fault:
    """What is wrong with one row: an attended block id, or the length.

    Attributes:
        row: sequence, modulo their number.
        column: of the attended blocks, modulo their number; None where the length is wrong.
        value: the id or the length; an id that would be right counts as the next one outside the pool.
    """

    row: int
    column: int | None
    value: int


@dataclass(frozen=True)
class Draw:
    """One random case.

    Attributes:
        format: name of the cache format.
        shape: heads, head_dim, block_size.
        lengths: tokens of each sequence.
        window: newest tokens attended, 0 for all.
        splits: of split-K.
        tile: blocks of a tile.
        poison: fill of pool bytes that no live token owns.
        unused_column: what the table holds where nothing is looked up.
        extra_columns: of the table, beyond the longest sequence.
        spare_blocks: that nobody owns.
        block_padding: bytes after each block (quantised caches), a multiple of 16.
        section_padding: bytes before the scales of an NVFP4 block, a multiple of 16.
        q_gap: elements between rows of q, a multiple of 8.
        kv_gap: elements between rows of what the writer reads, a multiple of 8.
        log_scales: logarithm to base 2 of k_scale and v_scale times 448 (FP8).
        log_magnitude: logarithm to base 2 of the factor on q.
        sharpness: factor on 1 / sqrt(head_dim).
        needle: one key of each sequence is that many times as large.
        drop: every so many-th token of the writer gets a slot that must not be written, 0 for none.
        fault: None, or what is wrong with one row.
        seed: of tokens, queries and blocks.
    """

    format: str
    shape: Shape
    lengths: tuple[int, ...]
    window: int
    splits: int
    tile: int
    poison: Poison
    unused_column: int
    extra_columns: int
    spare_blocks: int
    block_padding: int
    section_padding: int
    q_gap: int
    kv_gap: int
    log_scales: tuple[float, float]
    log_magnitude: int
    sharpness: float
    needle: float
    drop: int
    fault: Fault | None
    seed: int

    @property
    def cache_format(self) -> CacheFormat:
        return {fmt.name: fmt for fmt in (BF16, FP8, NVFP4)}[self.format]

    @property
    def scales(self) -> tuple[float, float]:
        """k_scale and v_scale: 1 for formats without."""
        if self.format != "fp8":
            return 1.0, 1.0
        k, v = (math.exp2(x) / 448 for x in self.log_scales)
        return k, v


def _lengths(block_size: int, most: int) -> st.SearchStrategy[int]:
    edges = [16 * m for m in (1, 2, 3, 4, 8)] + [block_size * m for m in (1, 2, 3, 5)]
    edges += [2**k for k in range(11)]
    anchors = st.sampled_from([edge for edge in edges if edge < most])
    beside = st.builds(lambda edge, step: max(0, edge + step), anchors, st.sampled_from([0, 1, -1]))
    return st.one_of(st.integers(0, 40), beside, st.integers(0, most))


_faults = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.builds(
        Fault,
        row=st.integers(0, 15),
        column=st.one_of(st.none(), st.integers(0, 63)),
        value=st.one_of(
            st.sampled_from([-1, 2**31 - 1, -(2**31), 99, 1 << 20]), st.integers(-(2**31), 2**31 - 1)
        ),
    ),
)


@functools.cache
def _draws_of(fmt: CacheFormat, shape: Shape, most: int) -> st.SearchStrategy[Draw]:
    """Cases of one specialisation; made once, because hypothesis takes its time over new strategies."""
    quantised = fmt != BF16
    usual = st.lists(_lengths(shape.block_size, most), min_size=1, max_size=9)
    long = st.lists(_lengths(shape.block_size, 4 * most), min_size=1, max_size=2)
    scale = st.floats(-4, 4, width=16)
    return st.builds(
        Draw,
        format=st.just(fmt.name),
        shape=st.just(shape),
        lengths=st.one_of(usual, usual, usual, long).map(tuple),
        window=st.one_of(st.just(0), st.just(0), st.integers(1, 40), st.integers(1, 2 * most)),
        splits=st.one_of(st.integers(1, 9), st.sampled_from([16, 33])),
        tile=st.integers(1, 9),
        poison=st.sampled_from([Poison.NAN, Poison.INF, Poison.STALE]),
        unused_column=st.sampled_from([-1, 2**31 - 1, -(2**31), 10**6, 0]),
        extra_columns=st.integers(0, 3),
        spare_blocks=st.integers(0, 5),
        block_padding=st.sampled_from([0, 0, 16, 64, 272] if quantised else [0]),
        section_padding=st.sampled_from([0, 0, 16, 48] if fmt == NVFP4 else [0]),
        q_gap=st.sampled_from([0, 0, 8, 24, 1024]),
        kv_gap=st.sampled_from([0, 0, 8, 40]),
        log_scales=st.tuples(scale, scale) if fmt == FP8 else st.just((0.0, 0.0)),
        log_magnitude=st.integers(-40, 40),
        sharpness=st.sampled_from([1.0, 0.25, 4.0]),
        needle=st.sampled_from([1.0, 1.0, 6.0]),
        drop=st.sampled_from([0, 0, 3, 7]),
        fault=_faults,
        seed=st.integers(0, 2**32 - 1),
    )


def draws(
    specialisations: tuple[tuple[CacheFormat, Shape], ...] = SPECIALISATIONS, most: int = 700
) -> st.SearchStrategy[Draw]:
    """Any case over these specialisations, sequences of up to `most` tokens (a few of four times as many)."""
    return st.sampled_from(specialisations).flatmap(lambda pair: _draws_of(*pair, most))
