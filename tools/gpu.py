"""What a GPU machine is asked to show: tests, sanitizers, fuzzing, soak, the demo, the benchmarks.

`python -m tools.gpu --out FOLDER [step ...]` writes one JSON file a step, when the step is done; commit them
under benchmarks/results/ and run tools/readme_tables.py. What a step printed is kept where it failed: the
last lines, in its JSON. A step that is killed leaves STEP.unfinished.json with what it had shown by then.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commit import source_commit
from benchmarks.device import facts as device_facts
from cupaged.cache_dir import write_atomically
from tools.gpu_steps import DEMO, ONE_GPU, STEPS, Command, Program, Step

LOG_LINES = 200
SECONDS_BETWEEN = 5.0  # writes of what a running step has shown so far
SUMMARY_LINES = 40  # that a run prints in all


def run(command: Command, commit: str, so_far: Callable[[list[str]], object]) -> tuple[int, float, list[str]]:
    """Exit status, seconds, and the lines that a command printed.

    Args:
        command: is run.
        commit: that it is told.
        so_far: is given the lines until then, every few seconds.
    """
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:

        def lines() -> list[str]:
            # By its name: a descriptor's place in the file is the process's too.
            return Path(output.name).read_text(errors="replace").splitlines()

        environment = {**os.environ, "CUPAGED_COMMIT": commit, **command.environment}
        try:
            process = subprocess.Popen(command.line, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:  # no such program
            return 127, 0.0, [str(error)]
        with process:
            try:
                while not _ended(process):
                    so_far(lines())
            except BaseException:
                process.kill()
                raise
        return process.returncode, time.monotonic() - begin, lines()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(SECONDS_BETWEEN)
    except subprocess.TimeoutExpired:
        return False
    return True


def perform(step: Step, out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Run a step's commands one after the other; what goes into its JSON.

    While they run, a file of the step's name and ``.unfinished.json`` has what is known: it stays where the
    run is killed.
    """
    begin, status, seconds, found, log = time.monotonic(), 0, list[float](), dict[str, Any](), list[str]()
    unfinished = out / f"{facts['step']}.unfinished.json"

    def so_far(command: Command, lines: list[str]) -> None:
        known = {**facts, "unfinished": True, "seconds": round(time.monotonic() - begin, 1), **found}
        written = json.dumps({**known, **command.so_far(lines), "log": lines[-LOG_LINES:]}, indent=1)
        write_atomically(unfinished, f"{written}\n".encode())

    with tempfile.TemporaryDirectory() as folder:
        for command in step.commands(Path(folder), out):
            ended, took, lines = run(command, facts["commit"], functools.partial(so_far, command))
            status = status or ended
            seconds.append(round(took, 1))
            found |= command.read(lines)
            if ended:
                log += [f"$ {' '.join(command.line)}", *lines[-LOG_LINES:]]
    unfinished.unlink(missing_ok=True)
    result = {**facts, "exit_status": status, "seconds": round(sum(seconds), 1), **found}
    if len(seconds) > 1:
        result["seconds_of_commands"] = seconds
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
        result = perform(step, options.out, {"step": name, "commit": commit, "device": facts})
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(summary(result)[:250], flush=True)
        if result["exit_status"]:
            failed.append(result)
    print_failures(failed, SUMMARY_LINES - len(options.steps))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
