"""The code of docs/decoder.md and docs/ahead.md runs and says the truth; so does the loader of the latter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import ahead
from cupaged.backends.cupy import nvrtc, prebuilt
from tests.oracle import assert_matches, attention_float64
from tests.rig import Rig
from tests.test_nvrtc import needs_nvrtc

ROOT = Path(__file__).resolve().parents[2]
LOADER = ROOT / "examples" / "ahead" / "driver_only.py"


def run_example(name: str) -> dict[str, Any]:
    """What the document's example leaves."""
    path = ROOT / "docs" / name
    found = re.search(
        r"<!-- example -->\n```python\n(.*?)```\n<!-- end example -->", path.read_text(), re.DOTALL
    )
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found[1], str(path), "exec"), names)
    return names


def test_the_decoder() -> None:
    names = run_example("decoder.md")
    cache, gpu, q = names["cache"], names["gpu"], names["q"]

    def tokens(tables: Any, lengths: Any, s: int) -> list[Any]:
        return [gpu.to_host(x) for x in cache.gather(tables[s], int(lengths[s]), stream=0)]

    prefix = tokens(names["prefix_table"], [64], 0)
    out, shared, lse = np.empty((3, 8, 64)), np.empty((3, 8, 64)), np.empty((3, 8))
    for s in range(3):
        suffix = tokens(names["suffix_tables"], names["suffix_lens"], s)
        k, v = (np.concatenate(parts) for parts in zip(prefix, suffix, strict=True))
        shared[s], _ = attention_float64(q[s], k, v, 0.125)
        k, v = tokens(names["block_tables"], names["seq_lens"], s)
        out[s], lse[s] = attention_float64(q[s], k, v, 0.125)
    for name, expected in (("out", out), ("shared", shared)):
        assert_matches(gpu.to_host(names[name]).view(ml_dtypes.bfloat16), expected)
    np.testing.assert_allclose(names["lse"], lse, atol=3e-4)


@needs_nvrtc
def test_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prebuilt, "_loaded", [])
    names = run_example("ahead.md")
    assert {kernel["arch"] for kernel in names["manifest"]["kernels"]} == {"sm_90a"}
    ahead.load(tmp_path / "kernels-for-us")
    for source in names["kernels"].sources("sm_90a"):
        assert prebuilt.find(source, "sm_90a") is not None


# A driver that runs bf16_absmax on the host, from the parameter buffer that it is given.
DRIVER = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cmath>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { *device = 3; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return device != 3; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGetAttribute(int* value, int what, int) {
  *value = what == 75 ? 9 : what == 76 ? 0 : what == 16 ? 132 : -1;
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  *address = reinterpret_cast<uint64_t>(std::aligned_alloc(256, (size + 255) / 256 * 256));
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return 0;
}
int cuModuleLoadData(void** module, const char* code) {
  *module = module;
  return std::strncmp(code, "code", 4);
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = function;
  return std::strcmp(name, "bf16_absmax");
}
int cuLaunchKernel(void*, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  const unsigned got[] = {gx, gy, gz, bx, by, bz, shared}, right[] = {1, 1, 1, 256, 1, 1, 0};
  if (std::memcmp(got, right, sizeof(got)) || stream || params) return 1;
  const char* buffer = static_cast<const char*>(extra[1]);
  if (*static_cast<size_t*>(extra[3]) != 20 || extra[4]) return 2;
  const uint16_t* data;
  float* out;
  uint32_t count;
  std::memcpy(&data, buffer, 8);
  std::memcpy(&out, buffer + 8, 8);
  std::memcpy(&count, buffer + 16, 4);
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t bits = static_cast<uint32_t>(data[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    *out = std::fmax(*out, std::fabs(value));
  }
  return 0;
}
}
"""


def saved(folder: Path, arch: str) -> Path:
    ahead.KernelSet().add_kernel("bf16_absmax", "bf16_absmax").save(folder, [arch])
    return folder


def run_loader(folder: Path, **environment: str) -> str:
    """In a process that cannot import the package, CuPy or NumPy."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", LOADER, folder],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loader_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setattr(nvrtc, "version_text", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, target: b"code")
    folder = saved(tmp_path / "set", "sm_90a")
    assert run_loader(folder, LD_LIBRARY_PATH=str(tmp_path)) == "largest magnitude: 7.5\n"


@pytest.mark.gpu
def test_a_loader_without_the_package_on_a_gpu(rig: Rig, tmp_path: Path) -> None:
    if rig.name != "cupy":
        pytest.skip("needs a GPU")
    assert run_loader(saved(tmp_path, rig.gpu.arch)) == "largest magnitude: 7.5\n"
