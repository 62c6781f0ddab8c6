"""The decoders that are measured: a load, the cache formats, and how the decoder is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import loads
from benchmarks.loads import Load
from cupaged.formats import FORMATS, CacheFormat

SPLIT_TOKENS = (1024, 4096)


@dataclass(frozen=True)
class Case:
    """One decoder and its batch.

    Attributes:
        fmt: of K, and of V unless value_format is given.
        load: shape and batch.
        value_format: of V.
        float16: q and output are float16.
        split_tokens: a fixed split size.
    """

    fmt: CacheFormat
    load: Load
    value_format: CacheFormat | None = None
    float16: bool = False
    split_tokens: int | None = None

    @property
    def values(self) -> CacheFormat:
        """Format of V."""
        return self.value_format or self.fmt

    @property
    def num_bytes(self) -> int:
        """K and V of the attended tokens."""
        return (self.load.bytes_read(self.fmt) + self.load.bytes_read(self.values)) // 2

    def decoder(self, make: Any, gpu: Any) -> Any:
        """The decoder, by the class or function that makes it.

        Raises:
            whatever the decoder raises for a shape that it does not support.
        """
        load, options = self.load, dict[str, Any]()
        if self.value_format is not None:
            options["value_layout"] = load.layout(self.value_format)
        if load.query_tokens > 1:
            options["query_tokens"] = load.query_tokens
        if self.float16:
            options["q_dtype"] = "float16"
        if self.split_tokens is not None:
            options |= {"split_tokens": self.split_tokens, "max_blocks_per_seq": max(load.block_counts)}
        return make(gpu, load.layout(self.fmt), load.num_q_heads, len(load.seq_lens), **options)


def generality(formats: Iterable[CacheFormat], least: int, num_seqs: int) -> list[tuple[str, Case]]:
    """Each shape of the generality table, with what it varies."""
    return [
        (variant.axis, Case(fmt, variant.load(fmt, least, num_seqs)))
        for fmt in formats
        for variant in loads.variants()
    ]


def features(formats: Iterable[CacheFormat], base: Load) -> list[tuple[str, Case]]:
    """The base load, and the same with one feature each; the first of a format is plain."""
    found = []
    for fmt in formats:
        found += [
            ("plain", Case(fmt, base)),
            ("4 query tokens", Case(fmt, base.varied(query_tokens=4))),
            ("heads first (HND)", Case(fmt, base.varied(heads_first=True))),
            ("float16 q and output", Case(fmt, base, float16=True)),
        ]
    return found


def mixed(formats: Iterable[CacheFormat], base: Load) -> list[Case]:
    """K and V of different formats."""
    chosen = tuple(formats)
    return [Case(k, base, value_format=v) for k in chosen for v in chosen if k != v]


def cases_of(sets: Iterable[str], formats: Iterable[CacheFormat] = FORMATS) -> Iterator[Case]:
    """Decoders of the sets at full size."""
    chosen, all_formats = set(sets), tuple(formats)
    by_set = {
        "table": loads.TABLE,
        "long": loads.LONG,
        "unequal": (loads.UNEQUAL, loads.leveled(loads.UNEQUAL), loads.MANY),
        "latency": loads.LATENCY,
        "fixed_split": loads.FIXED_SPLIT,
        "seed_launchers": (loads.BASE,),
        "host_cost": (loads.equal(1, 16),),
        "cascade": (loads.BASE,),
    }
    for name in chosen & by_set.keys():
        yield from (Case(fmt, load) for fmt in all_formats for load in by_set[name])
    if "fixed_split" in chosen:
        yield from (
            Case(fmt, load, split_tokens=tokens)
            for fmt in all_formats
            for load in loads.FIXED_SPLIT
            for tokens in SPLIT_TOKENS
        )
    if "generality" in chosen:
        yield from (case for _, case in generality(all_formats, loads.GENERAL_BYTES, 64))
        yield from (Case(fmt, loads.MILLIONS) for fmt in all_formats)
    if "features" in chosen:
        yield from (case for _, case in features(all_formats, loads.BASE))
        yield from mixed(all_formats, loads.BASE)
