"""CuPy's stream objects of raw handles that somebody else owns."""

from __future__ import annotations

from typing import Any


class _Handle:
    """A raw handle as the CUDA stream protocol has it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def stream_of(handle: int, device: int = -1) -> Any:
    """A CuPy stream over a raw handle, which must outlive it.

    Args:
        handle: address of the stream.
        device: ordinal of the stream's device, or -1 where it is the current one.
    """
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14.1 and later, where ExternalStream warns
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)
