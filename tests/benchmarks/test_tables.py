"""Tables and plot from a made-up result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import report
from tools.performance_tables import performance
from tools.robustness_tables import robustness
from tools.streaming_tables import several_gpus, streaming


def row(load: str, fmt: str, us: float, **more: Any) -> dict[str, Any]:
    figures = {"median_us": us, "min_us": us - 1, "max_us": us + 1, "bytes": 1000, "bytes_per_us": 1000 / us}
    return {"load": load, "format": fmt, **figures, **more}


PEER = [
    row("A", "bf16", 30.0, path="fa2", plan_ms=0.5, relative_error=2e-3),
    row("A", "bf16", 25.0, path="xqa", plan_ms=0.0, relative_error=4.8e-2),
    row("B", "nvfp4", 50.0, path="fa2", plan_ms=0.5, relative_error=None),
]
RESULT = {
    "commit": "0123456789abcdef",
    "device": {"driver": "580", "flashinfer": "0.7.4"},
    "ceiling": {"read_bytes_per_us": 4.6e6, "copy_bytes_per_us": 4.2e6},
    "sets": {
        "table": [
            row("A", "bf16", 20.0, share_of_ceiling=0.96),
            {"load": "A", "format": "fp8", "message": "head_dim: got 7"},
            row("B", "nvfp4", 25.0, share_of_ceiling=0.9),
        ],
        "peer": PEER,
        "latency": [row("A", "nvfp4", 8.4, behind_writer_us=9.1)],
        "fixed_split": [row("A", "bf16", 20.0), row("A", "bf16", 21.0, split_tokens=64, price=0.05,
                                                   bits_depend_on_batch=False)],
        "features": [
            row("A", "bf16", 20.0, feature="plain"),
            row("A", "bf16", 22.0, feature="4 query tokens", price=0.1, share_of_ceiling=0.9),
        ],
        "mixed": [row("A", "fp8", 15.0, value_format="nvfp4", share_of_ceiling=0.8)],
        "cascade": [row("B", "fp8", 7.0, speedup_over_copies=4.04, speedup_over_same_blocks=2.0)],
        "host_cost": [{"call": "launcher", "median_us": 7.5, "allocations": 0}],
    },
}  # fmt: skip


def test_the_peers_best_path_counts() -> None:
    best = report.best_peer(PEER, "A", "bf16")
    assert best is not None
    assert best["path"] == "xqa"
    assert report.peer_ratio(RESULT["sets"]["table"][0], PEER) == 1.25
    assert report.peer_ratio(RESULT["sets"]["table"][1], PEER) is None
    assert report.best_peer(PEER, "A", "nvfp4") is None


def test_tables_show_figures_and_what_is_missing() -> None:
    text = performance(RESULT)
    assert "| A | 20.0 (96%), 1.25 x | not supported | not measured |" in text
    assert "| A | 25.0 (xqa, 4.8e-02) | not measured | not measured |" in text
    assert "| B | not measured | not measured | 50.0 (fa2) |" in text
    assert "| A | not measured | not measured | 8.4; 9.1 |" in text
    assert "| A, 64 tokens a split | +5.0% | not measured | not measured |" in text
    assert "| launcher | 7.5 | 0 |" in text
    assert "| 4 query tokens | 22.0 (90%), +10.0% | not measured | not measured |" in text
    assert "| fp8 K, nvfp4 V | 15.0 (80%) |" in text
    assert "| B | not measured | 7.0, 4.0 x, 2.0 x | not measured |" in text
    assert "4.60 TB/s" in text
    assert "Commit 0123456789ab, driver 580; FlashInfer 0.7.4." in text
    for missing in (
        "Unequal lengths",
        "Other shapes",
        "Single launchers",
        "Streaming step",
        "Writers",
        "absmax",
        "Compile times",
    ):
        assert f"{missing}: not measured." in text


def test_without_a_result_nothing_is_claimed() -> None:
    assert performance(None) == "Performance: not measured."
    assert performance({"output": RESULT}) == performance(RESULT)


SUITE = {"commit": "f" * 40, "tests": 12, "skipped": 2, "failures": 1, "errors": 1}
STREAMED = {
    "commit": "0123456789abcdef",
    "output": {
        "link_bytes_per_s": 55e9,
        "rows": [
            {
                "source": "pinned", "format": "fp8", "tokens": 1_000_000, "tile_bytes": 64 << 20,
                "bytes_per_s": 52.25e9, "share_of_link": 0.95, "kv_tokens_per_s": 12.34e6,
                "device_bytes": 256 << 20, "compute_hidden": 0.98,
            },
            {
                "source": "file", "format": "fp8", "io": "direct", "cold_bytes_per_s": 4e9,
                "cold_share_of_file": 0.9,
            },
        ],
    },
}  # fmt: skip
TWO = {
    "commit": "0123456789abcdef",
    **SUITE,
    "output": {
        "rows": [
            {
                "format": "bf16", "partials": "states", "tokens": 1 << 20, "ranks": 2, "one_gpu_us": 900.4,
                "us": 500.0, "share_of_one_gpu": 0.555, "ulps_from_one_gpu": 0.5,
            }
        ]
    },
}  # fmt: skip


def test_streaming_tables() -> None:
    text = streaming(STREAMED)
    assert "gives 55.0 GB/s in the same run. Commit 0123456789ab." in text
    assert "| fp8, tiles of 64 MiB | 1,000,000 | 52.2 (95%) | 12.3 | 256 | 98% |" in text
    assert "| fp8, direct | 4.0 (90%) |  |" in text
    text = several_gpus(TWO)
    assert "One sequence of 1,048,576 tokens cut over 2 GPUs" in text
    assert "| bf16, states | 900 | 500 | 0.56 x | 0.50 |" in text


def test_robustness_tables() -> None:
    grown = {"count": 1_000_000, "host_microseconds_each": 7.25, "device_growth": 0, "host_growth": 4096}
    results: dict[str, dict[str, Any]] = {
        "big": SUITE,
        "memcheck": {**SUITE, "reports": 3},
        "fuzz": {
            "output": {
                "cases": 2000, "specialisations": 40, "launches": 12345, "failures": 0, "seconds": 61.4,
            }
        },
        "soak": {"output": {"launches": grown, "decoders": grown}},
    }  # fmt: skip
    text = robustness(results.get)
    assert "| tests with big pools and batches | 10 | 2 |  | ffffffffffff |" in text
    assert "| kernels under compute-sanitizer memcheck | 10 | 2 | 3 | ffffffffffff |" in text
    for tool in ("racecheck", "initcheck", "synccheck"):
        assert f"| kernels under compute-sanitizer {tool} | not measured |  |  |  |" in text
    assert "2,000 over 40 specialisations, 12,345 launches, 0 failures, in 61 s." in text
    assert "| 1,000,000 launches | 7.2 | 0 | 4,096 |" in text
    assert "| 1,000,000 decoders made and dropped | 7.2 | 0 | 4,096 |" in text


@pytest.mark.parametrize("result", [None, {"output": None}])
def test_what_was_not_measured_is_said(result: dict[str, Any] | None) -> None:
    assert streaming(result) == "Streaming decode: not measured."
    assert several_gpus(result) == "Two GPUs: not measured."
    text = robustness(lambda _: result)
    assert text.count("not measured") == 7 + 2
    assert "Random cases against float64: not measured." in text
    assert "Long run: not measured." in text


def test_lines_of_the_run() -> None:
    lines = report.comparison(RESULT["sets"]["table"], PEER)
    assert "25.0   xqa 4.8e-02 1.25" in lines[1]
    assert lines[2].endswith("head_dim: got 7")
    assert lines[3].endswith("50.0   fa2         2.00")
    assert "behind a writer 9.10 us" not in report.line(RESULT["sets"]["table"][0])


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"relative_error": 4e-3}, False),
        ({"relative_error": 5e-3}, True),
        ({"relative_error": float("nan")}, True),
        ({"relative_error": None}, False),
        ({"wrong_bytes": 1}, True),
        ({"wrong_results": 0}, False),
        ({"bits_depend_on_batch": True}, True),
        ({}, False),
    ],
)
def test_wrong_results(more: dict[str, Any], wrong: bool) -> None:
    assert report.is_wrong(more, 5e-3) is wrong


@pytest.mark.parametrize(
    ("error", "peer_is_wrong", "we_are_wrong"),
    [(None, False, False), (4.8e-2, False, True), (0.21, True, True), (float("nan"), True, True)],
)
def test_a_peers_rounding_is_a_figure(error: float | None, peer_is_wrong: bool, we_are_wrong: bool) -> None:
    """FlashInfer's FP8 path rounds the weights to FP8, which is no failure of the run; nonsense is one."""
    for name, wrong in (("peer", peer_is_wrong), ("table", we_are_wrong)):
        found = row("A", "fp8", 20.0, path="xqa", relative_error=error)
        sets = {"peer": [], "table": [], name: [found, row("A", "bf16", 1.0, relative_error=1e-3)]}
        assert program.wrong_rows(sets) == ([found] if wrong else [])


def test_the_plot_is_drawn_and_repeats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    source = json.loads(json.dumps(RESULT))
    assert plots.bars(source) == {
        "bf16": [("A", 1000 / 20.0 / 1e6, 1000 / 25.0 / 1e6)],
        "nvfp4": [("B", 1000 / 25.0 / 1e6, 1000 / 50.0 / 1e6)],
    }
    images = [tmp_path / name for name in ("one.svg", "two.svg")]
    for image in images:
        plots.draw(source, image)
    assert images[0].read_bytes() == images[1].read_bytes()
    assert b"read ceiling" in images[0].read_bytes()
