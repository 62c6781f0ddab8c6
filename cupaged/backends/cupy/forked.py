"""CUDA does not survive a fork: in the child, backends of the parent refuse with a message that says so."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from cupaged.errors import BackendUnavailableError

_METHODS = ("load", "launch_packed", "empty", "zeros", "asarray", "to_host", "memset", "synchronize")

_backends: weakref.WeakSet[Any] = weakref.WeakSet()
is_child = False  # whether this process was forked from one that had a backend


def guard(backend: Any) -> None:
    """Let a backend refuse in processes that are forked from here on."""
    _backends.add(backend)


def refuse_in_child() -> None:
    """What a new backend asks first.

    Raises:
        BackendUnavailableError: this process was forked from one that had a backend.
    """
    if is_child:
        _refuse()


def _refuse(*_: object, **__: object) -> NoReturn:
    raise BackendUnavailableError(
        "this process was forked from one that uses CUDA, which CUDA does not allow. Start processes by "
        "multiprocessing's 'spawn' or 'forkserver', or fork before the first CupyBackend is made"
    )


def _in_child() -> None:
    global is_child
    backends = list(_backends)
    is_child = is_child or bool(backends)
    for backend in backends:
        for name in _METHODS:
            setattr(backend, name, _refuse)


os.register_at_fork(after_in_child=_in_child)
