from __future__ import annotations

from pathlib import Path

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
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
