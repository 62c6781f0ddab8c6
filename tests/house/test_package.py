"""What the package is made of: metadata, what importing it loads, and what the archives carry."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cupaged
from tools import check_dist
from tools.import_graph import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
MOST_MODULES = 30  # of the package; each is a file to find, read and run: about a millisecond
SLOW = (
    "subprocess",
    "asyncio",
    "email",
    "http",
    "json",
    "argparse",
    "logging",
    "unittest",
    "multiprocessing",
)

IMPORTED = """
import json, sys
import numpy, ml_dtypes
kept = set(sys.modules) - {"json"}
import cupaged
print(json.dumps(sorted(set(sys.modules) - kept)))
"""


def test_import_adds_little_to_numpy_and_ml_dtypes() -> None:
    out = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    added = json.loads(out)
    own = [name for name in added if name.split(".")[0] == "cupaged"]
    others = {name.split(".")[0] for name in added} - {"cupaged", "numpy", "json"}
    assert others <= sys.stdlib_module_names, "a third package is imported"
    assert not [name for name in added if name in SLOW and name != "json"]
    assert 5 < len(own) <= MOST_MODULES, own


def test_the_version_is_in_one_place() -> None:
    assert re.search(r'^path = "cupaged/version.py"$', PYPROJECT, re.MULTILINE)
    version = re.escape(cupaged.__version__)
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in (*(ROOT / "cupaged").rglob("*.py"), ROOT / "pyproject.toml")
        if re.search(rf'version__? = "{version}"', path.read_text())
    ]
    assert holders == ["cupaged/version.py"]


def test_the_package_is_typed_and_has_a_command() -> None:
    assert (ROOT / "cupaged" / "py.typed").exists()
    assert 'cupaged = "cupaged.cli:main"' in PYPROJECT


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "cli", "bench", "demo", "dev", "docs", "notebook"])
def test_the_extras_that_messages_name(extra: str) -> None:
    assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE)


def test_the_base_install_is_numpy_and_ml_dtypes() -> None:
    assert [item.split("=")[0] for item in check_dist.oldest(PYPROJECT)] == ["numpy", "ml_dtypes"]


def wheel_of(path: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "")
    return path


def test_a_wheel_without_a_source_is_refused(tmp_path: Path) -> None:
    names = {check_dist.in_wheel(path) for path in check_dist.expected()}
    for name in ("cupaged/py.typed", "cupaged/_cuda/ptx.cuh", "cupaged/backends/emulator/runtime/all.cpp"):
        assert name in names
        assert check_dist.problems(wheel_of(tmp_path / "x.whl", names - {name})) == [f"x.whl lacks {name}"]
    assert check_dist.problems(wheel_of(tmp_path / "x.whl", names)) == []
    odd = names | {"cupaged/__pycache__/x.pyc"}
    assert check_dist.problems(wheel_of(tmp_path / "x.whl", odd)) == ["x.whl has cupaged/__pycache__/x.pyc"]


def test_every_folder_of_kernels_has_a_source_to_carry() -> None:
    carried = {Path(path).parent.as_posix() for path in check_dist.expected() if path.startswith("kernels")}
    assert carried >= {"kernels", "kernels/ring", "kernels/attention", "kernels/cache", "kernels/numeric"}
