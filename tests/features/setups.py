"""Kinds of decoders, and the decoders made of them."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cupaged import decode_kernels
from cupaged.ahead import KernelSet
from cupaged.decode import Decoder
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout
from cupaged.registry.rules import LATENCY_LEVELS
from cupaged.source import KernelSource
from tests.paths import kept_decoder
from tests.rig import Rig
from tools.compile_kernels import compile_all, nothing_compiled

MAX_SEQS = 16
PAIRS = tuple((key, value) for key in (BF16, FP8, NVFP4) for value in (BF16, FP8, NVFP4))


@dataclass(frozen=True)
class Setup:
    """One kind of decoder.

    Attributes:
        key, value: cache formats.
        heads: query and KV heads.
        pools: how blocks lie: "apart" (a tight pool each), "interleaved" ([block, K or V, ...]), or "layer"
            (the middle one of three layers in each block).
        level: the latency level whose kernel runs, whatever a batch's room for tokens, for compiles are what
            these tests' time goes into. None: all of them, as `Decoder` has it.
        others: as `Decoder` has them.
    """

    key: CacheFormat = BF16
    value: CacheFormat = BF16
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    block_size: int = 16
    heads_first: bool = False
    pools: str = "apart"
    query_tokens: int = 1
    causal: bool = True
    q_dtype: str = "bfloat16"
    soft_cap: float | None = None
    split_tokens: int | None = None
    max_blocks_per_seq: int | None = None
    max_seqs: int = MAX_SEQS
    level: int | None = 0

    @staticmethod
    def of(fmt: CacheFormat, **changed: Any) -> Setup:
        """K and V of one format."""
        return Setup(key=fmt, value=fmt, **changed)

    def layouts(self) -> tuple[CacheLayout, CacheLayout]:
        """Of the K and of the V pool."""
        key, value = (self._layout(fmt) for fmt in (self.key, self.value))
        return key, value

    def _layout(self, fmt: CacheFormat) -> CacheLayout:
        layout = CacheLayout(fmt, self.heads[1], self.head_dim, self.block_size, heads_first=self.heads_first)
        if layout.data_section_bytes % 16:  # the kernels ask for it
            section = -(-layout.data_section_bytes // 16) * 16
            layout = dataclasses.replace(layout, data_section_override=section)
        parts = {"apart": 1, "interleaved": 2, "layer": 3}[self.pools]
        if parts == 1:
            return layout
        return dataclasses.replace(layout, block_stride_override=parts * layout.block_stride_bytes)

    def decoder(self, rig: Rig) -> Decoder:
        """The rig's decoder of this kind, made once."""
        return kept_decoder(rig, self, lambda: self._make(rig))

    def _make(self, rig: Rig) -> Decoder:
        layout, features = self._layout_and_features()
        with self.one_level():
            return Decoder(rig.gpu, layout, self.heads[0], self.max_seqs, **features)

    def kernels(self) -> KernelSet:
        """What its decoder is made of; its sources are to be asked for within `one_level`."""
        layout, features = self._layout_and_features()
        return KernelSet().add_decoder(layout, self.heads[0], max_seqs=self.max_seqs, **features)

    def one_level(self) -> contextlib.AbstractContextManager[Any]:
        """While a decoder is made: it has the kernel of one level only."""
        if self.level is None:
            return contextlib.nullcontext()
        levels = (self.level,) * LATENCY_LEVELS
        return unittest.mock.patch.object(decode_kernels, "latency_levels", return_value=levels)

    def _layout_and_features(self) -> tuple[CacheLayout, dict[str, Any]]:
        layout, value_layout = self.layouts()
        names = ("query_tokens", "causal", "q_dtype", "soft_cap", "split_tokens", "max_blocks_per_seq")
        return layout, {"value_layout": value_layout} | {name: getattr(self, name) for name in names}


def sources_of(setups: Iterable[Setup], arch: str) -> list[KernelSource]:
    """What the setups' decoders are made of on an architecture."""
    found: list[KernelSource] = []
    for setup in setups:
        with setup.one_level():
            found += setup.kernels().sources(arch)
    return found


@contextlib.contextmanager
def compiled_together(
    rig: Rig, setups: Iterable[Setup] = (), kernels: KernelSet | None = None
) -> Iterator[None]:
    """Into the disk cache of a GPU's host, on all its cores; inside, nothing else may be compiled.

    Nothing on the emulator.
    """
    if rig.name != "cupy":
        yield
        return
    sources = sources_of(setups, rig.gpu.arch)
    if kernels is not None:
        sources += kernels.sources(rig.gpu.arch)
    found = compile_all(sources, rig.gpu.arch)
    assert not found.failed, found.failed
    with nothing_compiled():
        yield
