"""What importing the package loads, and what it offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupaged

ROOT = Path(__file__).resolve().parents[1]
LIGHT = [
    "cupaged",
    "cupaged.ops",
    "cupaged.formats",
    "cupaged.reference",
    "cupaged.registry",
    "cupaged.launch",
    "cupaged.decode",
    "cupaged.calibration",
    "cupaged.blocks",
    "cupaged.tables",
    "cupaged.kv",
    "cupaged.merge",
    "cupaged.interop",
]
# What CuPy and the compilers come with; a GPU driver or a compiler may hang, cost seconds, or not be there.
HEAVY = ("cupy", "cupy_backends", "cuda", "subprocess", "cupaged.backends.cupy", "cupaged.backends.emulator")


def fresh(code: str, **environment: str) -> str:
    """Output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_neither_cupy_nor_a_compiler(module: str) -> None:
    numpys_own = set(
        json.loads(fresh("import json, sys, numpy, ml_dtypes; print(json.dumps(list(sys.modules)))"))
    )
    loaded = set(json.loads(fresh(f"import json, sys, {module}; print(json.dumps(list(sys.modules)))")))
    assert module in loaded
    added = loaded - numpys_own
    assert not [name for name in added if name in HEAVY or name.startswith(("cupy.", "cupy_backends."))]


def test_importing_works_without_cupy() -> None:
    code = (
        "import sys; sys.modules['cupy'] = sys.modules['cupy_backends'] = None\n"
        "import cupaged, cupaged.ops, cupaged.decode, cupaged.calibration, cupaged.kv, cupaged.merge\n"
        "try:\n    cupaged.CupyBackend()\n"
        "except cupaged.BackendUnavailableError as error:\n    print(error)\n"
    )
    message = fresh(code)
    assert "CuPy" in message
    assert "pip install" in message
    assert "EmulatorBackend" in message


def test_backends_are_loaded_when_they_are_named() -> None:
    code = (
        "import sys, cupaged\n"
        "assert 'cupaged.backends.emulator' not in sys.modules\n"
        "cupaged.EmulatorBackend\n"
        "assert 'cupaged.backends.emulator' in sys.modules\n"
        "cupaged.CupyBackend\n"
        "print('cupy' in sys.modules)\n"
    )
    assert fresh(code) == "False\n"


def test_lazy_names_load_no_backend_and_no_other_library() -> None:
    code = (
        "import sys, cupaged\n"
        "assert 'cupaged.kv' not in sys.modules and 'cupaged.merge' not in sys.modules\n"
        "cupaged.KVCache, cupaged.BlockAllocator, cupaged.merge_states, cupaged.interop, cupaged.tables\n"
        "print([m for m in ('cupy', 'torch', 'jax', 'numba') if m in sys.modules])\n"
    )
    assert fresh(code) == "[]\n"


def test_every_public_name_is_there_and_documented() -> None:
    for name in cupaged.__all__:
        found = getattr(cupaged, name)
        assert name == "__version__" or found.__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'cupaged' has no attribute 'nothing'"):
        _ = cupaged.nothing


def test_errors_are_of_one_family_and_of_the_built_in_kinds() -> None:
    from cupaged import errors

    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) > 10
    assert all(issubclass(e, cupaged.CupagedError) for e in found)
    assert issubclass(cupaged.ArgumentValueError, ValueError)
    assert issubclass(cupaged.ArgumentTypeError, TypeError)
    assert issubclass(cupaged.KernelSourceError, ValueError)
    for error in (cupaged.CompileError, cupaged.LaunchError, cupaged.BackendUnavailableError):
        assert issubclass(error, RuntimeError)
