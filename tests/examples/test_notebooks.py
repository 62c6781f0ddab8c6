"""Each notebook runs from its first cell to its last, at a small size; streaming's is in tests/streaming."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.errors import BackendUnavailableError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
ROOT = NOTEBOOKS.parents[1]
NAMES = ("quickstart", "formats", "own_kernel", "other_libraries", "cuda_graphs")
CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)


@pytest.fixture(params=["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cupy":
        from cupaged import CupyBackend

        try:
            CupyBackend()
        except BackendUnavailableError as error:
            pytest.skip(f"no GPU here: {error}")
    return str(request.param)


def run(name: str, backend: str, pictures: Path) -> str:
    """The notebook's output; where it runs is said by which GPUs it may see."""
    environment = os.environ | {
        "CUPAGED_NOTEBOOK_TOKENS": "8",
        "CUPAGED_NOTEBOOK_PICTURES": str(pictures),
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
    }
    if backend == "emulator":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        env=environment,
        cwd=NOTEBOOKS,  # as Jupyter starts it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def test_quickstart(backend: str, tmp_path: Path) -> None:
    output = run("quickstart", backend, tmp_path)
    assert f"backend: {backend}" in output
    assert output.count("relative error") == 4
    assert "ArgumentValueError: q: got shape (2, 7, 64)" in output


def test_formats(backend: str, tmp_path: Path) -> None:
    output = run("formats", backend, tmp_path)
    assert f"backend: {backend}" in output
    assert (
        len(re.findall(r"^(?:bf16|fp8|nvfp4) +(?:K|V|out) .*layer \d+, head \d+$", output, re.MULTILINE)) == 9
    )
    with_model = "made up" not in output
    assert len(re.findall(r"^(?:bf16|fp8|nvfp4) .* \d\.\d{5} +\d+%$", output, re.MULTILINE)) == 3 * with_model
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    if has("matplotlib"):
        assert drawn == {"formats_errors.svg", *(["formats_tradeoff.svg"] * with_model)}
    else:
        assert "no pictures" in output


def test_own_kernel(backend: str, tmp_path: Path) -> None:
    output = run("own_kernel", backend, tmp_path)
    assert f"{backend}: largest error" in output
    assert "DataRaceFault: paged_scores" in output
    assert "with the barrier: no fault" in output
    assert "OutOfBoundsFault: paged_scores" in output


def test_other_libraries(backend: str, tmp_path: Path) -> None:
    output = run("other_libraries", backend, tmp_path)
    for library, title in (("jax", "JAX"), ("numba", "Numba")):
        if has(library):
            assert f"{title} on {backend}: relative error" in output or "no GPU support" in output
        else:
            assert f"{library} is not installed" in output


def test_cuda_graphs(backend: str, tmp_path: Path) -> None:
    output = run("cuda_graphs", backend, tmp_path)
    assert f"backend: {backend}" in output
    assert len(re.findall(r"^lengths .*, right$", output, re.MULTILINE)) == 3
    assert ("captured one decode step" in output) == (backend == "cupy")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_paired_notebook_of_text_and_code(name: str) -> None:
    text = (NOTEBOOKS / f"{name}.py").read_text()
    header, *rest = CELL.split(text)
    assert "formats: py:percent" in header
    cells = list(zip(rest[::2], rest[1::2], strict=True))
    prose = [body for kind, body in cells if kind == " [markdown]"]
    assert len(prose) >= 5
    assert re.match(r"\n# # \S", prose[0]), "it begins with a title"
    for body in prose:
        assert all(line.startswith("#") or not line for line in body.splitlines())


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.py")} == {*NAMES, "streaming"}
