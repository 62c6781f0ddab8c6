"""Fixtures shared by all tests: each backend in turn, the GPU only where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupaged.errors import BackendUnavailableError
from tests.rig import Rig


def _make_gpu(name: str) -> object:
    if name == "emulator":
        from cupaged.backends.emulator import EmulatorBackend

        return EmulatorBackend()
    from cupaged.backends.cupy import CupyBackend

    try:
        return CupyBackend()
    except BackendUnavailableError as error:
        pytest.skip(f"no GPU here: {error}")


@pytest.fixture(scope="session", params=["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A backend with its kernels and a stream."""
    yield Rig(_make_gpu(request.param))
