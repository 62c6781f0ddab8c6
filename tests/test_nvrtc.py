"""Compiling for real GPUs on a machine without one: every kernel, every target, and what the code takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupaged.backends.cupy import nvrtc
from cupaged.backends.cupy.nvrtc import CHECKED_TARGETS, Target, choose_target
from cupaged.errors import ArgumentValueError, BackendUnavailableError, CompileError
from cupaged.registry import KernelEntry, entries, head_tiles
from cupaged.source import KernelSource, include_closure, kernels_dir, parse_parameters
from tools import cubin_info


def nvrtc_is_missing() -> bool:
    try:
        nvrtc.binding()
    except BackendUnavailableError:
        return True
    return False


needs_nvrtc = pytest.mark.skipif(nvrtc_is_missing(), reason="NVRTC cannot be imported")

HEAD_DIMS, RATIOS = (64, 128, 256), (1, 4, 16)
BULK_TARGETS = ("sm_90a", "sm_100f", "sm_120f")


def specs(target: str) -> Iterator[dict[str, int]]:
    """All pairs of head_dim and ratio on sm_90a; a third of them, each value once, on every other target."""
    shift = CHECKED_TARGETS.index(target)
    for (i, head_dim), (j, ratio) in itertools.product(enumerate(HEAD_DIMS), enumerate(RATIOS)):
        if target == "sm_90a" or (i + j + shift) % 3 == 0:
            block_size = 16 if (i + shift) % 2 else 1
            yield {"head_dim": head_dim, "gqa_ratio": ratio, "block_size": block_size}


def planned_specs(target: str) -> Iterator[dict[str, int]]:
    """Shapes of usual models, and with them both paths of the NVFP4 loader."""
    shapes = {
        "sm_90a": ((64, 4, 8), (128, 8, 8), (256, 16, 2)),
        "sm_100f": ((128, 4, 8), (64, 8, 2)),
        "sm_120f": ((128, 4, 2), (64, 8, 4)),
    }
    for i, (head_dim, ratio, kv_heads) in enumerate(shapes[target]):
        sizes = {"head_dim": head_dim, "gqa_ratio": ratio, "num_kv_heads": kv_heads}
        yield sizes | {"joined": i % 2, "block_size": 16 if i % 2 else 32}


def modules() -> dict[str, list[KernelEntry]]:
    """Entries that are compiled together: those of one module that take the same constants."""
    groups: dict[tuple[str, tuple[str, ...]], list[KernelEntry]] = {}
    for entry in entries():
        groups.setdefault((entry.module, entry.spec_names), []).append(entry)
    return {members[0].entry: members for members in groups.values()}


def compiled(entry: KernelEntry, spec: dict[str, int], target: str) -> dict[str, cubin_info.Usage]:
    source = cubin_info.source_of(entry, spec, target)
    code, log = nvrtc.compile_with_log(source, Target(target), cubin_info.VERBOSE)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == 190  # the machine: CUDA
    return cubin_info.parse_log(log)


CASES = [
    (name, target)
    for (name, members), target in itertools.product(modules().items(), CHECKED_TARGETS)
    if target in BULK_TARGETS or not members[0].cooperative
]


@needs_nvrtc
@pytest.mark.parametrize(("module", "target"), CASES)
def test_every_kernel_compiles_for_every_target(module: str, target: str) -> None:
    members = modules()[module]
    choices = list(planned_specs(target) if members[0].cooperative else specs(target))
    seen = set()
    for spec in choices:
        own = tuple(spec[name] for name in members[0].spec_names)
        if own in seen:
            continue
        seen.add(own)
        usages = compiled(members[0], spec, target)
        assert {entry.entry for entry in members} <= set(usages)
        for usage in usages.values():
            assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), (usage, spec)
            assert usage.shared <= 48 * 1024
        for entry in members:
            constants = cubin_info.constants_of(entry, spec, target)
            threads = entry.block(constants)[0] * constants.get("blocks_per_sm", 1)
            registers = -(-usages[entry.entry].registers // 8) * 8  # as they are given out
            assert registers * threads <= 64 * 1024, (entry.entry, constants)


def test_the_specs_cover_every_pair() -> None:
    for target in CHECKED_TARGETS:
        assert {s["head_dim"] for s in specs(target)} == set(HEAD_DIMS)
        assert {s["gqa_ratio"] for s in specs(target)} == set(RATIOS)
        assert {s["block_size"] for s in specs(target)} == {1, 16}
    assert len(list(specs("sm_90a"))) == 9
    assert all(s["num_kv_heads"] * head_tiles(s["gqa_ratio"]) <= 8 for s in planned_specs("sm_90a"))


def test_planned_kernels_are_not_offered_where_they_cannot_run() -> None:
    planned = [entry for entry in entries() if entry.cooperative]
    assert planned
    for entry, target in itertools.product(planned, set(CHECKED_TARGETS) - set(BULK_TARGETS)):
        with pytest.raises(ArgumentValueError, match="use the split-K launchers"):
            cubin_info.source_of(entry, cubin_info.DEFAULT_SPEC, target)


def test_no_kernel_includes_a_header_of_the_toolkit() -> None:
    files = sorted(kernels_dir().rglob("*.cu*"))
    assert len(files) > 20
    for path in files:
        for include in re.findall(r"^\s*#\s*include\s*(.*)$", path.read_text(), re.MULTILINE):
            name = re.fullmatch(r'"([\w./]+)".*', include)
            assert name is not None, f"{path}: {include}"
            here = (path.parent / name[1]).is_file() or (kernels_dir() / name[1]).is_file()
            assert here or name[1].startswith("cupaged_emulator"), f"{path}: {include}"
        for included in include_closure(path, (kernels_dir(),)):
            assert included.is_relative_to(kernels_dir())


def own_source(folder: Path, text: str, **defines: str) -> KernelSource:
    path = folder / "own.cu"
    path.write_text(text)
    return KernelSource(path, "own", parse_parameters(text, "own"), tuple(defines.items()))


@needs_nvrtc
def test_a_compile_error_carries_log_and_command(tmp_path: Path) -> None:
    source = own_source(
        tmp_path, 'extern "C" __global__ void own(int* x) {\n  *x = SIZE + missing;\n}\n', SIZE="3"
    )
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_source(source, Target("sm_90a"))
    error = caught.value
    assert "own.cu(2)" in error.log
    assert 'identifier "missing" is undefined' in error.log
    assert "-arch=sm_90a" in error.command
    assert "-DSIZE=3" in error.command
    assert f"-I{tmp_path}" in error.command
    assert error.command.endswith(str(source.path))
    message = str(error)
    assert "could not compile own.cu for sm_90a" in message
    assert error.log in message
    assert error.command in message


@needs_nvrtc
def test_an_unknown_architecture_is_a_compile_error(tmp_path: Path) -> None:
    source = own_source(tmp_path, 'extern "C" __global__ void own(int* x) {}\n')
    with pytest.raises(CompileError, match="for sm_12345"):
        nvrtc.compile_source(source, Target("sm_12345"))


@needs_nvrtc
def test_ptx_is_made_for_gpus_that_nvrtc_does_not_know(tmp_path: Path) -> None:
    source = own_source(tmp_path, 'extern "C" __global__ void own(int* x) { *x = 1; }\n')
    assert Target("compute_90").is_ptx
    assert not Target("sm_90a").is_ptx
    text = nvrtc.compile_source(source, Target("compute_90")).decode()
    assert ".target sm_90" in text
    assert ".entry own(" in text


def test_options_keep_denormals_and_look_nowhere_but_in_the_sources(tmp_path: Path) -> None:
    source = own_source(tmp_path, 'extern "C" __global__ void own(int* x) {}\n', A="1", B="2")
    options = nvrtc.options(source, Target("sm_80"))
    assert [option for option in options if option.startswith("-I")] == [
        f"-I{tmp_path}",
        f"-I{kernels_dir()}",
    ]
    assert options[-2:] == ("-DA=1", "-DB=2")
    assert not any("ftz" in option or "fast" in option for option in options)


@needs_nvrtc
def test_every_checked_target_is_supported() -> None:
    supported = nvrtc.supported_archs()
    assert {int(re.sub(r"\D", "", target)) for target in CHECKED_TARGETS} <= set(supported)
    assert re.fullmatch(r"\d+\.\d+", nvrtc.version_text())


NVRTC_12_9 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
NVRTC_12_8 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120)
NVRTC_12_0 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)

TARGETS: list[tuple[tuple[int, int], tuple[str, str, str, str]]] = [
    # capability: 12.9, 13, 12.8 (no families yet), 12.0
    ((8, 0), ("sm_80", "sm_80", "sm_80", "sm_80")),
    ((8, 6), ("sm_86", "sm_86", "sm_86", "sm_86")),
    ((8, 7), ("sm_87", "sm_87", "sm_87", "sm_87")),
    ((8, 8), ("sm_87", "sm_88", "sm_87", "sm_87")),
    ((8, 9), ("sm_89", "sm_89", "sm_89", "sm_89")),
    ((9, 0), ("sm_90a", "sm_90a", "sm_90a", "sm_90a")),
    ((9, 9), ("sm_90", "sm_90", "sm_90", "sm_90")),
    ((10, 0), ("sm_100f", "sm_100f", "sm_100a", "compute_90")),
    ((10, 1), ("sm_101", "sm_100", "sm_101", "compute_90")),
    ((10, 3), ("sm_100f", "sm_100f", "sm_101", "compute_90")),
    ((11, 0), ("compute_103", "sm_110", "compute_101", "compute_90")),
    ((12, 0), ("sm_120f", "sm_120f", "sm_120a", "compute_90")),
    ((12, 1), ("sm_120f", "sm_120f", "sm_120", "compute_90")),
    ((13, 0), ("compute_121", "compute_121", "compute_120", "compute_90")),
]


@pytest.mark.parametrize(("capability", "targets"), TARGETS)
def test_targets(capability: tuple[int, int], targets: tuple[str, ...]) -> None:
    lists = (NVRTC_12_9, NVRTC_13, NVRTC_12_8, NVRTC_12_0)
    assert tuple(choose_target(capability, supported).arch for supported in lists) == targets
    for supported in lists:
        assert choose_target(capability, tuple(reversed(supported))) == choose_target(capability, supported)


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (5, 2)])
def test_gpus_that_are_too_old(capability: tuple[int, int]) -> None:
    old = f"{capability[0]}.{capability[1]}"
    for supported in (NVRTC_12_9, NVRTC_12_0):
        with pytest.raises(
            BackendUnavailableError, match=f"compute capability {old}; cupaged needs 8.0 or later"
        ):
            choose_target(capability, supported)


def test_an_nvrtc_that_is_too_new_for_the_gpu() -> None:
    with pytest.raises(BackendUnavailableError, match=r"capability 8\.0; .*NVRTC supports 90, 100"):
        choose_target((8, 0), (90, 100))
