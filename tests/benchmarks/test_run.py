"""A dry run on the emulator, and what becomes of wrong results and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import accuracy, cases, compile_ahead, decode, peer, seed_launchers, tiled
from benchmarks.ceiling import SHAPES, SOURCE
from benchmarks.device import Device
from benchmarks.loads import Load
from cupaged.backends.cupy import nvrtc
from cupaged.backends.cupy.nvrtc import Target
from cupaged.errors import ArgumentValueError
from cupaged.formats import FORMATS, FP8
from cupaged.registry.tiled import resident_blocks
from cupaged.source import KernelSource, parse_parameters
from tests.test_nvrtc import needs_nvrtc
from tools import cubin_info


def dry_run(folder: Path, sets: str, formats: str, *extra: str) -> tuple[int, dict[str, Any]]:
    target = folder / "out.json"
    command = [
        "--dry-run",
        "--set",
        sets,
        "--formats",
        formats,
        "--json",
        str(target),
        "--commit",
        "abc",
        *extra,
    ]
    status = program.main(command)
    return status, json.loads(target.read_text())


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_every_path_of_a_format_runs_and_is_right(
    tmp_path: Path, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "NUM_SEQS", (2,))
    monkeypatch.setattr(tiled, "TILE_BYTES", (64 << 20,))
    monkeypatch.setattr(seed_launchers, "NUM_SPLITS", (1, 3))
    status, output = dry_run(tmp_path, "unequal,latency,fixed_split,seed_launchers,tiled,writers", fmt)
    assert status == 0
    assert output["commit"] == "abc"
    sets = output["sets"]
    for name in ("ceiling", "unequal", "many", "latency", "seed_launchers", "writers", "absmax"):
        for row in sets[name]:
            assert row["median_us"] > 0, row
    for name in ("unequal", "many", "latency", "seed_launchers"):
        assert all(row["relative_error"] < accuracy.BOUND for row in sets[name])
    assert len(sets["seed_launchers"]) == 2 + 2
    assert all("price" in row for row in sets["seed_launchers"][1:])
    assert sets["writers"][0]["wrong_bytes"] == sets["absmax"][0]["wrong_results"] == 0
    assert output["ceiling"]["read_bytes_per_us"] == max(
        row["bytes_per_us"] for row in sets["ceiling"] if row["kind"] == "read"
    )


def test_host_cost_runs(tmp_path: Path) -> None:
    status, output = dry_run(tmp_path, "host_cost", "bf16")
    assert status == 0
    assert len(output["sets"]["host_cost"]) == 5


def test_a_refused_shape_is_a_row_and_a_failure_is_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArgumentValueError("head_dim: got 1")

    monkeypatch.setattr(decode, "Decoder", refuse)
    status, output = dry_run(tmp_path, "long", "bf16")
    assert status == 0
    assert [row["message"] for row in output["sets"]["long"]] == ["head_dim: got 1"] * 2

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(decode, "Decoder", fail)
    status, output = dry_run(tmp_path, "long", "bf16")
    assert status == 1
    assert output["sets"]["long"][0]["message"] == "failed: RuntimeError: broken"


def test_a_wrong_result_is_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "relative_error", lambda *_: 6e-3)
    assert dry_run(tmp_path, "long", "bf16")[0] == 1


def test_update_keeps_other_sets_of_the_same_commit(tmp_path: Path) -> None:
    dry_run(tmp_path, "host_cost", "bf16")
    _, output = dry_run(tmp_path, "long", "bf16", "--update")
    assert {"host_cost", "long"} <= set(output["sets"])
    with pytest.raises(SystemExit, match="of commit abc, this is def"):
        program.main(
            [
                "--dry-run",
                "--set",
                "long",
                "--json",
                str(tmp_path / "out.json"),
                "--commit",
                "def",
                "--update",
            ]
        )


def test_an_unknown_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--dry-run", "--set", "table,nothing"])
    assert "there is no nothing" in capsys.readouterr().err


def test_the_peer_says_why_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peer.importlib.util, "find_spec", lambda name: None if name == "flashinfer" else object()
    )
    assert peer.missing() == "not measured: no module flashinfer"


def test_the_peer_covers_the_table_and_builds_each_module_once() -> None:
    cases = peer.cases()
    assert {(fmt.name, load.label) for fmt, load, _ in cases} == {
        (fmt, load.label) for fmt in peer.PATHS for load in peer.TABLE
    }
    ratios = {load.num_q_heads // load.num_kv_heads for load in peer.TABLE}
    assert len(peer.modules()) == 3 + 2 * len(ratios)


def test_fixed_splits_do_not_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SPLIT_TOKENS", (64,))
    status, output = dry_run(tmp_path, "fixed_split", "bf16")
    rows = output["sets"]["fixed_split"]
    assert status == 0
    assert len(rows) == 2 * 4
    for row in rows[1::2]:
        assert row["split_tokens"] == 64
        assert "price" in row
        assert not row["bits_depend_on_batch"]


def test_features_are_right_and_have_their_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = cases.features  # of one format, as each kernel takes seconds to compile
    monkeypatch.setattr(cases, "features", lambda formats, base: features(formats[:1], base))
    status, output = dry_run(tmp_path, "features", "fp8,nvfp4")
    assert status == 0
    rows, mixed = output["sets"]["features"], output["sets"]["mixed"]
    assert len(rows) == 4
    assert [(row["format"], row["value_format"]) for row in mixed] == [("fp8", "nvfp4"), ("nvfp4", "fp8")]
    for row in rows + mixed:
        assert row["relative_error"] < accuracy.BOUND, row
    assert all(("price" in row) == (row["feature"] != "plain") for row in rows)
    assert {row["bytes"] for row in mixed} == {rows[0]["bytes"] * (128 + 72) // (2 * 128)}
    assert set(output["seconds"]) == {"features"}


def test_a_shared_prefix_is_right(tmp_path: Path) -> None:
    status, output = dry_run(tmp_path, "cascade", "nvfp4")
    assert status == 0
    (row,) = output["sets"]["cascade"]
    assert row["relative_error"] < accuracy.BOUND
    assert {"speedup_over_copies", "speedup_over_same_blocks"} <= row.keys()  # what the README's table takes


def test_a_step_over_tiles_fills_the_gpu_once(device: Device) -> None:
    name = "paged_decode_attn_tiled"
    kernel = device.gpu.kernel(name, name)
    blocks = device.gpu.num_sms * resident_blocks(
        kernel.warm(head_dim=128, gqa_ratio=4, block_size=16).constants
    )
    for load in (Load(8, 2, 128, 16, (64,)), Load(16, 4, 128, 16, (64, 64))):
        splits = tiled._num_splits(device.gpu, kernel, load)
        sequences = len(load.seq_lens) * load.num_kv_heads
        assert splits * sequences <= blocks < (splits + 1) * sequences
    assert tiled._num_splits(device.gpu, kernel, Load(32, 8, 128, 16, (64,) * 100)) == 1


def test_compiling_ahead_knows_every_kernel_of_the_table() -> None:
    one = compile_ahead.sources("sm_90a", ["latency"], [FP8])
    assert one  # of one load's room for tokens or another
    assert {dict(source.defines)["SPEC_KEY_FORMAT"] for source in one} == {"1"}
    several = compile_ahead.sources("sm_90a", program.SETS, FORMATS)
    names = {(source.path, source.defines) for source in several}
    assert len(names) > 100
    assert {(source.path, source.defines) for source in one} <= names
    modules = {source.path.stem for source in several}
    assert modules >= {f"reshape_and_cache_{fmt.name}" for fmt in FORMATS}
    assert modules >= {"paged_decode_attn_tiled", "paged_decode_attn_tiled_nvfp4", "paged_decode_attn_bf16"}


def test_the_peers_modules_are_compiled_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "modules", lambda: [("no_such_format", "fa2", 1)])
    said: list[str] = []
    build = peer.Build()
    found = build.finish(said.append)
    assert list(found["failed"]) == ["no_such_format fa2 1"]
    assert found["failed"]["no_such_format fa2 1"]  # what the process printed
    assert said == ["peer module no_such_format fa2 1: failed"]
    peer.Build().stop()


@needs_nvrtc
@pytest.mark.parametrize("shape", SHAPES)
def test_ceiling_kernels_compile_without_spills(shape: tuple[int, int, int]) -> None:
    text = SOURCE.read_text()
    defines = tuple(zip(("THREADS", "VECTORS", "STREAMING"), map(str, shape), strict=True))
    source = KernelSource(SOURCE, "copy_all", parse_parameters(text, "copy_all"), defines)
    _, log = nvrtc.compile_with_log(source, Target("sm_90a"), cubin_info.VERBOSE)
    usages = cubin_info.parse_log(log)
    assert set(usages) == {"read_all", "copy_all", "read_bulk"}
    for usage in usages.values():
        assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0)
        assert usage.registers * shape[0] <= 64 * 1024
