"""Every size with every format, on a GPU, whose host compiles on all cores at once."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest

from cupaged.ahead import KernelSet
from cupaged.backends.cupy import cubin_cache
from cupaged.backends.cupy.nvrtc import Target
from cupaged.formats import FORMATS, CacheFormat
from cupaged.registry.rules import LATENCY_LEVELS
from cupaged.source import KernelSource
from tests.features import setups
from tests.features.batches import Call, check, make_batch, zero_query
from tests.features.setups import PAIRS, Setup, compiled_together
from tests.features.test_launchers import check_cache, check_launchers, launcher_layout
from tests.features.test_shapes import BLOCK_SIZES, BORDERS, HEAD_DIMS, KV_HEADS, RATIOS
from tests.poison import Shape
from tests.rig import Rig
from tests.test_nvrtc import needs_nvrtc
from tools.compile_kernels import Compiled, add_launchers, launcher_scalars

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def _sweep(rig: Rig, setups: list[Setup], *calls: Call) -> None:
    """Random tokens and closed forms, for decoders compiled together; a failure names its setup.

    The latency levels take turns.
    """
    setups = [dataclasses.replace(setup, level=index % LATENCY_LEVELS) for index, setup in enumerate(setups)]
    with compiled_together(rig, setups):
        for setup in setups:
            try:
                for call in calls:
                    check(rig, setup, call)
                zero_query(setup, Call(lengths=(5, 70)), "dims").check(rig)
                zero_query(setup, Call(lengths=(5, 70)), "heads").check(rig)
            except AssertionError as error:
                raise AssertionError(f"{setup}: {error}") from error


@formats
def test_head_dims(gpu_rig: Rig, fmt: CacheFormat) -> None:
    setups = [Setup.of(fmt, head_dim=dim, heads=(8, 2)) for dim in HEAD_DIMS]
    _sweep(gpu_rig, setups, Call(lengths=BORDERS), Call(lengths=(2500, 3), window=37, sinks=(0.5,) * 8))


@formats
def test_head_dims_in_chunks(gpu_rig: Rig, fmt: CacheFormat) -> None:
    setups = [
        Setup.of(fmt, head_dim=dim, heads=(8, 2), split_tokens=64, max_blocks_per_seq=200)
        for dim in HEAD_DIMS
    ]
    _sweep(gpu_rig, setups, Call(lengths=BORDERS), Call(lengths=(2500, 3), window=37, sinks=(0.5,) * 8))


@formats
def test_launchers(gpu_rig: Rig, fmt: CacheFormat) -> None:
    shapes = [Shape(4, 2, dim, 16) for dim in HEAD_DIMS]
    shapes += [Shape(2 * ratio, 2, 64, 12) for ratio in RATIOS]
    shapes += [Shape(heads, heads, 64, 16) for heads in KV_HEADS]
    kernels = KernelSet()
    for shape in shapes:
        add_launchers(kernels, fmt, launcher_scalars(launcher_layout(fmt, shape), shape.num_q_heads))
    with compiled_together(gpu_rig, kernels=kernels):
        for index, shape in enumerate(shapes):
            check_launchers(gpu_rig, fmt, shape, window=20 * (index % 2))


@formats
def test_caches(gpu_rig: Rig, fmt: CacheFormat) -> None:
    setups = [
        Setup.of(fmt, heads=(3, 3), head_dim=dim, block_size=size, heads_first=bool(index % 2))
        for index, dim in enumerate(HEAD_DIMS)
        for size in (BLOCK_SIZES[index % 10], BLOCK_SIZES[(index + 5) % 10], 16)
    ]
    kernels = KernelSet()
    for setup in setups:
        kernels.add_cache(setup.layouts()[0])
    with compiled_together(gpu_rig, kernels=kernels):
        for setup in setups:
            check_cache(gpu_rig, setup)


@formats
def test_ratios(gpu_rig: Rig, fmt: CacheFormat) -> None:
    setups = [Setup.of(fmt, heads=(heads * r, heads)) for r in RATIOS for heads in (1, 4)]
    _sweep(gpu_rig, setups, Call(lengths=(1, 90, 0, 3000)))


@formats
def test_kv_heads(gpu_rig: Rig, fmt: CacheFormat) -> None:
    setups = [
        Setup.of(fmt, heads=(r * heads, heads), head_dim=dim)
        for heads in KV_HEADS
        for r, dim in ((1, 128), (2, 64), (1, 256))
    ]
    _sweep(gpu_rig, setups, Call(lengths=(1, 90, 0, 1500)), Call(lengths=(33,), window=9))


@formats
@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
def test_block_sizes(gpu_rig: Rig, fmt: CacheFormat, heads_first: bool) -> None:
    sizes = (*BLOCK_SIZES, 4, 8, 16, 17, 32, 48, 64, 128)
    setups = [
        Setup.of(fmt, block_size=size, heads=((8, 2), (3, 3))[index % 2], heads_first=heads_first)
        for index, size in enumerate(sizes)
    ]
    _sweep(
        gpu_rig,
        setups,
        Call(lengths=(1, 15, 16, 17, 255, 256, 257, 1000, 0)),
        Call(lengths=(700,), window=33),
    )
    strided = [dataclasses.replace(s, pools=pools) for pools in ("interleaved", "layer") for s in setups[::5]]
    with compiled_together(gpu_rig, strided):
        for setup in strided:
            check(gpu_rig, setup)


@formats
@pytest.mark.parametrize("causal", [True, False])
def test_query_tokens(gpu_rig: Rig, fmt: CacheFormat, causal: bool) -> None:
    """1 to 8, with ratios that make whole tiles of rows, parts of one, and slices."""
    lengths = (*range(20), 63, 64, 65, 127, 255, 257, 1000, 4097)
    setups = [
        Setup.of(fmt, query_tokens=tokens, causal=causal, heads=heads, max_seqs=64)
        for tokens in range(1, 9)
        for heads in ((8, 2), (33, 1))
    ]
    calls = [Call(lengths=lengths, window=window) for window in (0, 1, 5, 16, 100)]
    _sweep(gpu_rig, setups, *calls)


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("soft_cap", [None, 8.0])
def test_pairs_of_formats(gpu_rig: Rig, q_dtype: str, soft_cap: float | None) -> None:
    setups = [
        Setup(key=key, value=value, head_dim=dim, q_dtype=q_dtype, soft_cap=soft_cap, query_tokens=tokens)
        for key, value in PAIRS
        for dim in (64, 128)
        for tokens in (1, 3)
    ]
    _sweep(
        gpu_rig, setups, Call(lengths=(1, 40, 0, 3000), sinks=(0.5,) * 8), Call(lengths=(400, 3), window=90)
    )


@formats
def test_long_sequences(gpu_rig: Rig, fmt: CacheFormat) -> None:
    """One that all blocks share, many that few share, beside ones that none does; each launch the same."""
    for lengths in ((65_536,), (8192,) * 8, (4096, 1, 0, 17) * 4, (20_000, *range(1, 15))):
        make_batch(Setup.of(fmt, heads=(32, 8), head_dim=128), Call(lengths=lengths)).check_twice(gpu_rig)


class _GpuNamed:
    """What compiling asks of a rig on a GPU."""

    name = "cupy"
    gpu = types.SimpleNamespace(arch="sm_90a")


class _Compiling(Exception):
    """Instead of compiling: kernels are known, and nothing has run."""


@needs_nvrtc
def test_the_sweeps_compile_their_kernels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before it runs anything, by the one way there is, which the benchmarks take too."""
    keys: set[str] = set()

    def collect(sources: list[KernelSource], arch: str) -> Compiled:
        keys.update(cubin_cache.key(source, Target(arch)) for source in sources)
        raise _Compiling

    monkeypatch.setattr(setups, "compile_all", collect)
    rig: Any = _GpuNamed()
    sweeps: list[Callable[[Rig, CacheFormat], None]] = [
        test_head_dims, test_head_dims_in_chunks, test_launchers, test_caches, test_ratios, test_kv_heads,
        *(functools.partial(test_block_sizes, heads_first=order) for order in (False, True)),
        *(functools.partial(test_query_tokens, causal=causal) for causal in (False, True)),
    ]  # fmt: skip
    for sweep in sweeps:
        for fmt in FORMATS:
            with pytest.raises(_Compiling):
                sweep(rig, fmt)
    for q_dtype in ("bfloat16", "float16"):
        for cap in (None, 8.0):
            with pytest.raises(_Compiling):
                test_pairs_of_formats(rig, q_dtype, cap)
    assert len(keys) > 1000
