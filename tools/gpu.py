"""What a GPU machine is asked to show: the test suite, compute-sanitizer over it, the demo, the benchmark.

`python -m tools.gpu --out FOLDER [step ...]` writes one JSON file a step. Commit them under
benchmarks/results/ and run tools/readme_tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORKERS = "8"
DEMO = "examples.smollm2.demo"


def device_facts() -> dict[str, Any]:
    """The GPU, driver and versions that the results belong to."""
    import cupy
    import numpy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "driver_cuda": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "numpy": numpy.__version__,
        "python": sys.version.split()[0],
    }


def run(command: Sequence[str], log: Path, **environment: str) -> tuple[int, float, str]:
    """Exit status, seconds and output of a command; the output goes to the log too."""
    begin = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    output = done.stdout + done.stderr
    log.write_text(output)
    return done.returncode, time.monotonic() - begin, output


def pytest_command(report: Path, paths: Sequence[str]) -> list[str]:
    """The GPU half of the suite. A plugin for benchmarks that some machines have dislikes xdist."""
    return [
        sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-n", WORKERS, "-m", "gpu",
        f"--junitxml={report}", *paths,
    ]  # fmt: skip


def counts(report: Path) -> dict[str, int]:
    """Tests, failures, errors and skips of a JUnit report."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}


def step_tests(out: Path) -> dict[str, Any]:
    """The suite on the GPU."""
    report = out / "tests.xml"
    status, seconds, output = run(pytest_command(report, ["tests"]), out / "tests.log")
    print(output[-2000:])
    return {"exit_status": status, "seconds": round(seconds, 1), **counts(report)}


def sanitizer_step(tool: str) -> Callable[[Path], dict[str, Any]]:
    """The kernels' tests under one tool of compute-sanitizer, every allocation its own."""

    def step(out: Path) -> dict[str, Any]:
        report = out / f"{tool}.xml"
        command = [
            "compute-sanitizer", "--tool", tool, "--target-processes", "all",
            *pytest_command(report, ["tests/kernels"]),
        ]  # fmt: skip
        status, seconds, output = run(command, out / f"{tool}.log", CUPAGED_TEST_NO_POOL="1")
        print(output[-1500:])
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
        return {
            "exit_status": status,
            "seconds": round(seconds, 1),
            "processes": len(summaries),
            "reports": sum(map(int, summaries)),
            **counts(report),
        }

    return step


def program_step(module: str, *arguments: str) -> Callable[[Path], dict[str, Any]]:
    """A program that writes its own JSON where --json says."""

    def step(out: Path) -> dict[str, Any]:
        name = module.rsplit(".", 1)[-1]
        target = out / f"{name}_output.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(target)]
        status, seconds, output = run(command, out / f"{name}.log")
        print(output[-5000:])
        written = json.loads(target.read_text()) if target.exists() else None
        target.unlink(missing_ok=True)
        return {"exit_status": status, "seconds": round(seconds, 1), "output": written}

    return step


STEPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tests": step_tests,
    "memcheck": sanitizer_step("memcheck"),
    "racecheck": sanitizer_step("racecheck"),
    "jit_times": program_step("tools.jit_times"),
    "differences": program_step("tools.differences"),
    "demo": program_step(DEMO, "--backend", "cupy"),
    "decode": program_step("benchmarks.decode", "--set", "all"),
}


def main() -> int:
    """Exit status 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="GGUF file for the demo, where the model's package is missing")
    parser.add_argument("steps", nargs="*", default=list(STEPS), help=", ".join(STEPS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = dict(STEPS)
    if options.model:
        steps["demo"] = program_step(DEMO, "--backend", "cupy", "--model", options.model)
    facts, failed = device_facts(), False
    for name in options.steps:
        result = {"step": name, "device": facts, **steps[name](options.out)}
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        summary = {k: v for k, v in result.items() if not isinstance(v, (list, dict))}
        print(json.dumps(summary), flush=True)
        failed |= result["exit_status"] != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
