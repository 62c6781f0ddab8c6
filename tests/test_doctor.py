"""``cupaged doctor``: what it finds, and what it says of it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupaged import __main__, doctor, ops
from cupaged.backends.cupy import installation
from cupaged.doctor import facts, selftest
from cupaged.doctor.selftest import Result
from cupaged.errors import CompileError
from tests.surroundings import FakeCuda, command, entries, environment, fake_driver, obey_permissions, run


def _statuses(report: dict[str, Any]) -> dict[str, str]:
    return {result["backend"]: result["status"] for result in report["backends"]}


# ---- the whole command


def test_everything_on_one_page(tmp_path: Path) -> None:
    env = environment(tmp_path, XDG_CACHE_HOME="/some/where", CUDA_PATH="/opt/elsewhere", CXX=None)
    done = command("doctor", env=env)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for start in ("versions  cupaged ", "cupy ", "nvrtc ", "driver ", "C++ ", "kernels   /", "cache     /"):
        assert any(line.startswith(start) for line in lines), (start, done.stdout)
    for text in (
        "python 3.",
        "numpy ",
        "ml_dtypes ",
        f"CUPAGED_CACHE_DIR {str(tmp_path)!r}",
        "CUPAGED_CACHE_MAX_BYTES is not set",
        "XDG_CACHE_HOME '/some/where'",
        "CUDA_PATH '/opt/elsewhere'",
        "CXX is not set",
        f"{tmp_path}, 0 entries, 0 bytes of 1.0 GiB, can be written",
    ):
        assert text in done.stdout
    assert re.search(
        r"^emulator  OK \(\d+\.\d s\): write and decode, relative error to NumPy \d", done.stdout, re.M
    )
    assert re.search(r"^cupy      (OK|not available)", done.stdout, re.M)
    assert done.returncode == 0


def test_json_and_a_warm_cache(tmp_path: Path) -> None:
    env = environment(tmp_path, CUPAGED_CACHE_MAX_BYTES="123456789")
    first, second = (json.loads(command("doctor", "--json", env=env).stdout) for _ in range(2))
    assert _statuses(second)["emulator"] == "OK"
    assert second["healthy"] is True
    assert second["environment"]["CUPAGED_CACHE_DIR"] == str(tmp_path)
    assert first["cache"]["num_entries"] == 0
    assert second["cache"]["num_entries"] >= 3  # the runtime and two kernels
    assert second["cache"]["max_bytes"] == 123456789
    assert len(entries(tmp_path)) == second["cache"]["num_entries"]  # nothing new was compiled


def test_nothing_works(tmp_path: Path) -> None:
    broken = tmp_path / "cupy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('half of it is missing')\n")
    env = environment(tmp_path / "cache", PYTHONPATH=str(tmp_path), PATH="/nonexistent", CXX="clang-99")
    done = command("doctor", env=env)
    assert done.returncode == 1
    assert "emulator  not available: the emulator needs a C++ compiler, but CXX is 'clang-99'" in done.stdout
    assert "apt-get install g++" in done.stdout
    assert "(half of it is missing)" in done.stdout
    assert f"pip install '{installation.package()}[cuda" in done.stdout


def test_gpus_and_the_target_chosen_for_each(tmp_path: Path) -> None:
    libraries = fake_driver(tmp_path, 12040, (9, 9), (12, 1), (7, 5))
    env = environment(tmp_path / "cache", LD_LIBRARY_PATH=libraries)
    report = json.loads(command("doctor", "--json", env=env).stdout)
    assert report["driver"]["found"] == "CUDA 12.4"
    assert [gpu["capability"] for gpu in report["gpus"]] == ["9.9", "12.1", "7.5"]
    if report["nvrtc"]["problem"]:
        assert all("NVRTC" in gpu["problem"] or "CuPy" in gpu["problem"] for gpu in report["gpus"])
    else:
        assert report["gpus"][0]["target"] == "sm_90"
        assert report["gpus"][1]["target"].startswith("sm_120")
        assert "cupaged needs 8.0 or later" in report["gpus"][2]["problem"]
    assert _statuses(report)["cupy"] == "not available"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    code = "import sys; from cupaged.__main__ import main; sys.exit(main(['doctor']))"
    out, err = run(code, environment(tmp_path), obey_permissions)
    tmp_path.chmod(0o755)
    if "can be written" in out.replace("cannot be written", ""):
        pytest.skip("file permissions do not hold here")
    assert err == ""
    assert f"{tmp_path}, 0 entries, 0 bytes of 1.0 GiB; cannot be written (Permission denied)" in out
    assert "export CUPAGED_CACHE_DIR=/some/folder" in out
    assert "emulator  OK" in out


# ---- what makes the exit status


@pytest.mark.parametrize(
    ("statuses", "healthy"),
    [
        (("OK", "OK"), True),
        (("OK", "not available"), True),
        (("not available", "OK"), True),
        (("OK", "FAILED"), False),
        (("FAILED", "not available"), False),
        (("not available", "not available"), False),
    ],
)
def test_health(monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, str], healthy: bool) -> None:
    results = tuple(Result(name, status, "because", 0.1) for name, status in zip("ab", statuses, strict=True))
    monkeypatch.setattr(selftest, "run_all", lambda: results)
    assert doctor.examine().healthy is healthy
    assert __main__.main(["doctor"]) == (0 if healthy else 1)


# ---- self-tests that fail


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.paged_decode_attn_bf16

    def wrong(*arguments: Any) -> None:
        original(*arguments)
        arguments[5][0, 0, 0] += np.float32(2).astype(arguments[5].dtype)  # output

    monkeypatch.setattr(ops, "paged_decode_attn_bf16", wrong)
    result = selftest.run_all()[0]
    assert result.status == "FAILED"
    assert "allowed is 5e-03" in result.detail
    assert "python -m cupaged cache --clear" in result.detail


def test_nan_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "paged_decode_attn_bf16", lambda *arguments: None)  # output stays NaN
    assert selftest.run_all()[0].status == "FAILED"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            CompileError("x.cu does not compile", log="x.cu:3: oops", command="g++ x"),
            "export CXX=/path/to/g++",
        ),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(ops, "reshape_and_cache_bf16", fail)
    result = selftest.run_all()[0]
    assert result.status == "FAILED"
    assert says in result.detail
    if isinstance(error, CompileError):
        assert "x.cu:3: oops" in result.detail


# ---- facts


def test_two_cupys_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    both = (("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.1.0"))
    monkeypatch.setattr(installation, "wheels", lambda: both)
    monkeypatch.setattr(installation, "driver", lambda: installation.Driver((12, 9), (), ""))
    found = facts.collect().cupy
    assert "cupy-cuda12x 14.2.0, cupy-cuda13x 14.1.0" in found.found
    assert "built for CUDA 12.9" in found.found
    assert found.problem == (
        "more than one CuPy is installed; keep one: pip uninstall -y cupy-cuda12x cupy-cuda13x && "
        f"pip install '{installation.package()}[cuda12]'"
    )


def test_where_the_package_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is told the checkout, from wherever; the package's name where there is none."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.chdir(root)
    assert installation.package() == "."
    monkeypatch.chdir(tmp_path)
    assert installation.package() == str(root)
    installed = tmp_path / "site-packages" / "cupaged" / "backends" / "cupy"
    monkeypatch.setattr(installation, "__file__", str(installed / "installation.py"))
    for url, package in (
        (root.as_uri(), str(root)),
        ("file:///nowhere", "cupaged"),
        ("https://x/y", "cupaged"),
    ):
        text = json.dumps({"url": url})
        distribution = SimpleNamespace(read_text=lambda name, text=text: text)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, found=distribution: found)
        assert installation.package() == package


def test_a_problem_is_told_once(tmp_path: Path) -> None:
    """With the backend that it keeps from working; what was looked for points there."""
    env = environment(tmp_path / "cache", CXX="clang-99", CUDA_VISIBLE_DEVICES="")
    report, text = (command("doctor", *options, env=env).stdout for options in (["--json"], []))
    found = json.loads(report)
    problems = [found[name]["problem"] for name in ("cupy", "driver", "compiler")]
    assert found["compiler"]["problem"]
    for problem in filter(None, problems):
        assert text.count(problem) == 1
    assert "C++       not usable, see emulator below" in text


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheels", lambda: ())
    for name in ("cupy", "cupy_backends", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, None)
    found = facts.collect()
    assert found.cupy.problem.startswith("CuPy is not installed")
    assert found.nvrtc.problem == "not available without CuPy"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_sizes_as_people_read_them(num_bytes: int, text: str) -> None:
    assert doctor.readable_bytes(num_bytes) == text
