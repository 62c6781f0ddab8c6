"""``cupaged compile``: cubins for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupaged import cli
from cupaged.cli.status import DONE, MISSING, USAGE
from cupaged.errors import BackendUnavailableError

SMALL = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "64"]


@pytest.fixture(scope="module")
def has_nvrtc() -> None:
    try:
        from cupaged.backends.cupy import nvrtc

        nvrtc.version_text()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def test_a_folder_of_kernels(has_nvrtc: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kernels"
    arguments = ["compile", str(folder), *SMALL, "--formats", "fp8", "--heads-first", "--arch", "sm_90a"]
    assert cli.main(arguments) == DONE
    captured = capsys.readouterr()
    manifest = json.loads(next(folder.glob("*.json")).read_text())
    entries = {kernel["entry"] for kernel in manifest["kernels"]}
    assert entries >= {"paged_decode_attn_planned", "reshape_and_cache_fp8", "gather_tokens_bf16"}
    planned = next(k for k in manifest["kernels"] if k["entry"] == "paged_decode_attn_planned")
    assert planned["constants"]["heads_first"] == 1
    header, row = captured.out.splitlines()
    assert header.split() == ["for", "kernels", "files", "size"]
    cubins = list(folder.glob("*.cubin"))
    assert row.split()[:3] == ["sm_90a", str(len(manifest["kernels"])), str(len(cubins))]
    assert f"cupaged.ahead.load({str(folder)!r})" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "hopper"], "arch: got 'hopper', allowed are sm_NN"),
        (["--arch", "sm_90a", "sm_70"], "arch: got 'sm_70', allowed are sm_80 and later"),
        (["--q-heads", "3", "--kv-heads", "2"], "num_q_heads must be a positive multiple"),
        (["--query-tokens", "9"], "query_tokens: got 9, allowed is 1 to 8"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    assert cli.main(["compile", str(folder), "--formats", "bf16", *arguments]) == USAGE
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert cli.main(["compile", str(file), *SMALL, "--formats", "bf16"]) == USAGE
    assert capsys.readouterr().err.startswith(f"folder: got {file}, allowed is one that can be made")


def test_what_is_named_twice_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupaged.backends.cupy import nvrtc

    monkeypatch.setattr(nvrtc, "version_text", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, target: b"code")
    tables = []
    for i, times in enumerate((1, 2)):
        twice = ["--formats", *["bf16"] * times, "--arch", *["sm_80"] * times]
        assert cli.main(["compile", str(tmp_path / str(i)), *SMALL, *twice]) == DONE
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_no_nvrtc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupaged.backends.cupy import nvrtc

    def none(*_: object) -> None:
        raise BackendUnavailableError("NVRTC cannot be loaded; install it with: pip install it")

    monkeypatch.setattr(nvrtc, "compile_source", none)
    assert cli.main(["compile", str(tmp_path), *SMALL, "--formats", "bf16"]) == MISSING
    assert "pip install it" in capsys.readouterr().err
