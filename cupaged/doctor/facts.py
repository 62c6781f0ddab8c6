"""What there is on this machine that matters to cupaged, as plain values."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import warnings
from typing import Any

import numpy as np

import cupaged
from cupaged import cache, cache_dir
from cupaged.backends.cupy import installation, nvrtc
from cupaged.backends.emulator.compiler import find_compiler
from cupaged.environment import read_by
from cupaged.errors import BackendUnavailableError, KernelSourceError
from cupaged.source import kernels_dir


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing that was looked for.

    Attributes:
        found: what it is, or an empty string.
        problem: what is wrong with it and how to mend it, or an empty string.
    """

    found: str
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class GpuFact:
    """A GPU.

    Attributes:
        name: product name.
        capability: compute capability, as ``9.0``.
        target: what kernels are compiled for, as ``sm_90a``; empty where that cannot be said.
        problem: why not.
    """

    name: str
    capability: str
    target: str
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything about the surroundings.

    Attributes:
        versions: of Python and of the packages that are always needed.
        cupy: version, wheel and the CUDA it was built for.
        nvrtc: version.
        driver: the newest CUDA that the driver supports.
        gpus: in the driver's order.
        kernels: folder of the CUDA sources.
        compiler: the C++ compiler of the emulator.
        cache: folder, number of entries, size and cap.
        environment: variables that matter; None where one is not set.
    """

    versions: dict[str, str]
    cupy: Fact
    nvrtc: Fact
    driver: Fact
    gpus: tuple[GpuFact, ...]
    kernels: Fact
    compiler: Fact
    cache: dict[str, Any]
    environment: dict[str, str | None]


def collect() -> Facts:
    """Look at everything; nothing that is missing raises."""
    driver = installation.driver()
    return Facts(
        versions={
            "cupaged": cupaged.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": importlib.metadata.version("ml_dtypes"),
            "system": f"{platform.system()} {platform.machine()}",
        },
        cupy=_cupy(),
        nvrtc=_nvrtc(),
        driver=_driver(driver),
        gpus=tuple(_gpu(gpu) for gpu in driver.gpus),
        kernels=_kernels(),
        compiler=_compiler(),
        cache=_cache(),
        environment={v.name: os.environ.get(v.name) for v in read_by("package", "CUDA")},
    )


def _driver(driver: installation.Driver) -> Fact:
    found = "" if driver.cuda is None else f"CUDA {'.'.join(map(str, driver.cuda))}"
    return Fact(found, driver.problem)


def _cupy() -> Fact:
    wheels = ", ".join(f"{name} {version}" for name, version in installation.wheels())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy warns of is said below
            import cupy
        from cupy_backends.cuda.api import runtime

        built_for = ".".join(map(str, installation.cuda_version(runtime.runtimeGetVersion())))
    except Exception as error:  # a damaged installation fails in any way
        return Fact(wheels, str(installation.import_problem(error)))
    problem = "" if len(installation.wheels()) < 2 else "more than one CuPy is installed; keep one: "
    return Fact(
        f"{cupy.__version__} ({wheels or 'no wheel'}), built for CUDA {built_for}",
        problem and problem + installation.clean_install(),
    )


def _nvrtc() -> Fact:
    try:
        return Fact(f"{nvrtc.version_text()}, up to compute capability {_capability(_archs()[-1])}")
    except BackendUnavailableError as error:
        return Fact("", str(error) if installation.wheels() else "not available without CuPy")


@functools.cache
def _archs() -> tuple[int, ...]:
    return nvrtc.supported_archs()


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _gpu(gpu: installation.Gpu) -> GpuFact:
    capability = ".".join(map(str, gpu.capability))
    try:
        return GpuFact(gpu.name, capability, nvrtc.choose_target(gpu.capability, _archs()).arch)
    except BackendUnavailableError as error:
        return GpuFact(gpu.name, capability, "", str(error))


def _kernels() -> Fact:
    try:
        return Fact(str(kernels_dir()))
    except KernelSourceError as error:
        return Fact("", f"{error}; install it anew: pip install --force-reinstall cupaged")


def _compiler() -> Fact:
    try:
        compiler = find_compiler()
        command = " ".join(compiler.command)
        version = compiler.identity.splitlines()[1:2]
    except BackendUnavailableError as error:
        return Fact("", str(error))
    return Fact(f"{command}: {version[0] if version else 'says no version'}")


def _cache() -> dict[str, Any]:
    place = cache_dir.place()
    entries = [] if place.path is None else cache.entries(place.path)
    return {
        "folder": None if place.path is None else str(place.path),
        "writable": not place.problem,
        "problem": place.problem,
        "num_entries": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "max_bytes": cache.max_bytes(),
    }
