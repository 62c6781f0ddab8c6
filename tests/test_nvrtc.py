"""Compiling for real GPUs on a machine without one: every kernel, every target, and what the code takes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from cupaged.backends.cupy import nvrtc
from cupaged.backends.cupy.nvrtc import CHECKED_TARGETS, Target, choose_target
from cupaged.errors import BackendUnavailableError, CompileError
from cupaged.registry import KernelEntry, entries, limits_of_capability
from cupaged.registry.decode import planned_spec
from cupaged.source import KernelSource, include_closure, kernels_dir, parse_parameters
from tools import cubin_info


def nvrtc_is_missing() -> bool:
    try:
        nvrtc.binding()
    except BackendUnavailableError:
        return True
    return False


needs_nvrtc = pytest.mark.skipif(nvrtc_is_missing(), reason="NVRTC cannot be imported")

# Shapes of models, beside odd ones. Each target compiles every kernel once, over shapes, and the planned
# kernels over formats, that change from target to target; sm_90a, which is measured, compiles more.
SHAPES: tuple[dict[str, int], ...] = (
    {"head_dim": 128, "gqa_ratio": 4, "num_kv_heads": 8, "block_size": 16, "joined": 1},
    {"head_dim": 64, "gqa_ratio": 8, "num_kv_heads": 2, "block_size": 32, "joined": 0},
    {"head_dim": 80, "gqa_ratio": 1, "num_kv_heads": 5, "block_size": 1, "joined": 0},
    {"head_dim": 256, "gqa_ratio": 16, "num_kv_heads": 1, "block_size": 8, "joined": 0},
)
# Key and value format, then what else a kernel of `Decoder` can be asked for.
VARIANTS: tuple[dict[str, int], ...] = (
    {"key_format": 0, "value_format": 0, "latency": 1},
    {"key_format": 1, "value_format": 1, "query_tokens": 4, "causal": 1},
    {"key_format": 2, "value_format": 2, "many": 1, "latency": 3},
    {"key_format": 1, "value_format": 2, "heads_first": 1},
    {"key_format": 2, "value_format": 0, "query_f16": 1, "soft_cap": 1},
    {"key_format": 0, "value_format": 1, "query_tokens": 2, "latency": 2},
)


def specs(entry: KernelEntry, target: str) -> list[dict[str, int]]:
    """Constants that an entry is compiled with for a target, each set once."""
    shift = CHECKED_TARGETS.index(target)
    if entry.specialise is None:
        chosen = [VARIANTS[shift % 6]] if target != "sm_90a" or not entry.cooperative else VARIANTS[1:4]
        shapes = [SHAPES[0] | {"joined": 0}, SHAPES[1]]
        return [planned_spec(**shapes[(shift + i) % 2] | variant) for i, variant in enumerate(chosen)]
    second = "splitk" in entry.entry
    chosen = list(SHAPES[not second :: 2]) if target == "sm_90a" else [SHAPES[(shift + second) % 4]]
    return list({tuple(spec[n] for n in entry.spec_names): spec for spec in chosen}.values())


def modules() -> dict[str, list[KernelEntry]]:
    """Entries that are compiled together: those of one module with the same macros."""
    groups: dict[object, list[KernelEntry]] = {}
    for entry in entries():
        spec = planned_spec(**SHAPES[0]) if entry.specialise is None else SHAPES[0]
        constants = cubin_info.constants_of(entry, spec, "sm_90a")
        groups.setdefault((entry.module, tuple(constants.items())), []).append(entry)
    return {members[0].entry: members for members in groups.values()}


def compiled(entry: KernelEntry, spec: dict[str, int], target: str) -> dict[str, cubin_info.Usage]:
    source = cubin_info.source_of(entry, spec, target)
    code, log = nvrtc.compile_with_log(source, Target(target), cubin_info.VERBOSE)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == 190  # the machine: CUDA
    return cubin_info.parse_log(log)


CASES = list(itertools.product(modules(), CHECKED_TARGETS))


@needs_nvrtc
@pytest.mark.parametrize(("module", "target"), CASES)
def test_every_kernel_compiles_for_every_target(module: str, target: str) -> None:
    members = modules()[module]
    limits = limits_of_capability(int("".join(filter(str.isdigit, target))), num_sms=1)
    for spec in specs(members[0], target):
        usages = compiled(members[0], spec, target)
        assert {entry.entry for entry in members} <= set(usages)
        assert len(usages) == 1 or not members[0].overlapping
        for entry in members:
            usage, constants = usages[entry.entry], cubin_info.constants_of(entry, spec, target)
            threads, blocks = entry.block(constants)[0], constants.get("blocks_per_sm", 1)
            if threads <= 256:
                assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), (usage, spec)
            assert usage.shared <= 48 * 1024
            shared = usage.shared + entry.shared_mem(constants)
            assert shared <= limits.shared_per_block, (usage, constants)
            assert blocks * (shared + 1024) <= limits.shared_per_sm, (usage, constants)
            registers = -(-usage.registers // 8) * 8  # as they are given out
            assert registers * threads * blocks <= 64 * 1024, (usage, constants)


def test_the_specs_cover_every_variant() -> None:
    planned = next(entry for entry in entries() if entry.cooperative)
    variants = [spec for target in CHECKED_TARGETS for spec in specs(planned, target)]
    for name, values in (("key_format", {0, 1, 2}), ("value_format", {0, 1, 2}), ("query_tokens", {1, 2, 4})):
        assert {spec[name] for spec in variants} == values
    assert {spec["latency"] for spec in variants} == {0, 1, 2, 3}
    for flag in ("heads_first", "causal", "soft_cap", "query_f16", "many"):
        assert {spec[flag] for spec in variants} == {0, 1}
    for entry in entries():
        if "head_dim" not in entry.spec_names or entry.specialise is None:
            continue
        for name in entry.spec_names:
            found = {spec[name] for target in CHECKED_TARGETS for spec in specs(entry, target)}
            assert found == {shape[name] for shape in SHAPES}, (entry.entry, name)


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
