"""What surrounds cupaged on this machine, and whether each backend works: ``python -m cupaged doctor``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from cupaged.doctor import facts, selftest
from cupaged.doctor.facts import Fact, Facts
from cupaged.doctor.selftest import Result

__all__ = ["Report", "examine", "readable_bytes"]

_INDENT = 10
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        facts: the surroundings.
        results: the self-test of each backend.
    """

    facts: Facts
    results: tuple[Result, ...]

    @property
    def healthy(self) -> bool:
        """At least one backend works, and none gives wrong results."""
        statuses = [result.status for result in self.results]
        return selftest.OK in statuses and selftest.FAILED not in statuses

    def to_json(self) -> str:
        """Everything, for programs and for bug reports."""
        content = {
            **dataclasses.asdict(self.facts),
            "backends": [dataclasses.asdict(result) for result in self.results],
            "healthy": self.healthy,
        }
        return json.dumps(content, indent=2)

    def to_text(self) -> str:
        """Everything, for people."""
        return "\n".join((*_fact_lines(self.facts, self.results), "", *map(_result_line, self.results)))


def examine() -> Report:
    """Look at the surroundings and test each backend, in about a second once kernels are compiled."""
    return Report(facts.collect(), selftest.run_all())


def readable_bytes(num_bytes: int) -> str:
    """A size as people read it, as in ``1.5 MiB``."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _fact_lines(found: Facts, results: tuple[Result, ...]) -> list[str]:
    lines = [_line("versions", ", ".join(f"{name} {value}" for name, value in found.versions.items()))]
    for name in ("cupy", "nvrtc", "driver"):
        lines.append(_line(name, _said(getattr(found, name), results)))
    for index, gpu in enumerate(found.gpus):
        target = f"compiled for {gpu.target}" if gpu.target else gpu.problem
        lines.append(_line(f"GPU {index}", f"{gpu.name}, compute capability {gpu.capability}, {target}"))
    lines.append(_line("C++", _said(found.compiler, results)))
    lines.append(_line("kernels", _said(found.kernels, results)))
    lines.append(_line("cache", _cache_text(found)))
    for index, (name, value) in enumerate(found.environment.items()):
        text = "is not set" if value is None else repr(value)
        lines.append(_line("" if index else "variables", f"{name} {text}"))
    return lines


def _said(fact: Fact, results: tuple[Result, ...]) -> str:
    """What was found and what is wrong; a problem that a backend's line tells is told there alone."""
    telling = next(
        (result.backend for result in results if fact.problem and fact.problem in result.detail), None
    )
    problem = fact.problem if telling is None else f"not usable, see {telling} below"
    return "; ".join(part for part in (fact.found, problem) if part)


def _cache_text(found: Facts) -> str:
    cache = found.cache
    text = (
        f"{cache['folder'] or 'no home directory to have one in'}, {cache['num_entries']} entries, "
        f"{readable_bytes(cache['num_bytes'])} of {readable_bytes(cache['max_bytes'])}"
    )
    if cache["writable"]:
        return f"{text}, can be written"
    return (
        f"{text}; cannot be written ({cache['problem']}), so everything is compiled anew in each process; "
        "name a folder that can: export CUPAGED_CACHE_DIR=/some/folder"
    )


def _result_line(result: Result) -> str:
    time = f" ({result.seconds:.1f} s)" if result.status != selftest.NOT_AVAILABLE else ""
    return _line(result.backend, f"{result.status}{time}: {result.detail}")


def _line(name: str, text: str) -> str:
    first, *rest = text.splitlines() or [""]
    return "\n".join((f"{name:{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in rest)))
