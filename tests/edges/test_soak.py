"""The soak at a small size, and that it sees what grows."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from benchmarks import soak
from tests.rig import Rig


@pytest.mark.big
def test_memory_stays_where_it_is(rig: Rig) -> None:
    found = soak.run(rig.gpu, launches=480, decoders=80)
    assert found["launches"]["count"] >= 480
    assert found["decoders"]["count"] >= 80
    assert found["flat"], found


@pytest.mark.big
@pytest.mark.parametrize("where", ["host", "device"])
def test_what_grows_is_seen(monkeypatch: pytest.MonkeyPatch, rig: Rig, where: str) -> None:
    kept: list[Any] = []

    def grow(_: int) -> None:
        # Pages of their own: an allocation may be served from what the process has freed before.
        kept.append(mmap.mmap(-1, 1 << 20) if where == "host" else None)
        if where == "host":
            kept[-1].write(b"x" * (1 << 20))

    if where == "device":
        monkeypatch.setattr(soak, "device_bytes", lambda gpu: 1000 + len(kept))
    found = soak.soak(rig.gpu, 80, grow)
    assert not soak.is_flat(found)
    assert found[f"{where}_growth"] > 0
