"""The kernel of docs/howto_kernel.md: right on every backend, and its bug."""

from __future__ import annotations

import re

import pytest

from cupaged import EmulatorBackend
from cupaged.backends.cupy import nvrtc
from cupaged.errors import BackendUnavailableError, DataRaceFault
from cupaged.source import KernelSource, read_parameters
from examples.own_kernel import run
from tests.rig import Rig
from tests.surroundings import ROOT

HOWTO = ROOT / "docs" / "howto_kernel.md"
MAX_ERROR = 5e-3


@pytest.mark.parametrize(("rows", "row_elems"), [(1, 1), (3, 31), (2, 128), (4, 300), (1, 4096)])
def test_on_each_backend(rig: Rig, rows: int, row_elems: int) -> None:
    assert run.relative_error(rig.gpu, rows=rows, row_elems=row_elems) < MAX_ERROR


@pytest.mark.parametrize("schedule", ["fifo", "reverse", "random"])
def test_in_every_order(schedule: str) -> None:
    assert run.relative_error(EmulatorBackend(schedule=schedule, seed=3, workers=2)) < MAX_ERROR


def test_whether_the_bug_shows_depends_on_the_order() -> None:
    wrong = [
        run.relative_error(EmulatorBackend(schedule=schedule), forget_barrier=True) > MAX_ERROR
        for schedule in ("fifo", "random")
    ]
    assert wrong == [True, False]


@pytest.mark.parametrize("schedule", ["fifo", "reverse", "random"])
def test_check_mode_finds_the_bug_and_nothing_else(schedule: str) -> None:
    gpu = EmulatorBackend(check="full", schedule=schedule)
    assert run.relative_error(gpu) < MAX_ERROR
    with pytest.raises(DataRaceFault, match=r"layer_norm\.cu:18 .*dynamic shared memory.*layer_norm\.cu:21 "):
        run.relative_error(gpu, forget_barrier=True)


def test_the_report_in_the_howto(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--check", "--forget-barrier"]) == 1
    report = " ".join(capsys.readouterr().out.split())
    assert report in " ".join(HOWTO.read_text().split())
    assert run.main(["--check"]) == 0


@pytest.mark.parametrize("target", nvrtc.CHECKED_TARGETS)
def test_compiles_for_every_gpu(target: str) -> None:
    try:
        nvrtc.binding()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    parameters = read_parameters(run.SOURCE, "layer_norm", run.SOURCE.stat().st_mtime_ns)
    defines = (("THREADS", str(run.THREADS)), ("FORGET_BARRIER", "0"))
    source = KernelSource(run.SOURCE, "layer_norm", parameters, defines)
    assert nvrtc.compile_source(source, nvrtc.Target(target)).startswith(b"\x7fELF")


@pytest.mark.parametrize(("language", "source"), [("cuda", "layer_norm.cu"), ("python", "run.py")])
def test_what_the_howto_shows_is_what_runs(language: str, source: str) -> None:
    text = (run.SOURCE.parent / source).read_text()
    shown = re.findall(rf"```{language}\n(.*?)```", HOWTO.read_text(), re.DOTALL)
    assert shown
    for block in shown:
        for part in re.split(r"\n *(?://|#) \.\.\.\n", block):
            assert part.strip("\n") in text
