"""How a decoder gets its kernels: side by side where they are new."""

from __future__ import annotations

import threading

import pytest

from cupaged.decode import Decoder
from cupaged.errors import CompileError
from cupaged.formats import NVFP4, CacheLayout
from cupaged.source import KernelSource
from tests.fake_backend import FakeBackend, FakeKernel

LAYOUT, HEADS = CacheLayout(NVFP4, 8, 128, 16), 32
LEVELS = 4  # kernels of such a decoder, one for each size of batch
TIMEOUT_S = 60.0


class Meeting(FakeBackend):
    """A load ends when so many have begun; later ones end at once."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self._parties = parties
        self._barrier = threading.Barrier(parties, timeout=TIMEOUT_S)

    def load(self, source: KernelSource) -> FakeKernel:
        loaded = super().load(source)
        if len(self.loads) <= self._parties:
            self._barrier.wait()
        return loaded


class Failing(FakeBackend):
    """A compiler that dislikes the last of them."""

    def load(self, source: KernelSource) -> FakeKernel:
        loaded = super().load(source)
        if len(self.loads) == LEVELS:
            raise CompileError(f"{source.path.name}: no", log="a log", command="a compiler")
        return loaded


def test_new_kernels_are_compiled_side_by_side() -> None:
    gpu = Meeting(LEVELS)
    Decoder(gpu, LAYOUT, HEADS, 64)  # type: ignore[arg-type]
    assert len({source.defines for source in gpu.loads}) == len(gpu.loads) == LEVELS
    Decoder(gpu, LAYOUT, HEADS, 64)  # type: ignore[arg-type]
    assert set(gpu.loads[LEVELS:]) == set(gpu.loads[:LEVELS])


def test_sizes_of_the_same_shape_share_a_kernel() -> None:
    gpu = FakeBackend()
    Decoder(gpu, LAYOUT, HEADS, 513)  # type: ignore[arg-type]
    assert sorted(source.entry for source in gpu.loads) == [
        "paged_decode_attn_plan",
        "paged_decode_attn_planned",
    ]


def test_an_error_of_one_is_the_decoders() -> None:
    gpu = Failing()
    with pytest.raises(CompileError, match="a log"):
        Decoder(gpu, LAYOUT, HEADS, 64)  # type: ignore[arg-type]
    Decoder(gpu, LAYOUT, HEADS, 64)  # type: ignore[arg-type]
    assert len(gpu.loads) == 2 * LEVELS
