"""The steps of `tools.gpu`: which commands each runs, and what its JSON takes from them."""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

WORKERS = str(min(14, max(1, (os.cpu_count() or 1) - 2)))  # the GPU is shared, each compiles on one core
DEMO = "examples.smollm2.demo"
MAX_KINDS = 60  # lines of sanitizer reports that a JSON keeps
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        line: program and arguments.
        read: makes of the printed lines, and of files that the command wrote, what the JSON says.
        environment: variables of its own.
    """

    line: Sequence[str]
    read: Callable[[list[str]], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)


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
        environment: variables.
    """

    marks: str
    workers: str = WORKERS
    keyword: str = ""
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def commands(self, folder: Path, out: Path) -> Iterator[Command]:
        """One, whose counts are read."""
        report = folder / "report.xml"
        # A plugin for benchmarks that some machines have dislikes xdist.
        keyword = ["-k", self.keyword] if self.keyword else []
        line = [
            *self.prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-n", self.workers,
            "-m", self.marks, *keyword, f"--junitxml={report}", "tests",
        ]  # fmt: skip
        yield Command(line, lambda lines: self._read(lines, report), self.environment)

    def _read(self, lines: list[str], report: Path) -> dict[str, Any]:
        return counts(report)


class Sanitizer(Suite):
    """Small cases of every kernel and class of specialisation under a tool of compute-sanitizer, unpooled
    memory. A report makes it fail; those that differ by more than numbers go into the JSON."""

    def __init__(self, tool: str) -> None:
        limits = ("--error-exitcode", "1", "--print-limit", "1000")
        prefix = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", *limits)
        super().__init__("gpu and sanitize", prefix=prefix, environment={"CUPAGED_TEST_NO_POOL": "1"})

    def _read(self, lines: list[str], report: Path) -> dict[str, Any]:
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", "\n".join(lines))
        found = {"processes": len(summaries), "reports": sum(map(int, summaries)), **counts(report)}
        if found["reports"]:
            found["kinds"] = kinds_of_report(lines)
        return found


def kinds_of_report(lines: Sequence[str]) -> list[str]:
    """The lines of compute-sanitizer's reports, without numbers and each once, the most frequent first."""
    reported = (line for line in lines if line.startswith("=========") and "SUMMARY" not in line)
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


ONE_GPU: dict[str, Step] = {
    "tests": Suite("gpu and not big"),
    "big": Suite("gpu and big", workers="0"),
    **{tool: Sanitizer(tool) for tool in SANITIZERS},
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
