"""CUDA, CuPy and NVRTC as they are in the field: the right code, or one message that says what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged.backends.cupy import CupyBackend, installation, nvrtc
from cupaged.backends.cupy.installation import Driver, Gpu
from cupaged.errors import BackendUnavailableError
from cupaged.source import KernelSource, kernels_dir
from tests.surroundings import (
    NVRTC,
    PROCESSES,
    FakeCuda,
    entries,
    environment,
    fake_driver,
    obey_permissions,
    run,
    start,
)


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
    assert len(entries(tmp_path / "cache" / "cubin")) == 1


@pytest.mark.usefixtures("real_nvrtc")
def test_a_filled_cache_that_is_read_only_is_used(tmp_path: Path) -> None:
    assert run(NVRTC, environment(tmp_path))[1] == ""
    for folder in (tmp_path / "cubin", tmp_path):
        folder.chmod(0o555)
    uncompiled = "from cupaged.backends.cupy import nvrtc\nnvrtc.compile_source = None\n"
    out, err = run(uncompiled + NVRTC, environment(tmp_path), obey_permissions)
    for folder in (tmp_path, tmp_path / "cubin"):
        folder.chmod(0o755)
    assert (out, err) == (r"b'\x7fELF'" + "\n", "")


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
    extra = "cuda1[23]" if installation.driver().gpus else "nvrtc"
    assert re.search(rf"pip install '{re.escape(installation.package())}\[{extra}\]'", message)


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


def test_a_log_ends_with_its_text(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC's own ends with a zero byte."""
    binding = sys.modules["cupy_backends.cuda.libs.nvrtc"]
    for name, result in {
        "createProgram": 1, "destroyProgram": None, "compileProgram": None, "getCUBIN": b"code",
        "getProgramLog": "a remark\n\0",
    }.items():  # fmt: skip
        monkeypatch.setattr(binding, name, lambda *_, result=result: result, raising=False)
    source = KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ())
    assert nvrtc.compile_with_log(source, nvrtc.Target("sm_80")) == (b"code", "a remark\n")


def test_cupy_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheels", lambda: ())
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, None)
    message = r"CuPy is not installed .*pip install '\.\[cuda12\]'.*cupaged.EmulatorBackend"
    with pytest.raises(BackendUnavailableError, match=message):
        CupyBackend()
    monkeypatch.setattr(installation, "driver", lambda: Driver((12, 9), (Gpu("a GPU", (9, 0)),), ""))
    with pytest.raises(BackendUnavailableError, match=message):
        nvrtc.version_text()


def test_what_a_compiler_without_a_gpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra for compiling alone, and not a word of running kernels."""
    monkeypatch.setattr(installation, "wheels", lambda: ())
    monkeypatch.setattr(installation, "driver", lambda: Driver(None, (), "no NVIDIA driver found"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(BackendUnavailableError, match="CuPy is not installed") as caught:
        nvrtc.version_text()
    assert str(caught.value).endswith(
        f"); to compile without a GPU: pip install '{installation.package()}[nvrtc]'"
    )


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
    assert "pip uninstall -y cupy-cuda12x && pip install '" in message
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
    command = f"pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install '{installation.package()}[cuda13]'"
    assert command in str(caught.value)


def test_cupy_for_a_newer_cuda_than_the_driver(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.built_for = 13000
    cuda.device_error = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    monkeypatch.setattr(installation, "wheels", lambda: (("cupy-cuda13x", "14.2.0"),))
    monkeypatch.setattr(installation, "driver", lambda: Driver((12, 4), (), ""))
    with pytest.raises(BackendUnavailableError) as caught:
        CupyBackend()
    assert str(caught.value) == (
        "cupy-cuda13x 14.2.0 is built for CUDA 13, but the driver supports CUDA 12.4 at most; mend it with: "
        f"pip uninstall -y cupy-cuda13x && pip install '{installation.package()}[cuda12]' "
        "(or update the driver); without a GPU, cupaged.EmulatorBackend runs the same kernels on the CPU"
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
    message = r"capability 12.1.*supports 50, 60, 70, 75; NVRTC is too old for it.*pip install '\.\[cuda12\]'"
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
