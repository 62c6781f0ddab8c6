"""What the GPU backend hands to the driver, with stand-ins for the driver and the runtime."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.backends.cupy import CupyBackend, CupyKernel, extended_launch
from cupaged.errors import ArgumentValueError, LaunchError
from cupaged.registry import limits_of_capability
from cupaged.source import KernelSource, kernels_dir

GRID, BLOCK, SHARED, PARAMS, STREAM = (5, 6, 7), (32, 2, 3), 4096, 1 << 40, (1 << 47) + 8
SOURCE = KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ())


class DriverError(RuntimeError):
    """CuPy's CUDADriverError."""


class Devices:
    """The runtime's current device, and what the driver was asked on it.

    Attributes:
        current: device index.
        calls: (device, function's name, arguments).
        error: what a launch raises.
    """

    def __init__(self) -> None:
        self.current = 0
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.error: Exception | None = None

    def record(self, name: str) -> Any:
        def called(*arguments: Any) -> None:
            self.calls.append((self.current, name, arguments))
            if self.error is not None:
                raise self.error

        return called

    def set_device(self, device: int) -> None:
        self.current = device


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def gpu(devices: Devices) -> Any:
    """A backend that was never given a device."""
    backend = object.__new__(CupyBackend)
    backend.device = 0
    backend._limits = limits_of_capability(90, 132)
    backend._runtime = SimpleNamespace(getDevice=lambda: devices.current, setDevice=devices.set_device)
    names = ("launchKernel", "launchCooperativeKernel", "funcSetAttribute")
    backend._driver = SimpleNamespace(
        CUDADriverError=DriverError,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        **{name: devices.record(name) for name in names},
    )
    return backend


def launch(gpu: Any, shared_mem: int = SHARED, **how: bool) -> None:
    gpu.launch_packed(CupyKernel(SOURCE, 99, 8192), GRID, BLOCK, shared_mem, PARAMS, STREAM, {}, **how)


def test_plain_and_cooperative_launches(gpu: Any, devices: Devices) -> None:
    launch(gpu)
    launch(gpu, cooperative=True)
    common = (99, *GRID, *BLOCK, SHARED, STREAM, PARAMS)
    assert devices.calls == [(0, "launchKernel", (*common, 0)), (0, "launchCooperativeKernel", common)]


def test_the_backends_device_is_made_current_and_the_callers_put_back(gpu: Any, devices: Devices) -> None:
    devices.current = 3
    launch(gpu)
    devices.error = DriverError("CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(LaunchError, match=r"bf16_absmax: the driver refused grid \(5, 6, 7\), block \(32, 2"):
        launch(gpu)
    assert [device for device, _, _ in devices.calls] == [0, 0]
    assert devices.current == 3


def test_more_shared_memory_is_asked_for_once(gpu: Any, devices: Devices) -> None:
    kernel = CupyKernel(SOURCE, 99, 8192)
    for _ in range(2):
        gpu.launch_packed(kernel, GRID, BLOCK, 10_000, PARAMS, STREAM, {})
    assert [name for _, name, _ in devices.calls] == ["funcSetAttribute", "launchKernel", "launchKernel"]
    assert devices.calls[0][2] == (99, 8, 10_000)
    with pytest.raises(ArgumentValueError, match="shared_mem is 300000 bytes, this GPU allows 232448"):
        launch(gpu, shared_mem=300_000)


def configuration(address: int) -> tuple[Any, ...]:
    """What CUlaunchConfig says."""
    given = extended_launch.Config.from_address(address)
    attributes = [(a.id, a.value) for a in given.attributes[: given.num_attributes]]
    return tuple(given.grid), tuple(given.block), given.shared_mem, given.stream, attributes


@pytest.mark.parametrize("cooperative", [False, True])
def test_overlapping_launches(
    gpu: Any, devices: Devices, monkeypatch: pytest.MonkeyPatch, cooperative: bool
) -> None:
    """The bytes of CUlaunchConfig as the driver reads them."""
    seen: list[tuple[Any, ...]] = []

    def launch_kernel_ex(config: int, function: int, params: int, extra: None) -> int:
        seen.append((*configuration(config), function, params))
        return 0 if len(seen) == 1 else 1

    monkeypatch.setattr(extended_launch, "_launch_function", lambda: launch_kernel_ex)
    launch(gpu, cooperative=cooperative, overlapping=True)
    attributes = [(6, 1), (2, 1)] if cooperative else [(6, 1)]
    assert seen == [(GRID, BLOCK, SHARED, STREAM, attributes, 99, PARAMS)]
    with pytest.raises(LaunchError, match=r"bf16_absmax: the driver refused grid \(5, 6, 7\).*CUDA error 1"):
        launch(gpu, cooperative=cooperative, overlapping=True)
    assert devices.calls == []


def test_older_gpus_do_not_overlap(gpu: Any, devices: Devices) -> None:
    gpu._limits = limits_of_capability(80, 108)
    launch(gpu, overlapping=True, cooperative=True)
    assert [name for _, name, _ in devices.calls] == ["launchCooperativeKernel"]


def test_the_configuration_is_laid_out_as_the_driver_has_it() -> None:
    """Offsets of CUlaunchConfig in cuda.h, on 64-bit systems."""
    config = extended_launch.Config
    offsets = {name: getattr(config, name).offset for name, _ in config._fields_}
    assert offsets == {
        "grid": 0,
        "block": 12,
        "shared_mem": 24,
        "stream": 32,
        "attributes": 40,
        "num_attributes": 48,
    }
    assert ctypes.sizeof(config) == 56
    assert ctypes.sizeof(extended_launch._Attribute) == 72
