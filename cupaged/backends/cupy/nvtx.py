"""NVTX ranges around launches, so that a profiler's timeline shows which call queued which kernel."""

from __future__ import annotations

import functools
from typing import Any

from cupaged.errors import BackendUnavailableError


def mark_launches(backend: Any) -> None:
    """Wrap a backend's launches, each in a range named as its kernel. Backends not given cost nothing.

    Args:
        backend: with ``launch_packed`` and ``prepare``, which are replaced on this object alone.

    Raises:
        BackendUnavailableError: CuPy has no NVTX here.
    """
    try:
        from cupy.cuda import nvtx
    except ImportError as error:
        raise BackendUnavailableError(
            f"CUPAGED_NVTX is set, but CuPy's NVTX cannot be loaded ({error}); unset it"
        ) from error
    launch = backend.launch_packed

    @functools.wraps(launch)
    def marked(kernel: Any, *arguments: Any, **options: Any) -> None:
        nvtx.RangePush(kernel.source.entry)
        try:
            launch(kernel, *arguments, **options)
        finally:
            nvtx.RangePop()

    backend.launch_packed = marked
    backend.prepare = lambda *_, **__: None  # so that each launch comes here
