"""The GPU alone, for sweeps that would take the emulator minutes of compiling."""

from __future__ import annotations

import pytest

from tests.conftest import make_gpu
from tests.rig import Rig


@pytest.fixture(scope="session", params=[pytest.param("cupy", marks=pytest.mark.gpu)])
def gpu_rig(request: pytest.FixtureRequest) -> Rig:
    """A rig on the GPU; skipped without one."""
    return Rig(make_gpu(request.param))
