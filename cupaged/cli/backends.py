"""The backend that a command asks for by name."""

from __future__ import annotations

import platform
from typing import Any

import cupaged


def make_backend(name: str) -> Any:
    """``"cupy"`` or ``"emulator"``; never one in place of the other.

    Raises:
        BackendUnavailableError: it cannot run here; the message says why.
    """
    return cupaged.CupyBackend() if name == "cupy" else cupaged.EmulatorBackend()


def describe(gpu: Any) -> dict[str, Any]:
    """The device and the versions behind a measurement."""
    found: dict[str, Any] = {"backend": gpu.name, "arch": gpu.arch, "cupaged": cupaged.__version__}
    if gpu.name != "cupy":
        return {**found, "device": platform.machine()}
    import cupy

    from cupaged.backends.cupy import nvrtc

    runtime = cupy.cuda.runtime
    return {
        **found,
        "device": runtime.getDeviceProperties(gpu.device)["name"].decode(),
        "num_sms": gpu.num_sms,
        "cupy": cupy.__version__,
        "nvrtc": nvrtc.version_text(),
        "driver_cuda": runtime.driverGetVersion(),
    }
