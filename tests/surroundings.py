"""Running Python in other surroundings: environments, missing rights, a fake driver, a fake CuPy."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROCESSES = 16  # that compile at once

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 120
_DROP_FROM_BOUNDS, _OVERRIDES_PERMISSIONS = 24, 1  # prctl PR_CAPBSET_DROP, CAP_DAC_OVERRIDE

# Prints "right" if a small kernel gives the right result on the emulator.
SAXPY = """
import numpy as np
from cupaged import EmulatorBackend, KernelLaunch
gpu = EmulatorBackend()
x, y = gpu.asarray(np.arange(40, dtype=np.float32)), gpu.zeros(40, np.float32)
kernel = gpu.kernel("tests/kernels/saxpy.cu", "saxpy")
KernelLaunch(gpu, kernel).grid([2, 1, 1]).block([32, 1, 1]).arg_ptr(x).arg_ptr(y).arg_f32(2.0).arg_u32(40) \\
    .launch(gpu.null_stream())
print("right" if (y == 2 * x).all() else y)
"""

# Prints the first bytes of a kernel of the package as NVRTC compiled it, by way of the disk cache.
NVRTC = """
from cupaged.backends.cupy import cubin_cache, nvrtc
from cupaged.source import KernelSource, kernels_dir
source = KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ())
print(cubin_cache.compiled(source, nvrtc.Target("sm_80"))[:4])
"""


def environment(cache: Path | None, **changes: str | None) -> dict[str, str]:
    """This process's environment with another cache folder; None removes a variable."""
    given = {"CUPAGED_CACHE_DIR": None if cache is None else str(cache), "PYTHONPATH": None, **changes}
    kept = {name: value for name, value in os.environ.items() if name not in given}
    return {**kept, **{name: value for name, value in given.items() if value is not None}}


def entries(folder: Path) -> list[Path]:
    """Compiled files in a cache folder."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


def start(code: str, env: dict[str, str], setup: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """Run Python code in the root of the tree."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=setup,
    )


def run(code: str, env: dict[str, str], setup: Callable[[], None] | None = None) -> tuple[str, str]:
    """What Python code prints, and what it writes to stderr."""
    with start(code, env, setup) as process:
        return process.communicate(timeout=_TIMEOUT_S)


def command(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """``python -m cupaged`` with arguments."""
    return subprocess.run(
        [sys.executable, "-m", "cupaged", *arguments],
        cwd=ROOT,
        env=env,
        text=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def obey_permissions() -> None:
    """Let file permissions hold for this process and what it executes, even for root."""
    ctypes.CDLL(None).prctl(_DROP_FROM_BOUNDS, _OVERRIDES_PERMISSIONS, 0, 0, 0)


def fake_driver(folder: Path, cuda: int, *capabilities: tuple[int, int]) -> str:
    """A library path with a libcuda that knows these GPUs and no more than what the doctor asks."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    majors, minors = (", ".join(str(c[i]) for c in capabilities) or "0" for i in (0, 1))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "driver.cpp"
    source.write_text(f"""
        static const int majors[] = {{{majors}}}, minors[] = {{{minors}}};
        extern "C" {{
        int cuDriverGetVersion(int* version) {{ *version = {cuda}; return 0; }}
        int cuInit(unsigned) {{ return {0 if capabilities else 100}; }}
        int cuDeviceGetCount(int* count) {{ *count = {len(capabilities)}; return 0; }}
        int cuDeviceGetName(char* name, int, int) {{ __builtin_strcpy(name, "Fake GPU"); return 0; }}
        int cuDeviceGetAttribute(int* value, int what, int device) {{
          *value = what == 75 ? majors[device] : minors[device];
          return 0;
        }}
        }}
    """)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return str(folder)


class FakeCudaError(RuntimeError):
    """Stands for CuPy's CUDARuntimeError, CUDADriverError and NVRTCError."""


class FakeCuda:
    """CuPy's modules as `CupyBackend` sees them, for one GPU that is not there.

    Attributes:
        capability: of the GPU.
        archs: what NVRTC compiles for.
        built_for: CUDA that CuPy was built for, as 12090.
        driver_cuda: newest CUDA of the driver, as 12090.
        device_error: what asking for devices raises.
        load_error: what loading code raises.
        loaded: the code that was loaded.
    """

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.archs: tuple[int, ...] = (80, 86, 89, 90, 100, 103, 120, 121)
        self.built_for = self.driver_cuda = 12090
        self.device_error = self.load_error = ""
        self.loaded: list[bytes] = []

    def install(self, monkeypatch: pytest.MonkeyPatch, real_nvrtc: Any = None) -> None:
        """Put the fakes where they are imported from; NVRTC may be the real one, but for `archs`."""
        error = FakeCudaError
        runtime = _module(
            CUDARuntimeError=error,
            getDeviceCount=self._count,
            getDevice=lambda: 0,
            getDeviceProperties=lambda device: self._properties(),
            runtimeGetVersion=lambda: self.built_for,
            driverGetVersion=lambda: self.driver_cuda,
        )
        known = {} if real_nvrtc is None else vars(real_nvrtc)
        nvrtc = _module(**{"getVersion": lambda: (12, 9), "NVRTCError": error, **known})
        nvrtc.getSupportedArchs = lambda: list(self.archs)  # type: ignore[attr-defined]
        driver = _module(
            CUDADriverError=error,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
            funcGetAttribute=lambda attribute, function: 0,
        )
        api, libs = _module(driver=driver, runtime=runtime), _module(nvrtc=nvrtc)
        loader = self

        class Module:
            def load(self, code: bytes) -> None:
                if loader.load_error:
                    raise FakeCudaError(loader.load_error)
                loader.loaded.append(code)

            def get_function(self, name: str) -> Any:
                return types.SimpleNamespace(ptr=1)

        cuda = _module(function=_module(Module=Module), Device=_Device)
        for name, module in {
            "cupy": _module(cuda=cuda, ndarray=type("ndarray", (), {}), __version__="0"),
            "cupy_backends": _module(),
            "cupy_backends.cuda": _module(api=api, libs=libs),
            "cupy_backends.cuda.api": api,
            "cupy_backends.cuda.api.driver": driver,
            "cupy_backends.cuda.api.runtime": runtime,
            "cupy_backends.cuda.libs": libs,
            "cupy_backends.cuda.libs.nvrtc": nvrtc,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _count(self) -> int:
        if self.device_error:
            raise FakeCudaError(self.device_error)
        return 1

    def _properties(self) -> dict[str, int]:
        major, minor = self.capability
        return {
            "major": major,
            "minor": minor,
            "multiProcessorCount": 8,
            "sharedMemPerBlockOptin": 99 * 1024,
            "sharedMemPerMultiprocessor": 100 * 1024,
        }


class _Device:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _module(**content: Any) -> types.ModuleType:
    module = types.ModuleType("fake")
    vars(module).update(content)
    return module
