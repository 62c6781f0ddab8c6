"""The steps that a GPU machine runs, with small commands in their place."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import gpu, gpu_steps
from tools.gpu_steps import Bare, Both, Command, Program, Sanitizer, Suite, kinds_of_report

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
    _, command = Sanitizer("racecheck", Bare()).commands(tmp_path, tmp_path)
    assert command.line[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert command.line[command.line.index("-m", 6) :][-4:-2] == ["-m", "gpu and sanitize"]
    assert command.line[-1] == "tests/edges/test_sanitize.py"
    assert command.environment == {"CUPAGED_TEST_NO_POOL": "1"}
    lines = [
        "========= COMPUTE-SANITIZER",
        "ERROR SUMMARY: 2 errors",
        "RACECHECK SUMMARY: 3 hazards displayed",
        "ERROR SUMMARY: 0 errors",
    ]
    assert command.read(lines) == command.so_far(lines) == {"processes": 3, "reports": 5}
    lines.append("========= Race reported at 0x10")
    seen = {"processes": 3, "reports": 5, "kinds": ["1 x ========= Race reported at #"]}
    assert command.so_far(lines) == seen
    (tmp_path / "report.xml").write_text(JUNIT)
    found = command.read(lines)
    assert (found["tests"], found["failures"], found["errors"], found["skipped"]) == (7, 1, 0, 2)


def test_the_sanitizers_tests_run_without_a_tool_first_and_once(tmp_path: Path) -> None:
    """What compiles a kernel under a tool takes it many times as long."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    before = Bare()
    bare, first = Sanitizer("racecheck", before).commands(folders[0], tmp_path)
    (second,) = Sanitizer("memcheck", before).commands(folders[1], tmp_path)
    again, third = Sanitizer("racecheck", before, {"A": "1"}).commands(folders[2], tmp_path)
    assert again.environment == third.environment == {"CUPAGED_TEST_NO_POOL": "1", "A": "1"}
    assert "compute-sanitizer" not in (*bare.line, *again.line)
    assert [line[-1] for line in (bare.line, first.line, second.line)] == [gpu_steps.SANITIZED_TESTS] * 3
    (folders[0] / "bare" / "report.xml").write_text(JUNIT)
    assert bare.read([]) == {"failed_without_tool": 1}
    assert "tests" not in first.read([]), "those are not its own"
    steps = [gpu_steps.STEPS[tool] for tool in gpu_steps.SANITIZERS]
    assert all(isinstance(step, Sanitizer) and step.before is steps[0].before for step in steps)


def test_nothing_else_is_for_the_sanitizers() -> None:
    """Or the steps, which collect one file, would leave it out."""
    root = Path(gpu_steps.__file__).parent.parent
    marked = [
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("test_*.py")
        if "pytest.mark.sanitize" in path.read_text() and path != Path(__file__)
    ]
    assert marked == [gpu_steps.SANITIZED_TESTS]


class Slow:
    """A step whose program prints reports, and waits after each."""

    def __init__(self, reports: int, seconds: float) -> None:
        self.code = f"import time\nfor i in range({reports}):\n"
        self.code += f"    print('========= Race', i, flush=True); time.sleep({seconds})"

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        line = [sys.executable, "-c", self.code]
        yield Command(line, lambda lines: {"lines": lines}, so_far=gpu_steps.reports)


def test_a_step_that_is_killed_leaves_what_it_had_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed outright, as by the limit of who runs it: nothing is left to be done then."""
    left = tmp_path / "slow.unfinished.json"

    class Killed(BaseException):
        pass

    def killed_once_written(*_: Any) -> bool:
        seen = left.exists() and json.loads(left.read_text()).get("kinds")
        if seen:
            raise Killed
        time.sleep(0.05)
        return False

    monkeypatch.setattr(gpu, "_ended", killed_once_written)
    with pytest.raises(Killed):
        run(monkeypatch, tmp_path, {"slow": Slow(2, 60)})
    found = json.loads(left.read_text())
    assert found["unfinished"]
    assert (found["step"], found["commit"]) == ("slow", "abc")
    assert found["kinds"] == ["1 x ========= Race #"]
    assert found["log"] == ["========= Race 0"]
    assert [path.name for path in tmp_path.iterdir()] == [left.name]


def test_what_a_program_prints_is_whole_though_it_is_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is shared would put the program's next line where the reader is."""
    monkeypatch.setattr(gpu, "SECONDS_BETWEEN", 0.001)
    _, files = run(monkeypatch, tmp_path, {"one": Slow(10_000, 0)})
    assert files["one"]["lines"] == [f"========= Race {i}" for i in range(10_000)]


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
                assert isinstance(part, (Suite, Sanitizer))
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
