"""``cupaged bench`` on the emulator, and the comparison of two runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import cli
from cupaged.cli import bench, measure
from cupaged.cli.measure import Clock, Shape
from cupaged.cli.status import DONE, FAILED, MISSING, USAGE
from cupaged.formats import FORMATS, CacheLayout, cache_format, gather_tokens
from tests.rig import Rig

SMALL = ["bench", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--seqs", "2", "--replays", "2"]
EMULATED = [*SMALL, "--backend", "emulator"]


def test_a_run_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "run.json"
    assert (
        cli.main([*EMULATED, "--length", "20", "33", "--formats", "fp8", "bf16", "--save", str(saved)])
        == DONE
    )
    captured = capsys.readouterr()
    assert "these times say nothing about a GPU" in captured.err
    lines = captured.out.splitlines()
    assert "4 query heads, 2 KV heads, head_dim 64, blocks of 16 (NHD)" in lines[0]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["fp8", "2", "20"],
        ["fp8", "2", "33"],
        ["bf16", "2", "20"],
        ["bf16", "2", "33"],
    ]
    content = json.loads(saved.read_text())
    assert content["backend"] == "emulator"
    row = content["rows"][1]
    assert row["kv_bytes"] == 2 * 2 * 33 * 2 * 64
    assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
    assert row["gb_per_s"] == pytest.approx(row["kv_bytes"] / row["median_us"] / 1e3)


def test_json_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*EMULATED, "--length", "20", "--formats", "bf16", "--json"]) == DONE
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


def test_a_shape_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--q-heads", "3", "--kv-heads", "2", "--backend", "emulator"]
    assert cli.main(["bench", *arguments, "--length", "20"]) == USAGE
    assert "num_q_heads must be a positive multiple of num_kv_heads" in capsys.readouterr().err


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
@pytest.mark.parametrize("heads_first", [False, True])
def test_every_value_of_a_pool_is_finite_and_they_vary(name: str, heads_first: bool, rig: Rig) -> None:
    layout = CacheLayout(cache_format(name), 2, 64, 16, heads_first=heads_first)
    pool = measure._pool(rig.gpu, layout, 3, np.random.default_rng(0))
    values = gather_tokens(rig.download(pool), layout, [2, 0, 1], 48)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 5


def test_a_large_pool_is_filled_to_its_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TILE_BYTES", 1000)
    layout = CacheLayout(cache_format("fp8"), 2, 64, 16)
    pool = rig.download(measure._pool(rig.gpu, layout, 3, np.random.default_rng(0))).reshape(-1)
    assert pool.size == 3 * layout.block_bytes
    assert ((pool & 0x78) == 0x38).all()


def test_tables_are_disjoint_and_larger_than_the_cache(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(measure.Decoder, "decode", lambda self, *arrays, **options: given.append(arrays[3]))
    clock = Clock(rig.gpu)
    clock.l2_bytes = 16384
    shape = Shape("fp8", 4, 2, 64, 16, num_seqs=2, length=33)
    row = measure.measure(clock, CacheLayout(cache_format("fp8"), 2, 64, 16), shape, 1)
    load = 2 * 2 * 3 * 16 * 2 * 64  # K and V of two sequences in three blocks each
    assert row.tables == -(-8 * 16384 // load) > 1
    tables = np.stack([rig.download(table) for table in given[: row.tables]])
    assert sorted(tables.reshape(-1)) == list(range(row.tables * 6))


def test_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.svg"
    status = cli.main([*EMULATED, "--length", "20", "33", "--formats", "bf16", "--plot", str(picture)])
    if importlib.util.find_spec("matplotlib") is None:
        assert status == MISSING
        assert "pip install 'cupaged[bench]'" in capsys.readouterr().err
    else:
        assert status == DONE
        assert "<svg" in picture.read_text()


def test_a_batch_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Clock, "free_bytes", lambda self: 10_000)
    assert cli.main([*EMULATED, "--length", "20", "--formats", "bf16"]) == USAGE
    assert "seqs, length: K and V take 32,768 bytes, there is room for 9,000" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main([*SMALL, "--length", "64", "--query-tokens", "2", "--json"])
    captured = capsys.readouterr()
    if status == MISSING:
        pytest.skip(captured.err)
    assert status == DONE, captured.err
    content = json.loads(captured.out)
    assert content["backend"] == "cupy"
    assert content["arch"].startswith(("sm_", "compute_"))
    assert [row["format"] for row in content["rows"]] == [fmt.name for fmt in FORMATS]
    for row in content["rows"]:
        assert row["launches"] > 1  # a graph of many, over tables that no cache holds
        assert row["tables"] > 1
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]


# ---- comparison


def saved(path: Path, **medians: float) -> str:
    """A run with these medians, one format each, and 1% spread."""
    rows = [
        measure.Row(Shape(name, 32, 8, 128, 16, 64, 8192), 1000, us, 0.99 * us, 1.01 * us, 10, 1).to_json()
        for name, us in medians.items()
    ]
    path.write_text(
        json.dumps({"schema": bench.SCHEMA, "device": "x", "backend": "cupy", "arch": "y", "rows": rows})
    )
    return str(path)


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = saved(tmp_path / "old", bf16=100, fp8=60, nvfp4=40)
    new = saved(tmp_path / "new", bf16=90, fp8=60.6, nvfp4=44)
    assert cli.main(["bench", "--compare", old, new]) == DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[7], " ".join(row[8:])) for row in rows] == [
        ("bf16", "-10.0%", "faster"),
        ("fp8", "+1.0%", "within the spread"),
        ("nvfp4", "+10.0%", "slower"),
    ]


@pytest.mark.parametrize(("tolerance", "status"), [("5", FAILED), ("10", DONE), ("0", FAILED)])
def test_tolerance(tolerance: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = saved(tmp_path / "old", bf16=100, fp8=60)
    new = saved(tmp_path / "new", bf16=107, fp8=60.6)
    assert cli.main(["bench", "--compare", old, new, "--tolerance", tolerance]) == status
    message = f"1 of 2 shapes are more than {tolerance}% slower"
    assert (message in capsys.readouterr().err) is (status == FAILED)


def test_other_devices_and_other_shapes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = saved(tmp_path / "old", bf16=100), saved(tmp_path / "new", bf16=100, fp8=60)
    content = json.loads(Path(new).read_text())
    Path(new).write_text(json.dumps(content | {"device": "another"}))
    assert cli.main(["bench", "--compare", old, new]) == DONE
    said = capsys.readouterr().err
    assert "the runs differ in device: x and another" in said
    assert "1 rows are in one of the files only" in said


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = saved(tmp_path / "old", bf16=100)
    broken = tmp_path / "broken"
    for content, status, message in (
        (None, MISSING, "there is no"),
        ("{", USAGE, "cannot be read"),
        ('{"rows": [1]}', USAGE, "is no file of cupaged bench --save"),
        (Path(saved(tmp_path / "other", fp8=1)).read_text(), USAGE, "no shape in common"),
    ):
        if content is not None:
            broken.write_text(content)
        assert cli.main(["bench", "--compare", old, str(broken)]) == status
        assert message in capsys.readouterr().err
