"""The steps that a GPU machine runs, with small commands in their place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import gpu, gpu_steps
from tools.gpu_steps import Both, Command, Program, Sanitizer, Suite, kinds_of_report

JUNIT = '<testsuites><testsuite tests="7" failures="1" errors="0" skipped="2"/></testsuites>'


class Printing:
    """A step that prints lines and ends with a status."""

    def __init__(self, lines: int, status: int = 0, **found: Any) -> None:
        code = f"import os, sys\nfor i in range({lines}): print('line', i, os.environ['CUPAGED_COMMIT'])\n"
        self.line, self.found = [sys.executable, "-c", f"{code}sys.exit({status})"], found

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        yield Command(self.line, lambda lines: {"lines": len(lines), **self.found})


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, steps: dict[str, Any], *names: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "ONE_GPU", steps)
    monkeypatch.setattr(gpu, "device_facts", lambda: {"gpu": "none"})
    status = gpu.main(["--out", str(out), "--commit", "abc", *names])
    return status, {path.stem: json.loads(path.read_text()) for path in sorted(out.iterdir())}


def test_a_step_leaves_one_file_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"one": Printing(3), "two": Printing(2)}
    status, files = run(monkeypatch, tmp_path, steps)
    assert status == 0
    assert set(files) == {"one", "two"}
    assert files["one"]["commit"] == "abc"
    assert files["one"]["device"] == {"gpu": "none"}
    assert (files["one"]["lines"], files["two"]["lines"]) == (3, 2)
    assert "log" not in files["one"]
    assert capsys.readouterr().out.count("\n") == 2


def test_a_failure_keeps_the_end_of_its_log_and_prints_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {f"step{i}": Printing(1000, status=int(i % 2)) for i in range(8)}
    status, files = run(monkeypatch, tmp_path, steps)
    assert status == 1
    assert len(files) == 8
    assert "log" not in files["step0"]
    assert files["step1"]["exit_status"] == 1
    assert len(files["step1"]["log"]) == gpu.LOG_LINES
    assert files["step1"]["log"][-1] == "line 999 abc"
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) <= gpu.SUMMARY_LINES
    assert "line 999 abc" in printed
    assert sum("FAILED (1)" in line for line in printed) == 4


def test_a_missing_program_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Printing(0)
    step.line = ["no-such-program-anywhere"]
    status, files = run(monkeypatch, tmp_path, {"one": step, "two": Printing(1)})
    assert status == 1
    assert files["one"]["exit_status"] == 127
    assert "no-such-program-anywhere" in files["one"]["log"][-1]
    assert files["two"]["exit_status"] == 0


def test_only_the_named_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"one": Printing(1), "two": Printing(1)}
    assert set(run(monkeypatch, tmp_path, steps, "two")[1]) == {"two"}
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, steps, "three")
    assert "there is no step three; there are one, two" in capsys.readouterr().err


def test_a_program_s_results_are_taken_over(tmp_path: Path) -> None:
    (command,) = Program("some.module", "--size", "3").commands(tmp_path, tmp_path)
    partial = tmp_path / "module.partial.json"
    assert command.line == [
        sys.executable, "-m", "some.module", "--size", "3", "--json", str(partial),
    ]  # fmt: skip
    assert command.read([]) == {"output": None}
    partial.write_text('{"cases": 5}')
    assert command.read([]) == {"output": {"cases": 5}}
    partial.write_text('{"cases": ')
    assert command.read([]) == {"output": None}
    assert not partial.exists()


def test_counts_and_reports_of_a_sanitizer(tmp_path: Path) -> None:
    (command,) = Sanitizer("racecheck").commands(tmp_path, tmp_path)
    assert command.line[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert command.line[command.line.index("-m", 6) :][-4:-2] == ["-m", "gpu and sanitize"]
    assert command.environment == {"CUPAGED_TEST_NO_POOL": "1"}
    lines = ["ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 3 hazards displayed", "ERROR SUMMARY: 0 errors"]
    assert command.read(lines) == {"processes": 3, "reports": 5, "kinds": []}
    (tmp_path / "report.xml").write_text(JUNIT)
    found = command.read(lines)
    assert (found["tests"], found["failures"], found["errors"], found["skipped"]) == (7, 1, 0, 2)


def test_two_gpus_are_a_benchmark_and_tests(tmp_path: Path) -> None:
    step = gpu_steps.STEPS["multi_gpu"]
    assert isinstance(step, Both)
    first, second = step.commands(tmp_path, tmp_path)
    assert "benchmarks.multi_gpu" in first.line
    assert second.line[second.line.index("-k") + 1] == "two_gpus or another_gpu"


def test_every_module_and_test_that_a_step_names_exists() -> None:
    root = Path(gpu_steps.__file__).parent.parent
    for step in (*gpu_steps.ONE_GPU.values(), gpu_steps.STEPS["multi_gpu"]):
        for part in (step.first, step.second) if isinstance(step, Both) else (step,):
            if isinstance(part, Program):
                path = root / part.module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            else:
                assert isinstance(part, Suite)
    for name in ("test_two_gpus", "test_two_gpus_by_nccl", "test_arrays_of_another_gpu"):
        assert any(f"def {name}(" in path.read_text() for path in (root / "tests").rglob("test_*.py"))


def test_reports_of_a_sanitizer_are_told_once_and_without_numbers() -> None:
    lines = [
        "========= Race reported at 0x10 in kernel+0x40 by thread 3",
        "========= Race reported at 0x20 in kernel+0x80 by thread 4",
        "========= Invalid read",
        "something that a test printed",
        "========= RACECHECK SUMMARY: 3 hazards displayed",
    ]
    assert kinds_of_report(lines) == [
        "2 x ========= Race reported at # in kernel+# by thread #",
        "1 x ========= Invalid read",
    ]
