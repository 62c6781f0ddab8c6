"""Compiled kernels on disk: what a key depends on, damage, several processes, unwritable folders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupaged import cache_dir as cache_dir_module
from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.backends.cupy.nvrtc import Target
from cupaged.source import KernelSource, kernels_dir, parse_parameters
from tests.test_nvrtc import needs_nvrtc

TEXT = '#include "one.cuh"\nextern "C" __global__ void own(int* x) { *x = ONE; }\n'
SM_90 = Target("sm_90a")
PAYLOAD = b"\x7fELF and so on"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no memory of earlier warnings."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache_dir_module, "_temporary", None)
    cache_dir_module.warn_once.cache_clear()
    yield folder
    if cache_dir_module._temporary is not None:
        cache_dir_module._temporary.cleanup()


@pytest.fixture
def source(tmp_path: Path) -> KernelSource:
    """own.cu -> one.cuh -> two.cuh."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "own.cu").write_text(TEXT)
    (folder / "one.cuh").write_text('#include "two.cuh"\n')
    (folder / "two.cuh").write_text("#define ONE 1\n")
    return KernelSource(folder / "own.cu", "own", parse_parameters(TEXT, "own"), (("A", "1"), ("B", "2")))


class Compiler:
    """Stands in for NVRTC and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: KernelSource, target: Target) -> bytes:
        self.calls += 1
        return PAYLOAD


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(nvrtc, "compile_source", stand_in)
    monkeypatch.setattr(nvrtc, "version_text", lambda: "12.9")
    return stand_in


def entries(cache: Path) -> list[Path]:
    """Every file but the one that only carries locks."""
    return sorted(path for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_second_call_compiles_nothing(cache: Path, source: KernelSource, compiler: Compiler) -> None:
    assert [cubin_cache.compiled(source, SM_90) for _ in range(3)] == [PAYLOAD] * 3
    assert compiler.calls == 1
    assert len(entries(cache)) == 1


def edit(source: KernelSource, name: str) -> KernelSource:
    path = source.path.parent / name
    path.write_text(path.read_text() + "// \n")
    return source


CHANGES: dict[str, Callable[[KernelSource], KernelSource]] = {
    "the source": lambda s: edit(s, "own.cu"),
    "a header": lambda s: edit(s, "one.cuh"),
    "a nested header": lambda s: edit(s, "two.cuh"),
    "a define's value": lambda s: dataclasses.replace(s, defines=(("A", "1"), ("B", "3"))),
    "a define's name": lambda s: dataclasses.replace(s, defines=(("A", "1"), ("C", "2"))),
    "a define less": lambda s: dataclasses.replace(s, defines=(("A", "1"),)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_follows(source: KernelSource, compiler: Compiler, change: str) -> None:
    before = cubin_cache.key(source, SM_90)
    assert cubin_cache.key(source, SM_90) == before
    assert cubin_cache.key(CHANGES[change](source), SM_90) != before


def test_the_key_follows_the_architecture_and_nvrtc(
    source: KernelSource, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [*nvrtc.CHECKED_TARGETS, "sm_90", "compute_90", "sm_100a"]
    keys = {cubin_cache.key(source, Target(arch)) for arch in targets}
    assert len(keys) == len(targets)
    monkeypatch.setattr(nvrtc, "version_text", lambda: "13.0")
    assert cubin_cache.key(source, SM_90) not in keys
    monkeypatch.setattr(nvrtc, "version_text", lambda: "12.9")
    assert cubin_cache.key(source, SM_90) in keys
    monkeypatch.setattr(nvrtc, "_FIXED_OPTIONS", ("-std=c++17",))
    assert cubin_cache.key(source, SM_90) not in keys


def test_the_key_follows_a_header_of_the_package(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the copy that changes is not the one that was asked first."""
    copy = tmp_path / "copy"
    shutil.copytree(kernels_dir(), copy)
    here, there = (
        KernelSource(folder / "bf16_absmax.cu", "bf16_absmax", ()) for folder in (kernels_dir(), copy)
    )
    assert cubin_cache.key(here, SM_90) == cubin_cache.key(there, SM_90)
    header = copy / "types.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert cubin_cache.key(here, SM_90) != cubin_cache.key(there, SM_90)


def test_the_key_does_not_follow_place_time_or_other_files(
    tmp_path: Path, source: KernelSource, compiler: Compiler
) -> None:
    before = cubin_cache.key(source, SM_90)
    (source.path.parent / "unrelated.cuh").write_text("#define ONE 2\n")
    moved = tmp_path / "some" / "where else"
    shutil.copytree(source.path.parent, moved)
    (moved / "two.cuh").touch()
    assert cubin_cache.key(dataclasses.replace(source, path=moved / "own.cu"), SM_90) == before
    assert cubin_cache.key(dataclasses.replace(source, entry="another of the same module"), SM_90) == before


@pytest.mark.parametrize("length", range(32 + len(PAYLOAD)))
def test_a_truncated_entry_is_compiled_again_and_healed(
    cache: Path, source: KernelSource, compiler: Compiler, length: int
) -> None:
    cubin_cache.compiled(source, SM_90)
    (path,) = entries(cache)
    whole = path.read_bytes()
    assert len(whole) == 32 + len(PAYLOAD)
    path.write_bytes(whole[:length])
    assert cubin_cache.compiled(source, SM_90) == PAYLOAD
    assert compiler.calls == 2
    assert path.read_bytes() == whole
    cubin_cache.compiled(source, SM_90)
    assert compiler.calls == 2


@pytest.mark.parametrize("position", range(32 + len(PAYLOAD)))
def test_a_changed_byte_is_noticed(cache: Path, position: int) -> None:
    cubin_cache.write("name", PAYLOAD)
    (path,) = entries(cache)
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 1
    path.write_bytes(damaged)
    assert cubin_cache.read("name") is None


def test_bytes_after_the_end_are_noticed_and_a_missing_entry_is_none(cache: Path) -> None:
    cubin_cache.write("name", PAYLOAD)
    assert cubin_cache.read("name") == PAYLOAD
    (path,) = entries(cache)
    path.write_bytes(path.read_bytes() + b"\0")
    assert cubin_cache.read("name") is None
    assert cubin_cache.read("never written") is None


def test_entries_of_an_older_source_stay_beside_the_new_one(
    cache: Path, source: KernelSource, compiler: Compiler
) -> None:
    cubin_cache.compiled(source, SM_90)
    old = (source.path.parent / "two.cuh").read_text()
    edit(source, "two.cuh")
    cubin_cache.compiled(source, SM_90)
    assert (compiler.calls, len(entries(cache))) == (2, 2)
    (source.path.parent / "two.cuh").write_text(old)
    cubin_cache.compiled(source, SM_90)
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: KernelSource, compiler: Compiler
) -> None:
    """Below a regular file no folder can be made, not even by root."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"cannot write to .*file/cache .*CUPAGED_CACHE_DIR"):
        assert cubin_cache.compiled(source, SM_90) == PAYLOAD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin_cache.compiled(source, SM_90) == PAYLOAD
    assert compiler.calls == 1


def test_an_entry_that_cannot_be_written_costs_one_warning(
    cache: Path, source: KernelSource, compiler: Compiler
) -> None:
    cache.mkdir()
    (cache / "cubin").touch()  # a file where the folder of the entries should be
    with pytest.warns(RuntimeWarning, match=r"cannot write .*cubin.* it is compiled again next time"):
        assert cubin_cache.compiled(source, SM_90) == PAYLOAD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin_cache.compiled(source, SM_90) == PAYLOAD
    assert compiler.calls == 2


def test_an_interrupted_write_leaves_the_old_entry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin_cache.write("name", PAYLOAD)

    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cubin_cache.write("name", b"new")
    assert cubin_cache.read("name") == PAYLOAD
    assert len(entries(cache)) == 1


def test_readers_see_a_whole_entry_while_others_write(cache: Path) -> None:
    contents = {bytes([i]) * (1 + 5000 * i) for i in range(4)}
    cubin_cache.write("name", next(iter(contents)))
    stop = threading.Event()

    def write(content: bytes) -> None:
        while not stop.is_set():
            cubin_cache.write("name", content)

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, content) for content in contents]
        found = {cubin_cache.read("name") for _ in range(300)}
        stop.set()
        for writer in writers:
            writer.result()
    assert found <= contents
    assert len(entries(cache)) == 1


CHILD = """
import hashlib, json, pathlib, sys
from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.source import KernelSource, parse_parameters
path = pathlib.Path(sys.argv[1])
source = KernelSource(path, "own", parse_parameters(path.read_text(), "own"))
calls = []
compile_source = nvrtc.compile_source
def counted(*arguments):
    calls.append(1)
    return compile_source(*arguments)
nvrtc.compile_source = counted
nvrtc.binding()
print("ready", flush=True)
sys.stdin.readline()
code = cubin_cache.compiled(source, nvrtc.Target("sm_90a"))
assert code[:4] == b"\\x7fELF"
print(json.dumps([hashlib.sha256(code).hexdigest(), len(calls)]))
"""


@needs_nvrtc
def test_processes_that_compile_the_same_kernel_cold_at_once(cache: Path, source: KernelSource) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", CHILD, str(source.path)]
    with contextlib.ExitStack() as stack:
        children = []
        for _ in range(5):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        *at_once, late = children
        for child in at_once:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        results = [json.loads(child.communicate()[0]) for child in at_once]
        assert len({digest for digest, _ in results}) == 1
        assert sum(compilations for _, compilations in results) == 1
        assert len(entries(cache)) == 1
        assert json.loads(late.communicate("\n")[0]) == [results[0][0], 0]
