"""The benchmark's device on the emulator."""

from __future__ import annotations

import pytest

from benchmarks.device import Device


@pytest.fixture(scope="package")
def device() -> Device:
    return Device.emulated()
