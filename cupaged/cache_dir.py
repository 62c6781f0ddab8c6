"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import functools
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from cupaged import environment
from cupaged.errors import BackendUnavailableError

DIR_VARIABLE = environment.CACHE_DIR.name

_lock = threading.Lock()
_temporary: tempfile.TemporaryDirectory[str] | None = None


@dataclass(frozen=True)
class Place:
    """The cache folder asked for.

    Attributes:
        path: the folder, or None where there is no home directory to have it in.
        problem: why it cannot be written, or an empty string.
    """

    path: Path | None
    problem: str


def place() -> Place:
    """The cache folder that the environment asks for, made if it does not exist.

    ``$CUPAGED_CACHE_DIR``, else ``$XDG_CACHE_HOME/cupaged``, else ``~/.cache/cupaged``.
    """
    try:
        wanted = _wanted_dir()
    except RuntimeError as error:  # no home directory
        return Place(None, str(error))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return Place(wanted, "")
    except OSError as error:
        return Place(wanted, error.strerror or str(error))


def cache_dir() -> Path:
    """The folder of `place`; where that cannot be written, one of this process alone, with one warning.

    Raises:
        BackendUnavailableError: no folder at all can be written; the message says what to set.
    """
    asked = place()
    if asked.path is not None and not asked.problem:
        return asked.path
    return _fallback("a home directory" if asked.path is None else str(asked.path), asked.problem)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or none; makes its folders.

    The cache is a convenience: a failure to write gives one warning and is no error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.close()
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        warn_once(f"cannot write {path} ({error.strerror or error}); it is compiled again next time")


def _wanted_dir() -> Path:
    if own := environment.CACHE_DIR.get():
        return Path(own).expanduser().absolute()
    if xdg := environment.XDG_CACHE_HOME.get():
        return Path(xdg).absolute() / "cupaged"
    return Path.home() / ".cache" / "cupaged"


def _fallback(wanted: str, reason: str) -> Path:
    global _temporary
    with _lock:
        if _temporary is None:
            try:
                _temporary = tempfile.TemporaryDirectory(prefix="cupaged-")
            except OSError as error:
                raise BackendUnavailableError(
                    f"no folder for compiled kernels: cannot write to {wanted} ({reason}), nor to a "
                    f"temporary folder ({error.strerror or error}). Name one that can be written: "
                    f"export {DIR_VARIABLE}=/some/folder"
                ) from error
        folder = Path(_temporary.name)
    warn_once(
        f"cannot write to {wanted} ({reason}): compiled kernels are kept in {folder} and lost at exit. "
        f"Name a folder that can be written: export {DIR_VARIABLE}=/some/folder"
    )
    return folder


@functools.lru_cache(maxsize=16)
def warn_once(message: str) -> None:
    """Warn, once for each message."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
