"""The streaming benchmark's own logic, at a small size on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import streaming
from cupaged.backends.emulator import EmulatorBackend
from cupaged.formats import FORMATS, CacheFormat
from cupaged.streaming.device import HostDevice


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PERIOD_TOKENS", 64)
    monkeypatch.setattr(streaming, "TILE_BYTES", 1 << 18)
    monkeypatch.setattr(streaming, "LINK_PIECES", (1 << 16,))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_rows(fmt: CacheFormat, tmp_path: Path) -> None:
    gpu: Any = EmulatorBackend()
    period = streaming.Period(gpu, fmt)
    memory = HostDevice().pinned(4 * period.records.nbytes)
    link = streaming.link_bandwidth(gpu, memory)
    assert link > 0
    row = streaming.from_pinned(gpu, 0, memory, period, 256, link, 2, 1 << 18)
    assert row["relative_error"] < 5e-3
    assert row["bytes"] == memory.size
    assert row["kv_tokens_per_s"] == pytest.approx(256 / row["seconds"])
    assert sum(tile["bytes"] for tile in row["timeline"]) == row["bytes"]
    files = streaming.from_file(gpu, 0, tmp_path, period, 3 * period.records.nbytes)
    assert [found["io"] for found in files] == ["mmap", "read", "direct"]
    for found in files:
        assert found["relative_error"] < 5e-3
        assert found["bytes"] == 3 * period.records.nbytes
        assert streaming.show(found)
    assert "pinned" in streaming.show(row)


def test_the_share_of_computing_that_is_hidden() -> None:
    def tile(*times: float) -> dict[str, float]:
        return dict(zip(("copy_begin", "copy_end", "step_begin", "step_end"), times, strict=True))

    assert streaming.hidden_share([tile(0, 1, 1, 2), tile(1, 2, 2, 3)]) == 0.5
    assert streaming.hidden_share(
        [tile(0, 1, 1.0, 1.2), tile(1, 2, 2, 2.2), tile(2, 3, 3, 3.2)]
    ) == pytest.approx(2 / 3)
    assert streaming.hidden_share([]) == 0.0
