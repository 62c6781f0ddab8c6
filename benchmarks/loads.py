"""The loads that are measured, and the bytes that each must move."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupaged.formats import CacheFormat, CacheLayout

MAX_TABLES = 64
POOL_BYTES = 2_200_000_000  # least size of a K or V pool: blocks are taken from anywhere in it
GENERAL_BYTES = 2_000_000_000  # K and V together that each generality case reads


@dataclass(frozen=True)
class Load:
    """A shape and a batch.

    Attributes:
        seq_lens: tokens of each sequence.
        name: replaces "sequences x tokens" in the label.
        sliding_window: newest tokens attended; 0 attends to all.
        query_tokens: newest tokens of each sequence that are decoded, causal among themselves.
        heads_first: blocks are ``[num_kv_heads, block_size, ...]``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    seq_lens: tuple[int, ...]
    name: str = ""
    sliding_window: int = 0
    query_tokens: int = 1
    heads_first: bool = False

    def varied(self, *, query_tokens: int = 1, heads_first: bool = False) -> Load:
        """The same batch with another number of query tokens or another order of heads."""
        return replace(self, query_tokens=query_tokens, heads_first=heads_first)

    @property
    def label(self) -> str:
        sizes = f"{self.num_q_heads}/{self.num_kv_heads} d{self.head_dim} page {self.block_size}"
        window = f" window {self.sliding_window}" if self.sliding_window else ""
        return f"{sizes} {self.name or f'{len(self.seq_lens)} x {self.seq_lens[0]}'}{window}"

    @property
    def attended_tokens(self) -> int:
        """Tokens whose K and V a launch must read."""
        window = self.sliding_window or max(self.seq_lens)
        return sum(min(n, window) for n in self.seq_lens)

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of each sequence."""
        return tuple(-(-n // self.block_size) for n in self.seq_lens)

    def layout(self, fmt: CacheFormat) -> CacheLayout:
        return CacheLayout(
            fmt, self.num_kv_heads, self.head_dim, self.block_size, heads_first=self.heads_first
        )

    def bytes_read(self, fmt: CacheFormat) -> int:
        """The byte model of decode: K and V of the attended tokens, scales included, nothing else.

        Queries, tables, lengths, partial results and output are not counted.
        """
        return 2 * self.attended_tokens * self.layout(fmt).bytes_per_token


def rotations(needed_blocks: int, num_blocks: int) -> int:
    """Disjoint block tables that a pool has room for."""
    return max(1, min(MAX_TABLES, num_blocks // needed_blocks))


def pool_blocks(layout: CacheLayout, needed_blocks: int, pool_bytes: int = POOL_BYTES) -> int:
    """Blocks of a pool for a load."""
    return max(pool_bytes // layout.block_stride_bytes, needed_blocks)


def equal(
    num_seqs: int, length: int, num_q_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128,
    block_size: int = 16,
) -> Load:  # fmt: skip
    """A batch of equal lengths."""
    return Load(num_q_heads, num_kv_heads, head_dim, block_size, (length,) * num_seqs)


def log_uniform(num_seqs: int, low: int, high: int, name: str, seed: int = 0) -> Load:
    """32/8 heads of 128, lengths log-uniform in low .. high."""
    draw = np.random.default_rng(seed).uniform(math.log(low), math.log(high), num_seqs)
    return Load(32, 8, 128, 16, tuple(int(n) for n in np.exp(draw)), name)


def leveled(load: Load) -> Load:
    """The same number of sequences and of tokens, lengths as equal as can be."""
    count, total = len(load.seq_lens), sum(load.seq_lens)
    lengths = tuple(total // count + (i < total % count) for i in range(count))
    return Load(
        load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size, lengths,
        f"{count} x {total / count:.0f} (as many tokens)",
    )  # fmt: skip


TABLE = (
    equal(1, 4096), equal(1, 32768), equal(1, 131072), equal(8, 8192), equal(32, 4096), equal(64, 8192),
    equal(128, 2048), equal(64, 8192, 32, 4),
)  # fmt: skip
LONG = (equal(64, 32768), equal(64, 32768, 32, 4))
UNEQUAL = log_uniform(64, 128, 32768, "64 log-uniform")
LATENCY = (equal(1, 4096), equal(1, 32768), equal(1, 131072))
BASE = equal(64, 8192)
MANY = log_uniform(100_000, 1, 64, "100,000 log-uniform 1 to 64")
FIXED_SPLIT = (equal(1, 32768), equal(8, 8192), BASE, UNEQUAL)
MILLIONS = Load(32, 8, 128, 16, (4 * 1024 * 1024,), "1 x 4,194,304")


@dataclass(frozen=True)
class Variant:
    """One shape of the generality table: what it varies, and the shape."""

    axis: str
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    windowed: bool = False

    def load(self, fmt: CacheFormat, least_bytes: int = GENERAL_BYTES, num_seqs: int = 64) -> Load:
        """A batch of equal lengths, multiples of 256, that reads at least so many bytes of K and V."""
        per_token = 2 * CacheLayout(fmt, self.num_kv_heads, self.head_dim, self.block_size).bytes_per_token
        attended = 256 * math.ceil(least_bytes / (per_token * num_seqs * 256))
        length, window = (2 * attended, attended) if self.windowed else (attended, 0)
        return Load(
            self.num_q_heads, self.num_kv_heads, self.head_dim, self.block_size, (length,) * num_seqs,
            sliding_window=window,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    """The generality table: one thing varied at a time from 32/8 heads of 128, blocks of 16."""
    for ratio in (1, 3, 4, 7, 8, 16):
        yield Variant(f"GQA {ratio}", num_q_heads=8 * ratio)
    for head_dim in (64, 128, 256):
        yield Variant(f"head_dim {head_dim}", head_dim=head_dim)
    for heads in (1, 2, 4, 8):
        yield Variant(f"{heads} KV heads", num_q_heads=4 * heads, num_kv_heads=heads)
    for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield Variant(f"block_size {block_size}", block_size=block_size)
    yield Variant("sliding window", windowed=True)
