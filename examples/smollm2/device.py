"""Choose where the model runs: a GPU through CuPy, or the emulator on the CPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cupaged import BackendUnavailableError, CupyBackend, EmulatorBackend, GpuBackend

BACKENDS = ("auto", "cupy", "emulator")


@dataclass(frozen=True)
class Device:
    """A backend and the array module that goes with it.

    All work is queued on the backend's default stream, which is CuPy's current stream too unless a caller
    changes that: array arithmetic and kernel launches are in one order and need no synchronisation.

    Attributes:
        gpu: launches kernels and owns their memory.
        xp: ``cupy`` or ``numpy``, for everything but attention over the cache.
        reason: why this backend was taken, for people.
    """

    gpu: GpuBackend
    xp: Any
    reason: str


def choose_device(backend: str = "auto") -> Device:
    """The device asked for; ``"auto"`` takes a GPU when there is one and the emulator otherwise.

    Taking the emulator limits this process's BLAS library to one thread.

    Raises:
        ValueError: no such backend.
        BackendUnavailableError: the backend asked for by name cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are {', '.join(BACKENDS)}")
    if backend == "emulator":
        return _emulator("asked for")
    try:
        gpu = CupyBackend()
    except BackendUnavailableError as error:
        if backend == "cupy":
            raise
        obstacle, _, _ = str(error).partition(";")  # what follows is advice
        return _emulator(obstacle)
    return Device(
        gpu, importlib.import_module("cupy"), "asked for" if backend == "cupy" else "a GPU was found"
    )


def _emulator(reason: str) -> Device:
    # A decode step is 200 short matrix products and launches. Threads gain little in any of them and must
    # meet after each: where something else wants a core, that makes the whole several times slower.
    threadpool_limits(1, user_api="blas")
    return Device(EmulatorBackend(workers=1), np, reason)
