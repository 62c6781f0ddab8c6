"""What a GPU machine is asked to show: tests, sanitizers, fuzzing, soak, the demo, the benchmarks.

`python -m tools.gpu --out FOLDER [step ...]` writes one JSON file a step, when the step is done; commit them
under benchmarks/results/ and run tools/readme_tables.py. What a step printed is kept where it failed: the
last lines, in its JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commit import source_commit
from benchmarks.device import facts as device_facts
from tools.gpu_steps import DEMO, ONE_GPU, STEPS, Program, Step

LOG_LINES = 200
SUMMARY_LINES = 40  # that a run prints in all


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, float, list[str]]:
    """Exit status, seconds, and the lines that a command printed."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            status = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                env={**os.environ, **environment},
            ).returncode
        except OSError as error:  # no such program
            return 127, 0.0, [str(error)]
        output.seek(0)
        text = output.read().decode(errors="replace")
    return status, time.monotonic() - begin, text.splitlines()


def perform(step: Step, out: Path, commit: str) -> dict[str, Any]:
    """Run a step's commands one after the other; what goes into its JSON."""
    status, seconds, found, log = 0, 0.0, dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for command in step.commands(Path(folder), out):
            ended, took, lines = run(command.line, {"CUPAGED_COMMIT": commit, **command.environment})
            status, seconds = status or ended, seconds + took
            found |= command.read(lines)
            if ended:
                log += [f"$ {' '.join(command.line)}", *lines[-LOG_LINES:]]
    result = {"exit_status": status, "seconds": round(seconds, 1), **found}
    return result | ({"log": log[-LOG_LINES:]} if status else {})


def summary(result: dict[str, Any]) -> str:
    """A step in one line."""
    shown = [*result.items(), *(result.get("output") or {}).items()]
    figures = ", ".join(
        f"{name} {value}"
        for name, value in shown
        if name not in ("exit_status", "seconds") and isinstance(value, (int, float))
    )
    state = "ok" if result["exit_status"] == 0 else f"FAILED ({result['exit_status']})"
    return f"{result['step']:12} {state} in {result['seconds']:.0f} s  {figures}"


def print_failures(failed: list[dict[str, Any]], room: int) -> None:
    """The last lines of what failed, in so many lines."""
    each = room // max(1, len(failed)) - 1
    for result in failed if each > 0 else []:
        lines = [line for line in result.get("log", []) if line.strip()]
        print(f"--- {result['step']}", *(line[:200] for line in lines[-each:]), sep="\n")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="the source's commit, where there is no repository")
    parser.add_argument("--model", help="GGUF file for the demo, where the model's package is missing")
    parser.add_argument("steps", nargs="*", help=f"{', '.join(STEPS)}; all that one GPU can do by default")
    options = parser.parse_args(given)
    options.steps = options.steps or list(ONE_GPU)
    unknown = sorted(set(options.steps) - set(STEPS))
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit status 1 where a step failed."""
    options = arguments(given)
    options.out.mkdir(parents=True, exist_ok=True)
    commit, facts = source_commit(options.commit), device_facts()
    failed = []
    for name in options.steps:
        step = STEPS[name]
        if name == "demo" and options.model:
            step = Program(DEMO, "--backend", "cupy", "--model", options.model)
        result = {"step": name, "commit": commit, "device": facts, **perform(step, options.out, commit)}
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(summary(result)[:250], flush=True)
        if result["exit_status"]:
            failed.append(result)
    print_failures(failed, SUMMARY_LINES - len(options.steps))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
