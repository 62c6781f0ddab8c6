"""Compile times are those of a machine that has never seen the kernel; all else has CUDA's cache."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cupaged.backends.cupy import nvrtc
from cupaged.source import KernelSource, kernels_dir
from tools import jit_times

MODULE = "paged_decode_attn_bf16"
SECONDS = {"cold": 1.25, "disk": 0.03, "save": 2.0, "ahead": 0.02}


def test_only_the_cold_run_goes_without_cudas_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], dict[str, str], bool]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        cache = Path(env["CUPAGED_CACHE_DIR"])
        runs.append((command, env, cache.exists()))
        cache.mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, f"{list(SECONDS.values())[len(runs) - 1]}\n")

    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    found = jit_times.measure(MODULE)
    assert found == {"module": MODULE, "cold_ms": 1250.0, "from_disk_ms": 30.0, "ahead_ms": 20.0}
    assert [env.get("CUDA_CACHE_DISABLE") for _, env, _ in runs] == ["1", None, None, None]
    assert [existed for _, _, existed in runs] == [False, True, True, False], "the package's own cache"
    assert ["--load" in command for command, _, _ in runs] == [False, False, False, True]


def test_the_package_leaves_nvrtcs_cache_on() -> None:
    source = KernelSource(kernels_dir() / f"{MODULE}.cu", MODULE, ())
    assert not [option for option in nvrtc.options(source, nvrtc.Target("sm_90a")) if "cache" in option]
