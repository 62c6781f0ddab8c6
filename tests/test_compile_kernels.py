"""Kernels compiled together by processes: what is compiled, what is not, and what is told of it."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from cupaged import cache
from cupaged.ahead import KernelSet
from cupaged.backends.cupy import cubin_cache
from cupaged.backends.cupy.nvrtc import Target
from cupaged.cache_dir import cache_dir
from cupaged.decode import Decoder
from cupaged.formats import FORMATS, NVFP4, CacheFormat, CacheLayout
from cupaged.registry import limits_of_capability
from cupaged.source import KernelSource
from tests.fake_backend import FakeBackend
from tests.test_nvrtc import needs_nvrtc
from tools.compile_kernels import add_launchers, compile_all, launcher_scalars, nothing_compiled

ARCH = "sm_90a"


def kernels_in(folder: Path, **texts: str) -> list[KernelSource]:
    """One kernel a file, its name and its body."""
    found = []
    for name, body in texts.items():
        path = folder / f"{name}.cu"
        path.write_text(f'extern "C" __global__ void {name}() {{ {body} }}\n')
        found.append(KernelSource(path, name, (), ()))
    return found


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))


@needs_nvrtc
def test_the_cache_is_filled_and_failures_are_told(tmp_path: Path) -> None:
    sources = kernels_in(tmp_path, bad="nothing;", good="")
    found = compile_all([*sources, sources[1]], ARCH, workers=2)
    assert (found.kernels, found.compiled, found.processes) == (2, 2, 2)
    assert [message.split(":")[0] for message in found.failed] == ["bad"]
    assert cubin_cache.read(cubin_cache.key(sources[1], Target(ARCH))) is not None
    assert "2 kernels: 2 compiled by 2 processes" in str(found)
    assert "1 failed" in str(found)


@needs_nvrtc
def test_what_is_there_is_not_compiled_again(tmp_path: Path) -> None:
    sources = kernels_in(tmp_path, one="", two="")
    assert compile_all(sources[:1], ARCH).compiled == 1
    found = compile_all(sources, ARCH)
    assert (found.kernels, found.compiled, found.processes) == (2, 1, 1)
    again = compile_all(sources, ARCH)
    assert (again.kernels, again.compiled, again.processes, again.failed) == (2, 0, 0, [])


def _wait_for_turn(begun: Any, done: Any) -> None:
    begun.set()
    compile_all([], ARCH)
    done.set()


def test_one_caller_compiles_at_a_time() -> None:
    context = multiprocessing.get_context("spawn")
    begun, done = context.Event(), context.Event()
    other = context.Process(target=_wait_for_turn, args=(begun, done))
    with cache.one_at_a_time(cache_dir() / "together" / "all"):
        other.start()
        assert begun.wait(60)
        assert not done.wait(0.5), "it did not wait"
    assert done.wait(60)
    other.join()


@needs_nvrtc
def test_a_kernel_that_was_left_out_is_named(tmp_path: Path) -> None:
    first, second = kernels_in(tmp_path, first="", second="")
    compile_all([first], ARCH)
    with nothing_compiled():
        cubin_cache.compiled(first, Target(ARCH))
        with pytest.raises(AssertionError, match=r"second\.cu .* was not compiled with the others"):
            cubin_cache.compiled(second, Target(ARCH))
    cubin_cache.compiled(second, Target(ARCH))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_kernels_are_those_that_a_gpu_loads(fmt: CacheFormat) -> None:
    """Whatever the number of its multiprocessors: a set is asked for by architecture alone."""
    recorder = FakeBackend()
    recorder.limits = limits_of_capability(90, 132)
    kernels, layout = KernelSet(), CacheLayout(fmt, 4, 128, 16)
    for features in ({}, {"query_tokens": 3}, {"split_tokens": 64, "max_blocks_per_seq": 9}):
        kernels.add_decoder(layout, 8, max_seqs=600, **features)
        Decoder(recorder, layout, 8, 600, **features)  # type: ignore[arg-type]
    assert {(s.path, s.entry, s.defines) for s in kernels.sources(ARCH)} == {
        (s.path, s.entry, s.defines) for s in recorder.loads
    }


def test_launchers_of_a_format_and_layout() -> None:
    tight = CacheLayout(NVFP4, 2, 64, 16)
    apart = dataclasses.replace(tight, data_section_override=tight.data_section_bytes + 16)
    found = []
    for layout in (tight, apart):
        kernels = KernelSet()
        add_launchers(kernels, NVFP4, launcher_scalars(layout, 8))
        found.append({(s.entry, s.defines) for s in kernels.sources(ARCH)})
    names = {entry for entry, _ in found[0]}
    assert names >= {
        "reshape_and_cache_nvfp4", "paged_decode_attn_nvfp4", "paged_decode_attn_splitk_nvfp4",
        "paged_decode_attn_reduce_nvfp4", "paged_decode_attn_tiled_nvfp4", "attention_finalize",
    }  # fmt: skip
    assert not any(name.endswith(("_bf16", "_fp8")) and "reduce" not in name for name in names)
    assert {entry for entry, _ in found[0] ^ found[1]} == {
        "paged_decode_attn_nvfp4", "paged_decode_attn_splitk_nvfp4",
    }  # fmt: skip
