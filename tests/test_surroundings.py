"""Compiling at run time on machines as they are: the right result, or one message that says what to do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from pathlib import Path

import pytest

from cupaged import cache
from tests.surroundings import PROCESSES, ROOT, SAXPY, entries, environment, obey_permissions, run, start


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the emulator's runtime and one kernel."""
    folder = tmp_path_factory.mktemp("compiled")
    assert run(SAXPY, environment(folder)) == ("right\n", "")
    return folder


@pytest.fixture
def warm(compiled: Path, tmp_path: Path) -> Path:
    """A copy of `compiled` of one's own."""
    return shutil.copytree(compiled, tmp_path / "warm")


# ---- the cache folder


def test_cache_under_xdg_cache_home(tmp_path: Path) -> None:
    out, err = run(SAXPY, environment(None, XDG_CACHE_HOME=str(tmp_path)))
    assert (out, err) == ("right\n", "")
    assert {path.suffix for path in entries(tmp_path / "cupaged" / "emulator")} == {".so"}


WHERE = "from cupaged.cache_dir import cache_dir; print(cache_dir().is_dir(), cache_dir())"


def test_a_home_that_can_not_exist() -> None:
    out, err = run(WHERE, environment(None, XDG_CACHE_HOME=None, HOME="/dev/null"))
    assert out.startswith("True ")
    assert err.count("RuntimeWarning") == 1
    assert "cannot write to /dev/null/.cache/cupaged (Not a directory)" in err
    assert "export CUPAGED_CACHE_DIR=/some/folder" in err


def test_no_home_and_no_entry_for_the_user() -> None:
    nobody = "import pwd\ndef unknown(*a): raise KeyError\npwd.getpwuid = unknown\n"
    out, err = run(nobody + WHERE, environment(None, XDG_CACHE_HOME=None, HOME=None))
    assert out.startswith("True ")
    assert not Path(out.split()[1]).exists()  # it went with the process
    assert err.count("RuntimeWarning") == 1
    assert "cannot write to a home directory" in err


def test_cache_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    out, err = run(SAXPY, environment(tmp_path), obey_permissions)
    tmp_path.chmod(0o755)
    if not err:
        pytest.skip("file permissions do not hold here")
    assert out == "right\n"
    assert err.count("RuntimeWarning") == 1
    assert f"cannot write to {tmp_path} (Permission denied)" in err
    assert list(tmp_path.iterdir()) == []


def test_a_filled_cache_that_is_read_only_is_used(warm: Path) -> None:
    for folder in (warm / "emulator", warm):
        folder.chmod(0o555)
    assert run(SAXPY, environment(warm), obey_permissions) == ("right\n", "")  # no warning: nothing compiled
    for folder in (warm, warm / "emulator"):
        folder.chmod(0o755)


def test_nothing_at_all_can_be_written(tmp_path: Path) -> None:
    nowhere = """
import tempfile
def no(*a, **k): raise FileNotFoundError(2, "none")
tempfile._get_default_tempdir = no
"""
    _, err = run(nowhere + SAXPY, environment(Path("/dev/null/cache"), TMPDIR=None))
    assert "BackendUnavailableError: no folder for compiled kernels" in err
    assert "export CUPAGED_CACHE_DIR=/some/folder" in err


def test_the_emulator_keeps_the_cap(tmp_path: Path) -> None:
    other = tmp_path / "emulator" / "other.so"
    other.parent.mkdir()
    other.write_bytes(b"long unused")
    os.utime(other, (0, 0))
    assert run(SAXPY, environment(tmp_path, CUPAGED_CACHE_MAX_BYTES="0")) == ("right\n", "")
    assert not other.exists()
    assert len(entries(tmp_path)) == 2  # the runtime and the kernel, just written


def test_the_emulator_notes_what_it_uses(warm: Path) -> None:
    for path in entries(warm):
        os.utime(path, (0, 0))
    assert run(SAXPY, environment(warm)) == ("right\n", "")
    assert all(path.stat().st_mtime > 0 for path in entries(warm))


# ---- damaged and stale entries


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut short": content[: len(content) // 2],
            "one bit": content[:900] + bytes([content[900] ^ 1]) + content[901:],
        }[how]
    )


@pytest.mark.parametrize("how", ["cut short", "one bit"])
def test_damaged_libraries_are_made_again(warm: Path, how: str) -> None:
    whole = {path: path.stat().st_size for path in entries(warm)}
    assert len(whole) == 2  # the runtime and the kernel
    for path in whole:
        _damage(path, how)
    assert run(SAXPY, environment(warm)) == ("right\n", "")
    assert {path: path.stat().st_size for path in entries(warm)} == whole
    assert all(cache.is_intact(path) for path in whole)


def test_intact_files_that_the_system_does_not_load_are_made_again(warm: Path) -> None:
    for path in entries(warm):
        path.write_text("made for another system")
        cache.seal(path)
    assert run(SAXPY, environment(warm)) == ("right\n", "")


def test_a_library_that_vanishes_before_it_is_loaded_is_made_again(warm: Path) -> None:
    vanishing = """
from cupaged.backends.emulator import library
original, gone = library.load, []
def load(path):
    if path.name not in gone:
        gone.append(path.name)
        path.unlink()
    return original(path)
library.load = load
"""
    assert run(vanishing + SAXPY, environment(warm)) == ("right\n", "")


def test_a_library_that_is_never_loaded_ends_in_a_message(warm: Path) -> None:
    refused = """
import ctypes
def no(*a, **k): raise OSError("failed to map segment from shared object")
ctypes.CDLL = no
"""
    _, err = run(refused + SAXPY, environment(warm))
    assert "BackendUnavailableError: a compiled library cannot be loaded: failed to map segment" in err
    assert "set CUPAGED_CACHE_DIR to another folder" in err


def test_an_edited_source_is_compiled_again(warm: Path, tmp_path: Path) -> None:
    edited = tmp_path / "saxpy.cu"
    text = (ROOT / "tests" / "kernels" / "saxpy.cu").read_text()
    env = environment(warm)
    code = SAXPY.replace("tests/kernels/saxpy.cu", str(edited))
    edited.write_text(text.replace("+= a", "-= a"))
    assert "right" not in run(code, env)[0]
    edited.write_text(text)
    assert run(code, env) == ("right\n", "")


# ---- many processes at once


def test_processes_that_compile_cold_for_the_emulator(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    log, wrapper = tmp_path / "log", tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo >> {log}\nexec {compiler} "$@"\n')
    wrapper.chmod(0o755)
    env = environment(tmp_path / "cache", CXX=str(wrapper))
    processes = [start(SAXPY, env) for _ in range(PROCESSES)]
    assert [process.communicate(timeout=120) for process in processes] == [("right\n", "")] * PROCESSES
    assert log.read_text() == "\n\n"  # the runtime once, the kernel once
    folder = tmp_path / "cache" / "emulator"
    assert len(entries(folder)) == 2
    assert [path.name for path in folder.glob(".*")] == [".lock"]


def test_processes_without_locks_and_with_a_tiny_cap(tmp_path: Path) -> None:
    no_locks = "from cupaged import cache\ncache._lock = lambda path: None\n"
    env = environment(tmp_path, CUPAGED_CACHE_MAX_BYTES="1")
    processes = [start(no_locks + SAXPY, env) for _ in range(3)]
    assert [process.communicate(timeout=120) for process in processes] == [("right\n", "")] * 3


def test_processes_whose_cache_is_cleared_all_the_time(warm: Path) -> None:
    processes = [start(SAXPY, environment(warm)) for _ in range(3)]
    while any(process.poll() is None for process in processes):
        cache.clear(warm)
        time.sleep(0.02)
    assert [process.communicate() for process in processes] == [("right\n", "")] * 3


# ---- no compiler


def test_no_compiler(tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("another compiler is installed as a Python package")
    _, err = run(SAXPY, environment(tmp_path, PATH=str(tmp_path), CXX=None))
    assert "BackendUnavailableError: the emulator needs a C++ compiler; looked for $CXX (not set)" in err
    assert "apt-get install g++" in err
