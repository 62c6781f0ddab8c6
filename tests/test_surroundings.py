"""Compiling at run time on machines as they are: the right result, or one message that says what to do."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged import cache
from cupaged.backends.cupy import CupyBackend, installation, nvrtc
from cupaged.backends.cupy.installation import Driver
from cupaged.errors import BackendUnavailableError
from cupaged.source import KernelSource, kernels_dir
from tests.surroundings import (
    NVRTC,
    SAXPY,
    FakeCuda,
    environment,
    fake_driver,
    obey_permissions,
    run,
    start,
)

PROCESSES = 16


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


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


@pytest.fixture
def real_nvrtc() -> Any:
    """CuPy's binding of NVRTC, where that is installed."""
    try:
        return nvrtc.binding()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(installation, "driver", lambda: Driver((12, 9), (), ""))
    monkeypatch.setattr(installation, "wheels", lambda: (("cupy-cuda12x", "14.2.0"),))
    return fake


# ---- the cache folder


def test_cache_under_xdg_cache_home(tmp_path: Path) -> None:
    out, err = run(SAXPY, environment(None, XDG_CACHE_HOME=str(tmp_path)))
    assert (out, err) == ("right\n", "")
    assert {path.suffix for path in _entries(tmp_path / "cupaged" / "emulator")} == {".so"}


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


def test_nothing_at_all_can_be_written(tmp_path: Path) -> None:
    nowhere = """
import tempfile
def no(*a, **k): raise FileNotFoundError(2, "none")
tempfile._get_default_tempdir = no
"""
    _, err = run(nowhere + SAXPY, environment(Path("/dev/null/cache"), TMPDIR=None))
    assert "BackendUnavailableError: no folder for compiled kernels" in err
    assert "export CUPAGED_CACHE_DIR=/some/folder" in err


def test_a_cap_of_nothing_still_works(tmp_path: Path) -> None:
    env = environment(tmp_path, CUPAGED_CACHE_MAX_BYTES="0")
    assert run(SAXPY, env) == ("right\n", "")


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
    whole = {path: path.stat().st_size for path in _entries(warm)}
    assert len(whole) == 2  # the runtime and the kernel
    for path in whole:
        _damage(path, how)
    assert run(SAXPY, environment(warm)) == ("right\n", "")
    assert {path: path.stat().st_size for path in _entries(warm)} == whole
    assert all(cache.is_intact(path) for path in whole)


def test_intact_files_that_the_system_does_not_load_are_made_again(warm: Path) -> None:
    for path in _entries(warm):
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
    text = (kernels_dir().parent / "tests" / "kernels" / "saxpy.cu").read_text()
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
    assert len(_entries(folder)) == 2
    assert [path.name for path in folder.glob(".*")] == [".lock"]


@pytest.mark.usefixtures("real_nvrtc")
def test_processes_that_compile_cold_with_nvrtc(tmp_path: Path) -> None:
    log = tmp_path / "log"
    counted = f"""
from cupaged.backends.cupy import nvrtc
original = nvrtc.compile_source
def compile_source(*arguments):
    open({str(log)!r}, "a").write("compiled ")
    return original(*arguments)
nvrtc.compile_source = compile_source
"""
    env = environment(tmp_path / "cache")
    processes = [start(counted + NVRTC, env) for _ in range(PROCESSES)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert {out for out, _ in outputs} == {r"b'\x7fELF'" + "\n"}, outputs
    assert log.read_text() == "compiled "
    assert len(_entries(tmp_path / "cache" / "cubin")) == 1


def test_processes_without_locks_and_with_a_tiny_cap(tmp_path: Path) -> None:
    no_locks = "from cupaged import cache\ncache._lock = lambda path: None\n"
    env = environment(tmp_path, CUPAGED_CACHE_MAX_BYTES="1")
    processes = [start(no_locks + SAXPY, env) for _ in range(4)]
    assert [process.communicate(timeout=120) for process in processes] == [("right\n", "")] * 3


# ---- CUDA, CuPy and NVRTC


@pytest.mark.usefixtures("real_nvrtc")
def test_cuda_path_pointing_at_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    out, _ = run(NVRTC, environment(tmp_path / "cache", CUDA_PATH=empty, CUDA_HOME=empty))
    assert out == r"b'\x7fELF'" + "\n"


@pytest.mark.usefixtures("real_nvrtc")
def test_nvrtc_whose_library_is_missing(tmp_path: Path) -> None:
    missing = """
from cuda import pathfinder
def no(name): raise RuntimeError("libnvrtc.so.12 not found")
pathfinder.load_nvidia_dynamic_lib = no
"""
    _, err = run(missing + NVRTC, environment(tmp_path, CUDA_PATH="/opt/elsewhere"))
    message = err.splitlines()[-1]
    assert "NVRTC, CUDA's run-time compiler, cannot be loaded (libnvrtc.so.12 not found" in message
    assert "CUDA_PATH is '/opt/elsewhere'" in message
    assert "pip install 'cupaged[cuda12]'" in message


def test_nvrtc_without_its_other_half(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: object, options: object) -> None:
        raise sys.modules["cupy_backends.cuda.libs.nvrtc"].NVRTCError("NVRTC_ERROR_BUILTIN_OPERATION_FAILURE")

    binding = sys.modules["cupy_backends.cuda.libs.nvrtc"]
    log = "nvrtc: error: failed to open libnvrtc-builtins.so.12.9"
    for name, function in {
        "createProgram": lambda *arguments: 1,
        "destroyProgram": lambda program: None,
        "compileProgram": fail,
        "getProgramLog": lambda program: log,
    }.items():
        monkeypatch.setattr(binding, name, function, raising=False)
    source = KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ())
    with pytest.raises(BackendUnavailableError, match=r"libnvrtc-builtins.so.12.9.*pip install"):
        nvrtc.compile_source(source, nvrtc.Target("sm_80"))


def test_cupy_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheels", lambda: ())
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, None)
    message = r"CuPy is not installed .*pip install 'cupaged\[cuda12\]'.*cupaged.EmulatorBackend"
    with pytest.raises(BackendUnavailableError, match=message):
        CupyBackend()
    with pytest.raises(BackendUnavailableError, match=message):
        nvrtc.version_text()


def test_cupy_is_half_installed(tmp_path: Path) -> None:
    for package in ("cupy", "cupy_backends"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("from . import _core\n")
    wheel = tmp_path / "cupy_cuda12x-14.2.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda12x\nVersion: 14.2.0\n")
    code = "import cupaged\ncupaged.CupyBackend()"
    _, err = run(code, environment(tmp_path / "cache", PYTHONPATH=str(tmp_path)))
    message = err.splitlines()[-1]
    assert re.search(
        r"CuPy cannot be imported \(cannot import name '_core'.*\), though cupy-cuda12x 14", message
    )
    assert "pip uninstall -y cupy-cuda12x && pip install 'cupaged[" in message
    assert "cupaged.EmulatorBackend" in message


def test_two_cupys_overwrite_each_other(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    both = (("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.1.0"))
    monkeypatch.setattr(installation, "wheels", lambda: both)
    monkeypatch.setattr(installation, "driver", lambda: Driver((13, 1), (), ""))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError) as caught:
        CupyBackend()
    assert "cupy-cuda12x 14.2.0, cupy-cuda13x 14.1.0 is installed; these overwrite each other" in str(
        caught.value
    )
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupaged[cuda13]'" in str(caught.value)


def test_cupy_for_a_newer_cuda_than_the_driver(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.built_for = 13000
    cuda.device_error = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    monkeypatch.setattr(installation, "wheels", lambda: (("cupy-cuda13x", "14.2.0"),))
    monkeypatch.setattr(installation, "driver", lambda: Driver((12, 4), (), ""))
    with pytest.raises(BackendUnavailableError) as caught:
        CupyBackend()
    assert str(caught.value) == (
        "cupy-cuda13x 14.2.0 is built for CUDA 13, but the driver supports CUDA 12.4 at most; mend it with: "
        "pip uninstall -y cupy-cuda13x && pip install 'cupaged[cuda12]' (or update the driver); without a "
        "GPU, cupaged.EmulatorBackend runs the same kernels on the CPU"
    )


def test_a_driver_older_than_any_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "update the driver, which supports CUDA 11.4" in installation.install_command(
        Driver((11, 4), (), "")
    )


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Driver(None, (), "no NVIDIA driver found (libcuda.so.1: ...)"), "no NVIDIA driver found"),
        (Driver((12, 9), (), "the driver shows no GPU"), "the driver shows no GPU; check with: nvidia-smi"),
        (Driver((12, 9), (), ""), "cudaErrorNoDevice: no CUDA-capable device"),
    ],
)
def test_no_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, found: Driver, says: str) -> None:
    cuda.device_error = "cudaErrorNoDevice: no CUDA-capable device"
    monkeypatch.setattr(installation, "driver", lambda: found)
    with pytest.raises(BackendUnavailableError) as caught:
        CupyBackend()
    assert says in str(caught.value)
    assert "cupaged.EmulatorBackend" in str(caught.value)


def test_gpus_hidden_by_the_environment(tmp_path: Path) -> None:
    env = environment(tmp_path, LD_LIBRARY_PATH=fake_driver(tmp_path, 12080), CUDA_VISIBLE_DEVICES="7")
    out, _ = run("from cupaged.backends.cupy import installation; print(installation.driver())", env)
    assert "cuda=(12, 8)" in out
    assert "CUDA_VISIBLE_DEVICES is '7'" in out


@pytest.mark.parametrize(
    ("capability", "archs", "target", "bulk_copies"),
    [
        ((9, 9), (80, 86, 89, 90, 100, 103, 120, 121), "sm_90", True),
        ((9, 9), (80, 86, 89), "compute_89", False),
        ((12, 1), (80, 86, 89, 90, 100, 103, 120, 121), "sm_120f", True),
        ((12, 1), (80, 86, 89, 90, 100, 120), "sm_120", True),
        ((12, 1), (80, 86, 89, 90), "compute_90", True),
        ((12, 1), (80, 86), "compute_86", False),
    ],
)
def test_nvrtc_older_than_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    real_nvrtc: Any,
    capability: tuple[int, int],
    archs: tuple[int, ...],
    target: str,
    bulk_copies: bool,
) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    fake = FakeCuda()
    fake.capability, fake.archs = capability, archs
    fake.install(monkeypatch, real_nvrtc)
    gpu = CupyBackend()
    assert gpu.arch == target
    assert gpu.limits.bulk_copies == bulk_copies
    gpu.load(KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ()))
    [code] = fake.loaded
    if target.startswith("compute_"):
        assert f".target sm_{target[8:]}".encode() in code  # PTX, which the driver compiles
    else:
        assert code.startswith(b"\x7fELF")


def test_nvrtc_that_knows_no_gpu_of_use(cuda: FakeCuda) -> None:
    cuda.capability, cuda.archs = (12, 1), (50, 60, 70, 75)
    message = (
        r"capability 12.1.*supports 50, 60, 70, 75; NVRTC is too old for it.*pip install 'cupaged\[cuda12\]'"
    )
    with pytest.raises(BackendUnavailableError, match=message):
        CupyBackend()


def test_a_gpu_that_is_too_old(cuda: FakeCuda) -> None:
    cuda.capability = (7, 5)
    with pytest.raises(BackendUnavailableError, match=r"7\.5; cupaged needs 8\.0.*EmulatorBackend"):
        CupyBackend()


def test_a_driver_that_refuses_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real_nvrtc: Any
) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    fake = FakeCuda()
    fake.capability, fake.archs, fake.driver_cuda = (12, 1), (80, 90), 12040
    fake.load_error = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    fake.install(monkeypatch, real_nvrtc)
    with pytest.raises(BackendUnavailableError) as caught:
        CupyBackend().load(KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ()))
    for part in (
        "the driver (CUDA 12.4) refuses bf16_absmax.cu",
        "compute_90",
        fake.load_error,
        "cache --clear",
    ):
        assert part in str(caught.value)


def test_no_compiler(tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("another compiler is installed as a Python package")
    _, err = run(SAXPY, environment(tmp_path, PATH=str(tmp_path), CXX=None))
    assert "BackendUnavailableError: the emulator needs a C++ compiler; looked for $CXX (not set)" in err
    assert "apt-get install g++" in err
