"""Fixtures shared by all tests: each backend in turn, the GPU only where there is one."""

from __future__ import annotations

import os

import pytest

from cupaged.errors import BackendUnavailableError
from tests.rig import Rig


def _make_gpu(name: str) -> object:
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
    return backend


@pytest.fixture(scope="session", params=["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Rig:
    """A backend with its kernels and a stream."""
    return Rig(_make_gpu(request.param))
