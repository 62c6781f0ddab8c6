"""``CUPAGED_NVTX``: each launch is a range of its kernel's name; without it nothing is touched."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from cupaged.backends import cupy as cupy_backend
from cupaged.backends.cupy import CupyBackend, CupyKernel, nvtx
from cupaged.errors import BackendUnavailableError
from cupaged.source import KernelSource, kernels_dir
from tests.surroundings import FakeCuda

KERNEL = CupyKernel(KernelSource(kernels_dir() / "bf16_absmax.cu", "bf16_absmax", ()), 1, 0)
LAUNCH: tuple[Any, ...] = ((1, 1, 1), (32, 1, 1), 0, 0, 7, {})


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What happens on a GPU that is not there: ranges and launches, in order."""
    found: list[object] = []
    FakeCuda().install(monkeypatch)
    ranges = types.ModuleType("cupy.cuda.nvtx")
    ranges.RangePush = lambda name: found.append(("push", name))  # type: ignore[attr-defined]
    ranges.RangePop = lambda: found.append("pop")  # type: ignore[attr-defined]
    import cupy

    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", ranges)
    monkeypatch.setattr(cupy.cuda, "nvtx", ranges, raising=False)

    def launched(self: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        found.append(("launch", arguments, options))
        if options.get("cooperative"):
            raise ValueError("refused")

    monkeypatch.setattr(CupyBackend, "launch_packed", launched)
    return found


def test_without_it_nothing_is_wrapped(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPAGED_NVTX", raising=False)
    gpu = CupyBackend()
    assert "launch_packed" not in vars(gpu)
    gpu.launch_packed(KERNEL, *LAUNCH)
    assert events == [("launch", LAUNCH, {})]


def test_each_launch_is_a_range(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_NVTX", "1")
    CupyBackend().launch_packed(KERNEL, *LAUNCH, overlapping=True)
    assert events == [("push", "bf16_absmax"), ("launch", LAUNCH, {"overlapping": True}), "pop"]


def test_a_launch_that_fails_ends_its_range(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_NVTX", "1")
    with pytest.raises(ValueError, match="refused"):
        CupyBackend().launch_packed(KERNEL, *LAUNCH, cooperative=True)
    assert events[-1] == "pop"


def test_no_nvtx_is_said(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", None)
    import cupy

    monkeypatch.delattr(cupy.cuda, "nvtx")
    with pytest.raises(BackendUnavailableError, match=r"CUPAGED_NVTX is set, but .*unset it"):
        nvtx.mark_launches(CupyBackend())


def test_zero_is_off(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_NVTX", "0")
    assert "launch_packed" not in vars(cupy_backend.CupyBackend())
