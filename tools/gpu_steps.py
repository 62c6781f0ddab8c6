"""The steps of `tools.gpu`: which commands each runs, and what its JSON takes from them."""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

# The GPU is shared, each compiles on one core. Of the processors that this process may use (`taskset`).
WORKERS = str(min(14, max(1, len(os.sched_getaffinity(0)) - 2)))
DEMO = "examples.smollm2.demo"
MAX_KINDS = 60  # lines of sanitizer reports that a JSON keeps
SANITIZED = "gpu and sanitize"  # tests that the tools of compute-sanitizer run
SANITIZED_TESTS = "tests/edges/test_sanitize.py"  # where they are, so that nothing else is collected
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        line: program and arguments.
        read: makes of the printed lines, and of files that the command wrote, what the JSON says.
        environment: variables of its own.
        so_far: makes of the lines that it has printed until now what is known already.
    """

    line: Sequence[str]
    read: Callable[[list[str]], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    so_far: Callable[[list[str]], dict[str, Any]] = field(default=lambda lines: {})


class Step(Protocol):
    """Something that leaves one JSON file."""

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """One after the other; files go into the folder, which is temporary, or into out, if they have to
        outlive a run that is ended early."""


@dataclass(frozen=True)
class Suite:
    """Part of the GPU half of the test suite.

    Attributes:
        marks: pytest's -m.
        workers: processes.
        keyword: pytest's -k.
        prefix: what pytest runs under.
        where: files or folders of tests.
        environment: variables.
    """

    marks: str
    workers: str = WORKERS
    keyword: str = ""
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    where: str = "tests"

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """One, whose counts are read."""
        report = folder / "report.xml"
        # A plugin for benchmarks that some machines have dislikes xdist.
        keyword = ["-k", self.keyword] if self.keyword else []
        line = [
            *self.prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-n", self.workers,
            "-m", self.marks, *keyword, f"--junitxml={report}", self.where,
        ]  # fmt: skip
        yield Command(line, lambda lines: self._read(lines, report), self.environment)

    def _read(self, lines: list[str], report: Path) -> dict[str, Any]:
        return counts(report)


class Bare:
    """The sanitizers' tests without a tool: compiling under a tool takes many times as long. They fill the
    cache with exactly what they need, and show what fails without a tool too."""

    def __init__(self) -> None:
        self._ran: list[dict[str, str]] = []

    def commands(self, folder: Path, out: Path, environment: dict[str, str]) -> Iterator[Command]:
        """One; none if this run has had it in such an environment, which can change what is compiled."""
        if environment in self._ran:
            return
        self._ran.append(environment)
        report = folder / "bare"
        report.mkdir()
        suite = Suite(SANITIZED, environment=environment, where=SANITIZED_TESTS)
        (command,) = suite.commands(report, out)
        yield replace(command, read=lambda lines: self._failures(command.read(lines)))

    @staticmethod
    def _failures(found: dict[str, Any]) -> dict[str, Any]:
        return {"failed_without_tool": found.get("failures", 0) + found.get("errors", 0)}


@dataclass
class Sanitizer:
    """Small cases of every kernel and class of specialisation under a tool of compute-sanitizer, unpooled
    memory. A report makes it fail; those that differ by more than numbers go into the JSON.

    Attributes:
        tool: as ``racecheck``.
        before: what compiles the kernels first.
        environment: variables beside that which turns the memory pool off.
    """

    tool: str
    before: Bare
    environment: dict[str, str] = field(default_factory=dict)

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """The tests alone, if no step has run them, and those under the tool."""
        environment = {"CUPAGED_TEST_NO_POOL": "1", **self.environment}
        yield from self.before.commands(folder, out, environment)
        limits = ("--error-exitcode", "1", "--print-limit", "1000")
        prefix = ("compute-sanitizer", "--tool", self.tool, "--target-processes", "all", *limits)
        suite = Suite(SANITIZED, prefix=prefix, environment=environment, where=SANITIZED_TESTS)
        (command,) = suite.commands(folder, out)
        yield replace(command, read=lambda lines: {**reports(lines), **command.read(lines)}, so_far=reports)


def reports(lines: Sequence[str]) -> dict[str, Any]:
    """How many processes of compute-sanitizer have ended, and what has been reported."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", "\n".join(lines))
    found: dict[str, Any] = {"processes": len(summaries), "reports": sum(map(int, summaries))}
    kinds = kinds_of_report(lines)
    return {**found, "kinds": kinds} if kinds else found


def kinds_of_report(lines: Sequence[str]) -> list[str]:
    """The lines of compute-sanitizer's reports, without numbers and each once, the most frequent first."""
    reported = (line for line in lines if re.match("=========(?! COMPUTE-SANITIZER)(?!.*SUMMARY)", line))
    bare = Counter(re.sub(r"0x[0-9a-f]+|\b\d+\b", "#", line) for line in reported)
    return [f"{count} x {line}" for line, count in bare.most_common(MAX_KINDS)]


@dataclass(frozen=True, init=False)
class Program:
    """A module that writes its results where --json says."""

    module: str
    arguments: tuple[str, ...]

    def __init__(self, module: str, *arguments: str) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "arguments", arguments)

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """One. Its file lies in out: a program that is ended early leaves there what it had."""
        target = out / f"{self.module.rsplit('.', 1)[-1]}.partial.json"
        target.unlink(missing_ok=True)
        line = [sys.executable, "-m", self.module, *self.arguments, "--json", str(target)]
        yield Command(line, lambda _: {"output": taken(target)})


@dataclass(frozen=True)
class Both:
    """Two steps in one."""

    first: Step
    second: Step

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """Those of the first, then those of the second."""
        yield from self.first.commands(folder, out)
        yield from self.second.commands(folder, out)


def taken(path: Path) -> Any:
    """The content of a JSON file, which is removed; None where there is none or half of one."""
    if not path.exists():
        return None
    text = path.read_text()
    path.unlink()
    try:
        return json.loads(text)
    except ValueError:
        return None


def counts(report: Path) -> dict[str, int]:
    """Tests, failures, errors and skips of a JUnit report; nothing where pytest wrote none."""
    if not report.exists():
        return {}
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}


_bare = Bare()
# racecheck does not see that a lane's reads of a stage come before another lane's arrival, though a
# __syncwarp lies between; where each lane arrives itself, it does.
_VARIABLES = {"racecheck": {"CUPAGED_TEST_EVERY_LANE_ARRIVES": "1"}}
ONE_GPU: dict[str, Step] = {
    "tests": Suite("gpu and not big"),
    "big": Suite("gpu and big", workers="0"),
    **{tool: Sanitizer(tool, _bare, _VARIABLES.get(tool, {})) for tool in SANITIZERS},
    "fuzz": Program("tests.fuzz.campaign", "--cases", "2000"),
    "soak": Program("benchmarks.soak"),
    "differences": Program("tools.differences"),
    "demo": Program(DEMO, "--backend", "cupy"),
    "streaming": Program("benchmarks.streaming", "--context-gib", "32"),
    "performance": Program("benchmarks"),
}
STEPS: dict[str, Step] = {
    **ONE_GPU,
    "cascade": Program("benchmarks", "--set", "cascade"),
    "multi_gpu": Both(
        Program("benchmarks.multi_gpu", "--ranks", "2"),
        Suite("gpu", workers="0", keyword="two_gpus or another_gpu"),
    ),
}
