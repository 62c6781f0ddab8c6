"""Kinds of decoders, and the decoders made of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import unittest.mock
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cupaged import decode_kernels
from cupaged.ahead import KernelSet
from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.decode import Decoder
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout
from tests.rig import Rig

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
        kept = _decoders.setdefault(rig, {})
        if self not in kept:
            kept[self] = self._make(rig)
        return kept[self]

    def _make(self, rig: Rig) -> Decoder:
        layout, features = self._layout_and_features()
        with self.one_level():
            return Decoder(rig.gpu, layout, self.heads[0], self.max_seqs, **features)

    def add_to(self, kernels: KernelSet) -> None:
        """To what is compiled together; within `one_level`."""
        layout, features = self._layout_and_features()
        kernels.add_decoder(layout, self.heads[0], max_seqs=self.max_seqs, **features)

    def one_level(self) -> contextlib.AbstractContextManager[Any]:
        """While a decoder is made: it has the kernel of one level only."""
        if self.level is None:
            return contextlib.nullcontext()
        levels = (self.level,) * 3
        return unittest.mock.patch.object(decode_kernels, "latency_levels", return_value=levels)

    def _layout_and_features(self) -> tuple[CacheLayout, dict[str, Any]]:
        layout, value_layout = self.layouts()
        names = ("query_tokens", "causal", "q_dtype", "soft_cap", "split_tokens", "max_blocks_per_seq")
        return layout, {"value_layout": value_layout} | {name: getattr(self, name) for name in names}


_decoders: weakref.WeakKeyDictionary[Rig, dict[Setup, Decoder]] = weakref.WeakKeyDictionary()


def compile_together(rig: Rig, setups: Iterable[Setup] = (), kernels: KernelSet | None = None) -> None:
    """Into the disk cache of a GPU's host, on all its cores. Nothing on the emulator."""
    if rig.name != "cupy":
        return
    sources = [] if kernels is None else kernels.sources(rig.gpu.arch)
    for setup in setups:
        wanted = KernelSet()
        setup.add_to(wanted)
        with setup.one_level():
            sources += wanted.sources(rig.gpu.arch)
    target = nvrtc.Target(rig.gpu.arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: cubin_cache.compiled(source, target), sources))
