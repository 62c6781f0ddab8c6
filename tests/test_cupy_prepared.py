"""Launches that the GPU backend keeps ready: what the driver reads at each of them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest

from cupaged.backends.cupy import CupyKernel, extended_launch, forked, nvtx
from cupaged.errors import BackendUnavailableError, LaunchError
from cupaged.registry import limits_of_capability
from tests.test_cupy_launch import (  # noqa: F401
    BLOCK,
    GRID,
    SHARED,
    SOURCE,
    STREAM,
    Devices,
    configuration,
    devices,
    gpu,
)

PARAMETERS, OFFSETS = bytes(range(24)), (0, 8, 16, 20)


class Driver:
    """``cuLaunchKernelEx``, which notes what it reads.

    Attributes:
        seen: (device, configuration, function, the parameters from each pointer on).
        status: what it returns.
    """

    def __init__(self, devices: Devices) -> None:  # noqa: F811
        self.devices = devices
        self.seen: list[tuple[Any, ...]] = []
        self.status = 0

    def __call__(self, config: Any, function: int, pointers: Any, extra: None) -> int:
        found = (ctypes.c_void_p * len(OFFSETS)).from_address(pointers.value)
        ends = (*OFFSETS[1:], len(PARAMETERS))
        read = [
            ctypes.string_at(at or 0, end - start)
            for at, start, end in zip(found, OFFSETS, ends, strict=True)
        ]
        self.seen.append((self.devices.current, configuration(config.value), function, read))
        return self.status


@pytest.fixture
def driver(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Driver:  # noqa: F811
    found = Driver(devices)
    monkeypatch.setattr(extended_launch, "_launch_function", lambda: found)
    return found


def prepare(gpu: Any, shared_mem: int = SHARED, **how: bool) -> Callable[[], None]:  # noqa: F811
    kernel = CupyKernel(SOURCE, 99, 8192)
    launch: Callable[[], None] = gpu.prepare(
        kernel, GRID, BLOCK, shared_mem, PARAMETERS, OFFSETS, STREAM, {}, **how
    )
    return launch


def expected(attributes: list[tuple[int, int]], device: int = 0) -> tuple[Any, ...]:
    read = [PARAMETERS[:8], PARAMETERS[8:16], PARAMETERS[16:20], PARAMETERS[20:]]
    return device, (GRID, BLOCK, SHARED, STREAM, attributes), 99, read


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("cooperative", [False, True])
def test_the_driver_reads_the_same_each_time(
    gpu: Any,  # noqa: F811
    driver: Driver,
    overlapping: bool,
    cooperative: bool,
) -> None:
    launch = prepare(gpu, overlapping=overlapping, cooperative=cooperative)
    for _ in range(100):  # what it made may use memory that was let go
        prepare(gpu, cooperative=not cooperative)
    gc.collect()
    for _ in range(2):
        launch()
    attributes = [(6, 1)] * overlapping + [(2, 1)] * cooperative
    assert driver.seen == [expected(attributes)] * 2


def test_a_kernel_without_parameters(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(extended_launch, "_launch_function", lambda: lambda *x: calls.append(x) or 0)
    gpu.prepare(CupyKernel(SOURCE, 99, 8192), GRID, BLOCK, SHARED, b"", (), STREAM, {})()
    assert len(calls) == 1


def test_older_gpus_do_not_overlap(gpu: Any, driver: Driver) -> None:  # noqa: F811
    gpu._limits = limits_of_capability(80, 108)
    prepare(gpu, overlapping=True)()
    assert driver.seen == [expected([])]


def test_the_backends_device_is_made_current_and_the_callers_put_back(
    gpu: Any,  # noqa: F811
    devices: Devices,  # noqa: F811
    driver: Driver,
) -> None:
    launch = prepare(gpu)
    devices.current = 3
    launch()
    driver.status = 1
    with pytest.raises(LaunchError, match=r"bf16_absmax: the driver refused grid \(5, 6, 7\).*CUDA error 1"):
        launch()
    assert driver.seen == [expected([])] * 2
    assert devices.current == 3
    driver.status = 0
    devices.current = 0
    launch()
    assert devices.current == 0


def test_more_shared_memory_than_was_asked_for_is_not_prepared(gpu: Any, driver: Driver) -> None:  # noqa: F811
    assert prepare(gpu, shared_mem=8193) is None
    assert prepare(gpu, shared_mem=8192) is not None


def test_a_forked_child_is_refused(gpu: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    launch = prepare(gpu)
    monkeypatch.setattr(forked, "is_child", True)
    with pytest.raises(BackendUnavailableError, match="forked from one that uses CUDA"):
        launch()
    assert driver.seen == []


def test_marked_launches_are_not_prepared(gpu: Any, driver: Driver) -> None:  # noqa: F811
    pytest.importorskip("cupy.cuda.nvtx")
    assert prepare(gpu) is not None
    nvtx.mark_launches(gpu)
    assert prepare(gpu) is None
