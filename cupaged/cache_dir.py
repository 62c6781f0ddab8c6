"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import warnings
from pathlib import Path

_lock = threading.Lock()
_temporary: tempfile.TemporaryDirectory[str] | None = None


def cache_dir() -> Path:
    """The cache folder, made if it does not exist.

    ``$CUPAGED_CACHE_DIR``, else ``$XDG_CACHE_HOME/cupaged``, else ``~/.cache/cupaged``. Where that cannot
    be written: a folder of this process alone, with one warning.
    """
    try:
        wanted = _wanted_dir()
    except RuntimeError as error:  # no home directory
        return _fallback("a home directory", str(error))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        return _fallback(str(wanted), error.strerror or str(error))


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
        _warn_once(f"cannot write {path} ({error.strerror or error}); it is compiled again next time")


def _wanted_dir() -> Path:
    if own := os.environ.get("CUPAGED_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).absolute() / "cupaged"
    return Path.home() / ".cache" / "cupaged"


def _fallback(wanted: str, reason: str) -> Path:
    global _temporary
    with _lock:
        if _temporary is None:
            _temporary = tempfile.TemporaryDirectory(prefix="cupaged-")
        folder = Path(_temporary.name)
    _warn_once(
        f"cannot write to {wanted} ({reason}): compiled kernels are kept in {folder} and lost at exit. "
        "Set CUPAGED_CACHE_DIR to a folder that can be written"
    )
    return folder


@functools.lru_cache(maxsize=16)
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
