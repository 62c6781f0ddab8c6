"""Kernels compiled ahead of time: what a set holds, what its manifest says, and backends that find it."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged import ahead
from cupaged.ahead import KernelSet
from cupaged.backends.cupy import CupyBackend, nvrtc, prebuilt
from cupaged.decode import Decoder
from cupaged.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailableError,
    KernelSourceError,
)
from cupaged.formats import BF16, FORMATS, CacheLayout
from cupaged.registry import KernelEntry, buffer_expressions, entries, limits_of_capability
from cupaged.registry.decode import planned_spec
from cupaged.source import KernelSource
from tests.fake_backend import FakeBackend
from tests.surroundings import FakeCuda
from tests.test_nvrtc import SHAPES, VARIANTS, needs_nvrtc

MODEL: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
ARCH, CAPABILITY = "sm_89", (8, 9)  # of which `FakeCuda` has the shared memory


def evaluated(rule: str, **values: int) -> int:
    """A rule's value: integers, ``+ - * //``, min and max, and no more than that."""
    allowed = set("0123456789+-*/(), ") | set("abcdefghijklmnopqrstuvwxyz_")
    assert set(rule) <= allowed, rule
    result = eval(rule, {"__builtins__": {}, "min": min, "max": max}, values)
    assert isinstance(result, int)
    return result


def constants_of_all() -> Iterator[tuple[KernelEntry, dict[str, int], int]]:
    """Every entry with some constants, and the compute capability that they are for."""
    for entry, capability in itertools.product(entries(), (80, 90)):
        limits = limits_of_capability(capability, 4)
        specs: list[dict[str, int]] = list(SHAPES)
        if entry.specialise is None:
            specs = [planned_spec(**shape | variant) for shape in SHAPES[:2] for variant in VARIANTS]
        for spec in specs:
            yield entry, entry.constants({name: spec[name] for name in entry.spec_names}, limits), capability


def test_grid_expressions_are_the_grids_of_launches() -> None:
    draw = random.Random(0)
    for entry, constants, capability in constants_of_all():
        for _ in range(5):
            num_sms = draw.choice((1, 4, 108, 132))
            scalars = {name: draw.choice((0, 1, 3, 17, 300, 70000)) for name in entry.grid_names}
            grid = entry.grid(tuple(scalars.values()), constants, limits_of_capability(capability, num_sms))
            ruled = tuple(
                evaluated(rule, num_sms=num_sms, **scalars) for rule in entry.grid_expressions(constants)
            )
            assert ruled == grid or (0 in ruled and 0 in grid), (entry.entry, scalars, constants)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("heads", [(8, 2), (40, 4), (3, 3)], ids=str)
def test_buffer_rules_say_what_a_decoder_allocates(fmt: Any, heads: tuple[int, int]) -> None:
    layout = CacheLayout(fmt, heads[1], 128, 16)
    cases: tuple[tuple[int, dict[str, Any]], ...] = (
        (5, {}),
        (600, {}),
        (5, {"query_tokens": 3}),
        (5, {"split_tokens": 64, "max_blocks_per_seq": 9}),
    )
    for max_seqs, features in cases:
        gpu: Any = FakeBackend()
        held = Decoder(gpu, layout, heads[0], max_seqs, **features).workspace_bytes
        limits = {"num_sms": 4, "max_seqs": max_seqs, "max_tokens": 9 * 16, "split_tokens": 64}
        sizes = []  # the largest of the specialisations is allocated
        for source in gpu.loads:
            entry = next(e for e in entries() if e.entry == source.entry)
            constants = {name.removeprefix("SPEC_").lower(): int(v) for name, v in source.defines}
            rules = buffer_expressions(entry, constants)
            sizes.append({name: evaluated(rule, **limits) for name, rule in rules.items()})
        names = {name for each in sizes for name in each}
        assert sum(max(each.get(name, 0) for each in sizes) for name in names) == held


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU of another kind than this machine has, and no NVRTC."""
    fake = FakeCuda()
    fake.capability = CAPABILITY
    fake.install(monkeypatch)

    def missing() -> None:
        raise OSError("libnvrtc.so: cannot open shared object file")

    sys.modules["cupy_backends.cuda.libs.nvrtc"].getVersion = missing  # type: ignore[attr-defined]
    return fake


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "_loaded", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set, whose code is no code."""
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version_text", lambda: "13.0")
        patch.setattr(
            nvrtc, "compile_source", lambda source, target: f"{source.entry} {target.arch}".encode()
        )
        kernels = KernelSet().add_model(**MODEL, formats=("bf16",)).add_kernel("bf16_absmax", "bf16_absmax")
        kernels.save(tmp_path / "set", [ARCH])
    return tmp_path / "set"


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def test_a_gpu_without_nvrtc(folder: Path, no_nvrtc: FakeCuda) -> None:
    with pytest.raises(BackendUnavailableError, match="NVRTC"):
        CupyBackend()
    ahead.load(folder)
    gpu = CupyBackend()
    assert gpu.arch == ARCH
    gpu.kernel("bf16_absmax", "bf16_absmax").warm()
    gpu.kernel("reshape_and_cache_bf16", "reshape_and_cache_bf16").warm(head_dim=64, block_size=16)
    spec = planned_spec(head_dim=64, gqa_ratio=4, num_kv_heads=2, block_size=16)
    gpu.kernel("paged_decode_attn_planned", "paged_decode_attn_planned").warm(**spec)
    assert no_nvrtc.loaded == [
        f"{entry} {ARCH}".encode()
        for entry in ("bf16_absmax", "reshape_and_cache_bf16", "paged_decode_attn_planned")
    ]
    missing = rf"reshape_and_cache_bf16 \(SPEC_HEAD_DIM=128, .*for {ARCH} is not among the kernels of .*set"
    with pytest.raises(BackendUnavailableError, match=missing):
        gpu.kernel("reshape_and_cache_bf16", "reshape_and_cache_bf16").warm(head_dim=128, block_size=16)


def test_a_gpu_that_the_set_is_not_for(folder: Path, no_nvrtc: FakeCuda) -> None:
    loaded = ahead.load(folder)
    no_nvrtc.capability = (9, 0)
    with pytest.raises(
        BackendUnavailableError, match=r"capability 9\.0; the kernels .* are for sm_89, and none"
    ):
        CupyBackend()
    no_nvrtc.capability = CAPABILITY
    CupyBackend()
    ahead.unload(loaded)
    with pytest.raises(BackendUnavailableError, match="NVRTC"):
        CupyBackend()


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_86", (8, 6), True), ("sm_86", (8, 9), True), ("sm_86", (8, 0), False), ("sm_86", (9, 0), False),
        ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False), ("sm_100a", (10, 3), False), ("sm_120f", (12, 1), True),
    ],
)  # fmt: skip
def test_which_gpu_runs_what(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert prebuilt.runs_on(arch, capability) == runs


def test_what_is_wrong_with_a_folder(folder: Path, tmp_path: Path, no_nvrtc: FakeCuda) -> None:
    with pytest.raises(ArgumentValueError, match=r"manifest\.json cannot be read"):
        ahead.load(tmp_path)
    manifest = manifest_of(folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(ArgumentValueError, match="a manifest of format 2; allowed is 1"):
        ahead.load(folder)
    for other in ({"bf16_absmax.cu": "0" * 64}, {"gone.cu": "0" * 64}):
        path.write_text(json.dumps(manifest | {"sources": manifest["sources"] | other}))
        with pytest.raises(KernelSourceError, match=f"its {next(iter(other))} was compiled by cupaged"):
            ahead.load(folder)
    others: tuple[Any, ...] = ([], 5, None, "x", {}, {"format": True}, {"format": "1"})
    for none in others:
        path.write_text(json.dumps(none))
        with pytest.raises(ArgumentValueError, match=r"^folder: got .* whose manifest\.json is no manifest"):
            ahead.load(folder)
    first = manifest["kernels"][0]
    damages: tuple[dict[str, Any], ...] = (
        {"sources": []}, {"cupaged": None}, {"kernels": {}}, {"kernels": [1]}, {"kernels": [{}]},
        {"kernels": [first | {"arch": "gpu"}]}, {"kernels": [first | {"sha256": 1}]},
    )  # fmt: skip
    for changed in damages:
        path.write_text(json.dumps(manifest | changed))
        for use in (ahead.load, lambda target: KernelSet().save(target, [])):
            with pytest.raises(ArgumentValueError, match=r"^folder: got .* whose manifest\.json lacks"):
                use(folder)
    for folderless in (None, 5):
        with pytest.raises(ArgumentTypeError, match=f"folder: got {folderless}, allowed is a path"):
            ahead.load(folderless)  # type: ignore[arg-type]
    path.write_text(json.dumps(manifest))
    loaded = ahead.load(folder)
    ahead.unload(loaded)
    with pytest.raises(ArgumentValueError, match=r"^loaded: got .* allowed is what `load` returned"):
        ahead.unload(loaded)
    ahead.load(folder)
    gpu = CupyBackend()
    kernel = next(kernel for kernel in manifest["kernels"] if kernel["entry"] == "bf16_absmax")
    (folder / kernel["cubin"]).write_bytes(b"other")
    with pytest.raises(KernelSourceError, match="damaged: it has another SHA-256"):
        gpu.kernel("bf16_absmax", "bf16_absmax").warm()
    (folder / kernel["cubin"]).unlink()
    with pytest.raises(KernelSourceError, match="cannot be read"):
        gpu.kernel("bf16_absmax", "bf16_absmax").warm()
    assert no_nvrtc.loaded == []


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compiling without NVRTC, to other bytes each time; how often a key was compiled."""
    counts: dict[str, int] = {}

    def compiled(source: KernelSource, target: nvrtc.Target) -> bytes:
        key = prebuilt.key_of(source, target.arch)
        counts[key] = counts.get(key, 0) + 1
        return f"{key} {counts[key]}".encode()

    monkeypatch.setattr(nvrtc, "version_text", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compile_source", compiled)
    return counts


def assert_whole(folder: Path) -> dict[str, Any]:
    """Each kernel is there once, each file is of a kernel and is what the manifest says."""
    manifest = manifest_of(folder)
    kernels = manifest["kernels"]
    assert len({(kernel["key"], kernel["entry"]) for kernel in kernels}) == len(kernels)
    assert {path.name for path in folder.iterdir()} == {"manifest.json"} | {k["cubin"] for k in kernels}
    for kernel in kernels:
        assert hashlib.sha256((folder / kernel["cubin"]).read_bytes()).hexdigest() == kernel["sha256"]
    return manifest


def test_a_second_set_joins_the_first(no_code: dict[str, int], tmp_path: Path, no_nvrtc: FakeCuda) -> None:
    bf16 = KernelSet().add_model(**MODEL, formats=("bf16",))
    fp8 = KernelSet().add_model(**MODEL, formats=("fp8",))
    first = bf16.save(tmp_path, [ARCH, ARCH])
    assert set(no_code.values()) == {1}
    both = fp8.save(tmp_path, [ARCH, "sm_80"])
    assert assert_whole(tmp_path) == both
    assert both["sources"].keys() > first["sources"].keys()
    archs = {(kernel["entry"], kernel["arch"]) for kernel in both["kernels"]}
    assert {(entry, ARCH) for entry in ("reshape_and_cache_bf16", "reshape_and_cache_fp8")} <= archs
    assert ("reshape_and_cache_fp8", "sm_80") in archs
    assert ("reshape_and_cache_bf16", "sm_80") not in archs
    assert {*no_code.values()} == {1, 2}  # what both read blocks with
    ahead.load(tmp_path)
    gpu = CupyBackend()
    for fmt in ("bf16", "fp8"):
        gpu.kernel(f"reshape_and_cache_{fmt}", f"reshape_and_cache_{fmt}").warm(head_dim=64, block_size=16)
    assert len(no_nvrtc.loaded) == 2


def test_entries_of_one_file_stay_together(no_code: dict[str, int], tmp_path: Path) -> None:
    KernelSet().add_kernel("cache_blocks", "gather_tokens_f32").save(tmp_path, [ARCH])
    both = KernelSet().add_kernel("cache_blocks", "gather_tokens_bf16").save(tmp_path, [ARCH])
    assert assert_whole(tmp_path) == both
    assert [kernel["entry"] for kernel in both["kernels"]] == ["gather_tokens_f32", "gather_tokens_bf16"]
    assert set(no_code.values()) == {2}


def test_folders_that_a_set_cannot_join(no_code: dict[str, int], tmp_path: Path) -> None:
    kernels = KernelSet().add_kernel("bf16_absmax", "bf16_absmax")
    file, folder = tmp_path / "file", tmp_path / "set"
    file.write_text("")
    for target in (file, file / "below"):
        with pytest.raises(ArgumentValueError, match=f"^folder: got {target}, allowed is one that can be"):
            kernels.save(target, [ARCH])
    assert not no_code
    manifest = kernels.save(folder, [ARCH])
    no_code.clear()
    path, content = folder / "manifest.json", (folder / "manifest.json").read_text()
    for changed, match in (
        ({"format": 2}, "a manifest of format 2; allowed is 1"),
        ({"sources": {"bf16_absmax.cu": "0" * 64}}, "whose kernels come from other sources than"),
        ({"kernels": [manifest["kernels"][0] | {"cubin": "gone.cubin"}]}, r"names gone\.cubin, which is not"),
    ):
        path.write_text(json.dumps(manifest | changed))
        with pytest.raises(ArgumentValueError, match=f"^folder: got {folder}.*{match}"):
            kernels.save(folder, [ARCH])
    assert not no_code
    path.write_text(content)
    assert kernels.save(folder, [ARCH])["kernels"][0]["key"] in no_code


def test_a_manifest_alone_is_enough_to_launch(folder: Path) -> None:
    """Parameters, block, grid and shared memory of a decode, as the package launches it."""
    manifest = manifest_of(folder)
    gpu: Any = FakeBackend()
    gpu.limits = limits_of_capability(89, 4)
    layout = CacheLayout(BF16, 2, 64, 16)
    batch = {
        name: (i + 1) << 20
        for i, name in enumerate(("q", "k_cache", "v_cache", "block_tables", "seq_lens", "output"))
    }
    Decoder(gpu, layout, 8, 5).decode(**batch, num_seqs=3, max_blocks_per_seq=5, stream=0)
    launch = gpu.last
    constants = {name.removeprefix("SPEC_").lower(): int(v) for name, v in launch.source.defines}
    described = next(
        kernel
        for kernel in manifest["kernels"]
        if (kernel["entry"], kernel["constants"]) == (launch.source.entry, constants)
    )
    assert [p["offset"] for p in described["parameters"]] == launch.offsets
    assert [p["bytes"] for p in described["parameters"]] == list(map(len, launch.packed))
    assert [p["name"] for p in described["parameters"]] == [p.name for p in launch.source.parameters]
    last = described["parameters"][-1]
    assert described["parameter_bytes"] == last["offset"] + last["bytes"]
    assert tuple(described["block"]) == launch.block
    assert described["dynamic_shared_bytes"] == launch.shared_mem
    assert described["cooperative"] == launch.cooperative is True
    grid = tuple(evaluated(rule, num_sms=4, num_seqs=3) for rule in described["grid"])
    assert grid == launch.grid
    for parameter in described["parameters"]:
        assert launch.values[parameter["name"]] % parameter["multiple"] == 0 or parameter["kind"] == "f32"


def test_a_manifest_says_how_addresses_are_aligned(folder: Path) -> None:
    """As the launcher asks for it, and 1 for what is no address."""
    described = 0
    for kernel in manifest_of(folder)["kernels"]:
        entry = next(e for e in entries() if e.entry == kernel["entry"])
        for parameter in kernel["parameters"]:
            assert parameter["multiple"] == entry.multiples.get(parameter["name"], 1)
        described += len(entry.multiples)
    assert described > 10


@needs_nvrtc
def test_real_code_for_two_architectures(tmp_path: Path) -> None:
    seen = []
    kernels = KernelSet().add_model(**MODEL, formats=("fp8",))
    archs = ("sm_80", "sm_90a")
    manifest = kernels.save(tmp_path, archs, progress=lambda done, total: seen.append((done, total)))
    assert manifest == manifest_of(tmp_path)
    files = {kernel["cubin"]: kernel for kernel in manifest["kernels"]}
    assert seen == [(i + 1, len(files)) for i in range(len(files))]
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", *files}
    for name, kernel in files.items():
        code = (tmp_path / name).read_bytes()
        assert hashlib.sha256(code).hexdigest() == kernel["sha256"]
        assert code[:4] == b"\x7fELF"
    for kernel in manifest["kernels"]:  # the entry is among the symbols of its file
        assert kernel["entry"].encode() + b"\0" in (tmp_path / kernel["cubin"]).read_bytes()
    ahead.load(tmp_path)
    for arch in archs:
        for source in kernels.sources(arch):
            assert prebuilt.find(source, arch) == nvrtc.compile_source(source, nvrtc.Target(arch))
