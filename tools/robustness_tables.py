"""The README's tables of what was tested on a GPU: tests, sanitizers, random cases, the long run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.gpu_steps import SANITIZERS
from tools.performance_tables import commit_of, table

Result = dict[str, Any]
Load = Callable[[str], Result | None]

RACECHECK = (
    "racecheck is given kernels in which every lane tells that it has read a stage. In the usual build one "
    "lane does so for its warp, after a `__syncwarp`, whose order the tool does not follow "
    "(`kernels/ring/pipeline.cuh`)."
)
SUITES = {
    "tests": "test suite",
    "big": "tests with big pools and batches",
    "multi_gpu": "tests on two GPUs",
    **{tool: f"kernels under compute-sanitizer {tool}" for tool in SANITIZERS},
}


def suites(load: Load) -> str:
    """Counts of tests, of the sanitizers' reports, and what a person has to say about a result ("remark")."""
    rows = []
    for name, title in SUITES.items():
        result = load(name)
        if result is None or "tests" not in result:
            rows.append([title, "not measured", "", "", ""])
            continue
        failed = result["failures"] + result["errors"]
        reports = str(result["reports"]) if "reports" in result else ""
        rows.append(
            [
                title,
                str(result["tests"] - result["skipped"]),
                str(failed),
                reports,
                result.get("commit", "")[:12],
            ]
        )
    tools = " and ".join(tool for tool in SANITIZERS if (load(tool) or {}).get("reports"))
    unexplained = f" The reports of {tools} have not been explained yet." if tools else ""
    header = ["on the GPU", "tests run", "failed", "sanitizer reports", "commit"]
    remarks = [f"The {title}: {result['remark']}" for name, title in SUITES.items()
               if (result := load(name)) and "remark" in result]  # fmt: skip
    return "\n\n".join([table(header, rows), *remarks, f"{RACECHECK}{unexplained}"])


def fuzz(result: Result | None) -> str:
    """Random cases."""
    found = (result or {}).get("output")
    if not found:
        return "Random cases against float64: not measured."
    return (
        f"Random cases against float64 (`python -m tests.fuzz.campaign`): {found['cases']:,} over "
        f"{found['specialisations']} specialisations, {found['launches']:,} launches, "
        f"{found['failures']} failures, in {found['seconds']:.0f} s.{commit_of(result)}"
    )


def soak(result: Result | None) -> str:
    """The long run."""
    found = (result or {}).get("output")
    if not found:
        return "Long run: not measured."
    body = [
        [
            f"{found[name]['count']:,} {title}",
            f"{found[name]['host_microseconds_each']:.1f}",
            f"{found[name]['device_growth']:,}",
            f"{found[name]['host_growth']:,}",
        ]
        for name, title in (("launches", "launches"), ("decoders", "decoders made and dropped"))
    ]
    header = ["long run", "microseconds each", "device memory grew by, bytes", "host memory grew by, bytes"]
    return table(header, body)


def robustness(load: Load) -> str:
    """All of it."""
    return "\n\n".join((suites(load), fuzz(load("fuzz")), soak(load("soak"))))
