"""Fixtures shared by all tests: each backend in turn, the GPU only where there is one."""

from __future__ import annotations

import importlib.util
import os

import pytest

from cupaged.errors import BackendUnavailableError
from tests.rig import Rig

# The example model needs a reader of its files, which a bare GPU machine may lack; said in the header.
_WITH_MODEL = [
    "cli/test_demo.py",
    *(f"examples/test_smollm2{part}.py" for part in ("", "_evaluate", "_parts")),
]
collect_ignore = [] if importlib.util.find_spec("gguf") else _WITH_MODEL


def pytest_report_header() -> str | None:
    """What is left out."""
    return f"no gguf: left out are {', '.join(collect_ignore)}" if collect_ignore else None


def make_gpu(name: str) -> object:
    if name == "emulator":
        from cupaged.backends.emulator import EmulatorBackend

        return EmulatorBackend()
    from cupaged.backends.cupy import CupyBackend

    try:
        backend = CupyBackend()
    except BackendUnavailableError as error:
        pytest.skip(f"no GPU here: {error}")
    if os.environ.get("CUPAGED_TEST_NO_POOL"):  # a memory checker then sees where each array ends
        import cupy

        cupy.cuda.set_allocator(None)
    if os.environ.get("CUPAGED_TEST_EVERY_LANE_ARRIVES"):  # see kernels/ring/pipeline.cuh
        from cupaged.backends.cupy import nvrtc

        nvrtc._FIXED_OPTIONS = (*nvrtc._FIXED_OPTIONS, "-DRING_EVERY_LANE_ARRIVES")
    return backend


@pytest.fixture(scope="session", params=["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Rig:
    """A backend with its kernels and a stream."""
    return Rig(make_gpu(request.param))
