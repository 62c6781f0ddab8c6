"""Writes what README.md takes from elsewhere: the example, and the tables of benchmarks/results/.

`python -m tools.readme_tables` rewrites the README; with --check it only says whether it is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupaged.support import matrix
from tools.performance_tables import commit_of, performance, table
from tools.robustness_tables import robustness
from tools.streaming_tables import several_gpus, streaming

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any] | None:
    """A committed result."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def example(name: str) -> Callable[[], str]:
    """An example, as it is."""
    return lambda: "```python\n" + (ROOT / "examples" / name).read_text() + "```"


def where(result: dict[str, Any]) -> str:
    """The device and versions of a result."""
    device = result["device"]
    return f"one {device['gpu']}, CuPy {device['cupy']}, NVRTC {device['nvrtc']}"


def differences() -> str:
    """Emulator against GPU."""
    result = load("differences")
    if result is None:
        return "Emulator against GPU: not measured."
    rows = []
    for row in result["output"]["rows"]:
        ulp = row.get("largest_difference_in_row_ulp")
        largest = "" if ulp is None else f"{ulp:.3g}"
        rows.append([row["kernel"], row["format"], f"{row['differing_bytes']} of {row['bytes']}", largest])
    header = [
        "emulator against GPU",
        "format",
        "bytes that differ",
        "largest difference, BF16 ulp of its row",
    ]
    planner = (
        "The planned kernels cut a batch by the number of multiprocessors, of which the emulator has 4, so "
        "their sums are rounded elsewhere."
    )
    return table(header, rows) + "\n\n" + planner


def demo() -> str:
    """The small model's table."""
    result = load("demo")
    if result is None:
        return "The demo on a GPU: not measured."
    rows = [
        [
            row["format"],
            f"{row['kv_bytes_per_token']:,}",
            f"{row['tokens_per_second']:.0f}",
            f"{100 * row['top1_agreement']:.0f}%",
            f"{row['perplexity']:.2f}",
            f"{row['kl_to_bf16']:.5f}",
        ]
        for row in result["output"]["formats"]
    ]
    header = [
        "cache",
        "KV bytes a token",
        "tokens/s",
        "top-1 as bf16",
        "perplexity (n = 100)",
        "KL to bf16, nats",
    ]
    caption = (
        "`make demo`: SmolLM2-135M-Instruct over 100 forced tokens. Its speed on a GPU is that of a plain "
        "CuPy loop with some 40 small launches a layer."
    )
    when = commit_of(result) or " Measured at an earlier commit than the results above, which was not kept."
    return f"{caption}{when}\n\n{table(header, rows)}"


def results() -> str:
    """The section of measured figures."""
    measured = next((r for r in map(load, ("performance", "tests", "demo")) if r is not None), None)
    title = "## Measured\n\n"
    if measured is None:
        return title + "Nothing yet."
    intro = (
        f"On {where(measured)}, by the programs behind `make gpu`; the files are in `benchmarks/results/`, "
        "the tables come from them (`python -m tools.readme_tables`)."
    )
    sections = {
        "Speed": performance(load("performance")),
        "Contexts beyond one GPU": "\n\n".join(
            (streaming(load("streaming")), several_gpus(load("multi_gpu")))
        ),
        "Robustness": "\n\n".join((robustness(load), differences())),
        "A small model": demo(),
    }
    return title + intro + "".join(f"\n\n### {name}\n\n{body}" for name, body in sections.items())


SECTIONS: dict[str, Callable[[], str]] = {
    "example": example("minimal.py"),
    "decoder": example("decoder.py"),
    "support": matrix,
    "results": results,
}


def generated(text: str) -> str:
    """The README with every section between its markers made anew."""
    for name, make in SECTIONS.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no section {name}")
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    """Exit status 1 where --check finds the README out of date."""
    old = README.read_text()
    new = generated(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("README.md is out of date: run python -m tools.readme_tables")
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
