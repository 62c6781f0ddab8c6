"""The examples with other libraries' arrays run to their end, where they compare themselves with float64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.errors import BackendUnavailableError

ROOT = Path(__file__).resolve().parents[2]


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (pip install '.[interop]')")


def needs_gpu() -> None:
    from cupaged import CupyBackend

    try:
        CupyBackend()
    except BackendUnavailableError as error:
        pytest.skip(f"no GPU here: {error}")


def run(example: str) -> str:
    command = [sys.executable, "-m", f"examples.interop.{example}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_with_a_gpu(library: str) -> None:
    needs(library)
    needs_gpu()
    assert "relative error" in run(f"{library}_example")


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_with_or_without_a_gpu(library: str) -> None:
    needs(library)
    assert "relative error" in run(f"{library}_example")


@pytest.mark.parametrize("library", ["cupy", "jax", "numba", "torch"])
def test_a_missing_library_is_named_with_its_command(library: str) -> None:
    """None in sys.modules is how Python says that there is no such module."""
    module = f"examples.interop.{library}_example"
    code = f"import sys, runpy; sys.modules[{library!r}] = None; runpy.run_module({module!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert library in done.stderr
    assert "pip install '.[" in done.stderr
