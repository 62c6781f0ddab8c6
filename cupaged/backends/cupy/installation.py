"""What is installed here of CuPy and the driver, and the command that mends what is missing.

Nothing here imports CuPy: it is for saying why CuPy does not work.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cupaged import environment
from cupaged.errors import BackendUnavailableError

EMULATOR_HINT = "without a GPU, cupaged.EmulatorBackend runs the same kernels on the CPU"

_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_OLDEST_CUDA, _NEWEST_EXTRA = 12, 13
_DEVICE_NAME_BYTES = 256
_CAPABILITY_ATTRIBUTES = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it.

    Attributes:
        name: product name.
        capability: compute capability (major, minor).
    """

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        cuda: newest CUDA version that it supports, (major, minor), or None without a driver.
        gpus: the GPUs it shows to this process.
        problem: why there is no driver or no GPU, or an empty string.
    """

    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    problem: str


def driver() -> Driver:
    """The driver, asked directly."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Driver(None, (), f"no NVIDIA driver found ({error})")
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return Driver(None, (), "no NVIDIA driver is running (libcuda.so.1 is here)")
    cuda = cuda_version(number.value)
    if status := library.cuInit(0):
        visible = os.environ.get(environment.CUDA_VISIBLE_DEVICES.name)
        hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        return Driver(cuda, (), f"the driver shows no GPU (cuInit: error {status}{hint})")
    library.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_gpu(library, index) for index in range(number.value))
    return Driver(cuda, gpus, "" if gpus else "the driver shows no GPU")


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    name = ctypes.create_string_buffer(_DEVICE_NAME_BYTES)
    library.cuDeviceGetName(name, len(name), index)
    numbers = []
    for attribute in _CAPABILITY_ATTRIBUTES:
        number = ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, index)
        numbers.append(number.value)
    return Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1]))


def cuda_version(number: int) -> tuple[int, int]:
    """(major, minor) of a version as CUDA counts it: 12090 is 12.9."""
    return number // 1000, number % 1000 // 10


def wheels() -> tuple[tuple[str, str], ...]:
    """Installed distributions of CuPy: (name, version). More than one overwrite each other."""
    found = []
    for name in _WHEELS:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def package() -> str:
    """What pip is told to install: the checkout that this package is or came from, else its name."""
    for root in (Path(__file__).resolve().parents[3], _installed_from()):
        if root is not None and (root / "pyproject.toml").is_file():
            return "." if root == Path.cwd() else str(root)
    return "cupaged"


def _installed_from() -> Path | None:
    """The folder that ``pip install folder`` was given, as pip wrote it down."""
    try:
        text = importlib.metadata.distribution("cupaged").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = urllib.parse.urlsplit(json.loads(text)["url"] if text else "")
    return Path(urllib.parse.unquote(url.path)) if url.scheme == "file" else None


def install_command(found: Driver | None = None) -> str:
    """The command that installs a CuPy for this driver, with NVRTC.

    Args:
        found: the driver, where it is known already.
    """
    cuda = (found or driver()).cuda
    if cuda is None:
        return f"pip install '{package()}[cuda12]' (or '{package()}[cuda13]', to match the driver)"
    if cuda[0] < _OLDEST_CUDA:
        return (
            f"update the driver, which supports CUDA {cuda[0]}.{cuda[1]}, to one that supports CUDA "
            f"{_OLDEST_CUDA} or later"
        )
    return _replacing(f"pip install '{package()}[cuda{min(cuda[0], _NEWEST_EXTRA)}]'", cuda[0])


def _replacing(command: str, driver_major: int) -> str:
    """The command, after one that removes the wheels which would stay in the way."""
    fitting = f"cupy-cuda{min(driver_major, _NEWEST_EXTRA)}x"
    installed = [name for name, _ in wheels()]
    if len(installed) > 1 or any(name.startswith("cupy-cuda") and name != fitting for name in installed):
        return f"pip uninstall -y {' '.join(installed)} && {command}"
    return command


def compiler_advice() -> str | None:
    """How to get NVRTC where there is no GPU, for compiling alone; None where there is one."""
    return None if driver().gpus else f"to compile without a GPU: pip install '{package()}[nvrtc]'"


def import_problem(error: Exception, advice_without_gpu: str | None = None) -> BackendUnavailableError:
    """What to raise where CuPy or a part of it cannot be imported.

    Args:
        error: what Python said.
        advice_without_gpu: what to say in place of how to run kernels, from `compiler_advice`.
    """
    found = wheels()
    if not found:
        advice = advice_without_gpu or f"install it with: {install_command()}; {EMULATOR_HINT}"
        return BackendUnavailableError(f"CuPy is not installed ({_essence(error)}); {advice}")
    names = ", ".join(f"{name} {version}" for name, version in found)
    if len(found) > 1:
        advice = f"these overwrite each other; keep one: {clean_install()}"
    else:
        advice = f"install it anew: {clean_install()}"
    return BackendUnavailableError(
        f"CuPy cannot be imported ({_essence(error)}), though {names} is installed; {advice}; {EMULATOR_HINT}"
    )


def clean_install() -> str:
    """The command that removes every CuPy and installs the one that fits the driver."""
    names = " ".join(name for name, _ in wheels())
    return f"pip uninstall -y {names} && {install_command().split(' && ')[-1]}"


def nvrtc_problem(error: Exception, advice_without_gpu: str | None = None) -> BackendUnavailableError:
    """What to raise where NVRTC's library is missing or cannot be loaded; arguments as `import_problem`."""
    names = ", ".join(f"{name} {version}" for name, version in wheels()) or "CuPy"
    folders = "".join(
        f"; {variable} is {os.environ[variable]!r}"
        for variable in (environment.CUDA_PATH.name, environment.CUDA_HOME.name)
        if variable in os.environ
    )
    advice = advice_without_gpu or f"install it with: {install_command()}; {EMULATOR_HINT}"
    return BackendUnavailableError(
        f"NVRTC, CUDA's run-time compiler, cannot be loaded ({_essence(error)}{folders}), though {names} is "
        f"installed; {advice}"
    )


def no_device(error: Exception, runtime: ModuleType) -> BackendUnavailableError:
    """What to raise where CuPy finds no device.

    Args:
        error: what CuPy said.
        runtime: CuPy's binding of the CUDA runtime.
    """
    found = driver()
    built_for = cuda_version(runtime.runtimeGetVersion())
    if found.cuda is not None and found.cuda[0] < built_for[0]:
        names = ", ".join(f"{name} {version}" for name, version in wheels()) or "CuPy"
        return BackendUnavailableError(
            f"{names} is built for CUDA {built_for[0]}, but the driver supports CUDA {found.cuda[0]}."
            f"{found.cuda[1]} at most; mend it with: {install_command(found)} (or update the driver); "
            f"{EMULATOR_HINT}"
        )
    return BackendUnavailableError(
        f"no CUDA device can be used: {found.problem or _essence(error)}; check with: nvidia-smi; "
        f"{EMULATOR_HINT}"
    )


def _essence(error: Exception) -> str:
    """The last line of an error that says something: CuPy wraps the cause in a page of advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line.strip("=-")]
    return said[-1] if said else type(error).__name__
