from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupaged.backends.emulator import EmulatorBackend


@pytest.fixture(params=["fifo", "reverse", "random"])
def gpu(request: pytest.FixtureRequest) -> EmulatorBackend:
    """The emulator under every schedule."""
    return EmulatorBackend(schedule=request.param, seed=7)


@pytest.fixture
def fifo() -> EmulatorBackend:
    return EmulatorBackend()


@pytest.fixture
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """An empty cache folder."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
