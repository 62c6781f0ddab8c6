"""Raw handles of streams, as every backend takes them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError

_MAX_HANDLE = 2**64 - 1


def handle_of(stream: Any, allowed: str, own: Any = None) -> int:
    """Handle of an int, of an object with ``__cuda_stream__``, or of one that knows its own.

    Args:
        stream: as a caller gave it.
        allowed: the kinds that the backend takes, for the message.
        own: the handle by which an object of the backend's own kind says what it is, if it has one.

    Raises:
        ArgumentTypeError: none of these.
        ArgumentValueError: a number that is no handle.
    """
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return _in_range(int(stream))
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return _in_range(_by_protocol(stream, protocol() if callable(protocol) else protocol))
    if isinstance(own, int) and not isinstance(own, bool):
        return _in_range(own)
    raise ArgumentTypeError(
        f"stream: got {type(stream).__name__}, allowed: {allowed}; a stream is always given "
        "(gpu.null_stream() is the default one)"
    )


def _by_protocol(stream: Any, given: Any) -> int:
    try:
        _, handle = map(operator.index, given)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"stream: got {type(stream).__name__} whose __cuda_stream__ gives {given!r}, allowed is a pair "
            "of integers, version and handle"
        ) from None
    return handle


def _in_range(handle: int) -> int:
    if not 0 <= handle <= _MAX_HANDLE:
        raise ArgumentValueError(f"stream: got {handle}, a handle is 0 to 2^64 - 1")
    return handle
