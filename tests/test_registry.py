"""What the registry says about each kernel agrees with its source, and what it refuses."""

from __future__ import annotations

import itertools
import re

import pytest

from cupaged.errors import ArgumentValueError, KernelSourceError
from cupaged.registry import (
    DTYPES,
    MAX_BLOCK_SIZE,
    SUPPORTED_HEAD_DIMS,
    DeviceLimits,
    KernelEntry,
    div_ceil,
    entries,
    find,
    gqa_ratio,
    head_tiles,
    limits_of_capability,
)
from cupaged.source import Parameter, include_closure, kernels_dir, parse_parameters

HOPPER = limits_of_capability(90, 132)
EVERY = pytest.mark.parametrize("entry", entries(), ids=lambda e: e.entry)
ATTENTION = [e for e in entries() if "gqa_ratio" in e.spec_names]
SIMPLE_ATTENTION = [e for e in ATTENTION if not e.cooperative]
WITH_BLOCKS = [e for e in entries() if "block_size" in e.spec_names]
WITH_HEAD_DIM = [e for e in entries() if "head_dim" in e.spec_names]

ENTRIES = {
    "reshape_and_cache_bf16": ["reshape_and_cache_bf16"],
    "reshape_and_cache_fp8": ["reshape_and_cache_fp8"],
    "reshape_and_cache_nvfp4": ["reshape_and_cache_nvfp4"],
    "bf16_absmax": ["bf16_absmax", "bf16_absmax_rows"],
    "paged_decode_attn_bf16": ["paged_decode_attn_bf16", "paged_decode_attn_splitk_bf16"],
    "paged_decode_attn_fp8": ["paged_decode_attn_fp8", "paged_decode_attn_splitk_fp8"],
    "paged_decode_attn_nvfp4": ["paged_decode_attn_nvfp4", "paged_decode_attn_splitk_nvfp4"],
    "paged_decode_attn_planned_bf16": ["paged_decode_attn_planned_bf16"],
    "paged_decode_attn_planned_fp8": ["paged_decode_attn_planned_fp8"],
    "paged_decode_attn_planned_nvfp4": ["paged_decode_attn_planned_nvfp4"],
    "paged_decode_attn_reduce": ["paged_decode_attn_reduce_fp8", "paged_decode_attn_reduce_nvfp4"],
    "paged_decode_attn_tiled": ["attention_finalize", "paged_decode_attn_tiled"],
}


def text_of(entry: KernelEntry) -> str:
    return (kernels_dir() / f"{entry.module}.cu").read_text()


def parameters_of(entry: KernelEntry) -> dict[str, Parameter]:
    return {p.name: p for p in parse_parameters(text_of(entry), entry.entry)}


def specialise(entry: KernelEntry, **changed: int) -> dict[str, int]:
    usual = {"head_dim": 64, "block_size": 16, "num_q_heads": 8, "num_kv_heads": 2, "gqa_ratio": 4}
    usual |= {"data_section_bytes": 1024} | changed
    return entry.specialise({name: usual[name] for name in entry.scalar_names})


def constants(entry: KernelEntry, limits: DeviceLimits = HOPPER, **changed: int) -> dict[str, int]:
    return entry.constants(specialise(entry, **changed), limits)


def grid_of(entry: KernelEntry, **sizes: int) -> tuple[int, int, int]:
    return entry.grid(tuple(sizes[name] for name in entry.grid_names), constants(entry), HOPPER)


def test_the_kernels_there_are() -> None:
    found: dict[str, list[str]] = {}
    for entry in sorted(entries(), key=lambda e: e.entry):
        found.setdefault(entry.module, []).append(entry.entry)
        assert find(entry.module, entry.entry) is entry
    assert found == ENTRIES


def test_every_entry_in_the_sources_is_registered() -> None:
    for path in kernels_dir().glob("*.cu"):
        declarations = path.read_text().split('extern "C" __global__ void')[1:]
        names = [re.search(r"(\w+)\(\s*const", text) for text in declarations]
        assert sorted(name[1] for name in names if name) == ENTRIES[path.stem]
        assert len(declarations) == len(ENTRIES[path.stem])


@pytest.mark.parametrize(("module", "entry"), [("bf16_absmax", "x"), ("", "")])
def test_an_unknown_kernel_is_named_with_those_there_are(module: str, entry: str) -> None:
    with pytest.raises(KernelSourceError, match=f"no kernel {module}:{entry}; there are bf16_absmax:bf16"):
        find(module, entry)


def test_an_entry_of_another_module_is_shown_where_it_is() -> None:
    right = re.escape('did you mean gpu.kernel("paged_decode_attn_fp8", "paged_decode_attn_splitk_fp8")?')
    with pytest.raises(KernelSourceError, match=right):
        find("paged_decode_attn_splitk_fp8", "paged_decode_attn_splitk_fp8")


@EVERY
def test_names_are_parameters_of_the_source(entry: KernelEntry) -> None:
    parameters = parameters_of(entry)
    for group in (entry.scalar_names, entry.grid_names, entry.holds, entry.multiples, entry.strided):
        assert set(group) <= set(parameters)
    for name in (*entry.scalar_names, *entry.grid_names):
        assert parameters[name].kind in ("u32", "u64"), name


@EVERY
def test_every_pointer_says_what_it_holds_and_how_it_is_aligned(entry: KernelEntry) -> None:
    pointers = {name for name, p in parameters_of(entry).items() if p.kind == "ptr"}
    assert set(entry.holds) == pointers
    assert entry.strided <= pointers
    element = {"bf16": 2, "fp8": 1, "nvfp4": 1, "f32": 4, "i32": 4, "u32": 4, "i64": 8}
    assert element.keys() == DTYPES.keys()
    for name in pointers:
        multiple = entry.multiples[name]
        assert multiple & (multiple - 1) == 0
        assert multiple % element[entry.holds[name]] == 0, name


C_TYPES = {
    "bf16": ("bf16_bits*", "u8*"),
    "fp8": ("u8*",),
    "nvfp4": ("u8*",),
    "f32": ("float*", "float2*"),
    "i32": ("i32*",),
    "u32": ("u32*",),
    "i64": ("i64*",),
}


@EVERY
def test_pointer_types_in_the_source_are_what_they_hold(entry: KernelEntry) -> None:
    declaration = re.search(rf"\b{entry.entry}\(([^)]*)\)", text_of(entry))
    assert declaration is not None
    for name, holds in entry.holds.items():
        spelled = re.search(rf"(\w+\*) {name}\b", declaration[1])
        assert spelled is not None, name
        assert spelled[1] in C_TYPES[holds], name
        if spelled[1] == "float2*":
            assert entry.multiples[name] % 8 == 0


@EVERY
def test_inputs_are_const_and_outputs_are_not(entry: KernelEntry) -> None:
    written = {
        "output",
        "m_state",
        "l_state",
        "o_state",
        "out_max",
        "lse",
        "part_o",
        "part_state",
        "counters",
    }
    if entry.entry.startswith("reshape"):
        written |= {"k_cache", "v_cache"}
    if "splitk" in entry.entry:
        written.add("workspace")
    if entry.entry == "attention_finalize":
        written -= {"l_state", "o_state"}
    for name in entry.holds:
        assert parameters_of(entry)[name].const == (name not in written), name


@EVERY
def test_constants_are_the_macros_that_the_source_uses(entry: KernelEntry) -> None:
    assert set(entry.spec_names) == set(specialise(entry))
    defines = dict(entry.defines(constants(entry)))
    assert defines["SPEC_HEAD_DIM"] == "64" if "head_dim" in entry.spec_names else not defines
    closure = include_closure(kernels_dir() / f"{entry.module}.cu", (kernels_dir(),))
    text = "".join(re.sub(r"//[^\n]*", "", path.read_text()) for path in closure)
    used = set(re.findall(r"\bSPEC_\w+", text))
    if entry.entry == "attention_finalize":
        used = {"SPEC_HEAD_DIM"}  # the other entry of its module takes more, and is compiled out
    assert set(defines) <= used
    assert used - set(defines) <= ({"SPEC_JOINED"} if entry.cooperative else set())


@pytest.mark.parametrize("entry", WITH_HEAD_DIM, ids=lambda e: e.entry)
@pytest.mark.parametrize("head_dim", [0, 1, 8, 46, 48, 63, 65, 72, 80, 96, 100, 112, 160, 512])
def test_unsupported_head_dims(entry: KernelEntry, head_dim: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"head_dim: got {head_dim}, allowed are 64, 128, 192, 256"):
        specialise(entry, head_dim=head_dim)


@pytest.mark.parametrize("entry", WITH_HEAD_DIM, ids=lambda e: e.entry)
def test_supported_head_dims(entry: KernelEntry) -> None:
    for head_dim in SUPPORTED_HEAD_DIMS:
        assert specialise(entry, head_dim=head_dim)["head_dim"] == head_dim


@pytest.mark.parametrize("entry", WITH_BLOCKS, ids=lambda e: e.entry)
def test_block_sizes(entry: KernelEntry) -> None:
    # The ring's NVFP4 kernel wants scale copies of whole 16 bytes: with 2 heads of 64, runs of 2 tokens.
    odd = () if entry.entry == "paged_decode_attn_planned_nvfp4" else (1, 3)
    for block_size in (*odd, 2, 8, 16, 100, MAX_BLOCK_SIZE):
        assert specialise(entry, block_size=block_size)["block_size"] == block_size
    for block_size in (0, MAX_BLOCK_SIZE + 1):
        with pytest.raises(ArgumentValueError, match=f"block_size: got {block_size}, allowed is 1 to 256"):
            specialise(entry, block_size=block_size)


@pytest.mark.parametrize(
    ("heads", "ratio"),
    [((9, 3), 3), ((28, 4), 7), ((24, 4), 6), ((5, 1), 5), ((1, 1), 1), ((16, 1), 16), ((128, 8), 16)],
)
def test_whole_ratios(heads: tuple[int, int], ratio: int) -> None:
    assert gqa_ratio(*heads) == ratio
    for entry in ATTENTION:
        changed = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "gqa_ratio": ratio}
        assert specialise(entry, **changed)["gqa_ratio"] == ratio


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (5, 0), (0, 0), (0, 2), (2, 4), (17, 1), (64, 2)])
def test_other_ratios_are_refused(heads: tuple[int, int]) -> None:
    message = f"num_q_heads, num_kv_heads: got {heads[0]}, {heads[1]}.*(must be|allowed)"
    for entry in ATTENTION:
        with pytest.raises(ArgumentValueError, match=message):
            specialise(entry, num_q_heads=heads[0], num_kv_heads=heads[1])


def test_the_tiled_kernels_own_ratio_must_agree() -> None:
    entry = find("paged_decode_attn_tiled", "paged_decode_attn_tiled")
    with pytest.raises(ArgumentValueError, match="gqa_ratio: got 2, but num_q_heads / num_kv_heads is 4"):
        specialise(entry, gqa_ratio=2)


@EVERY
def test_blocks_are_whole_warps_and_fit_every_device(entry: KernelEntry) -> None:
    """Whatever a specialisation does not refuse must launch: threads and shared memory within the limits."""
    devices = [limits_of_capability(capability, 100) for capability in (80, 86, 89, 90, 100, 120)]
    launchable = 0
    for head_dim, ratio, kv_heads, limits in itertools.product(
        SUPPORTED_HEAD_DIMS, range(1, 17), (1, 2, 3, 4, 8, 16, 32), devices
    ):
        heads = {"num_q_heads": ratio * kv_heads, "num_kv_heads": kv_heads, "gqa_ratio": ratio}
        try:
            found = constants(entry, limits, head_dim=head_dim, **heads)
        except ArgumentValueError:
            if not entry.cooperative:
                raise
            continue
        x, y, z = entry.block(found)
        assert (y, z) == (1, 1)
        assert x % 32 == 0
        assert 32 <= x <= 1024
        assert 0 <= entry.shared_mem(found) <= limits.shared_per_block
        launchable += 1
    assert launchable > 0


def test_attention_blocks_grow_with_groups_of_eight_heads() -> None:
    assert [head_tiles(ratio) for ratio in (1, 8, 9, 16)] == [1, 1, 2, 2]
    for entry in SIMPLE_ATTENTION:
        blocks = [
            entry.block(constants(entry, num_q_heads=2 * ratio, gqa_ratio=ratio))[0]
            for ratio in (1, 8, 9, 16)
        ]
        assert blocks == [128, 128, 256, 256]


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_decode_grids(fmt: str) -> None:
    single = find(f"paged_decode_attn_{fmt}", f"paged_decode_attn_{fmt}")
    split = find(f"paged_decode_attn_{fmt}", f"paged_decode_attn_splitk_{fmt}")
    assert grid_of(single, num_seqs=70_000, num_kv_heads=8) == (70_000, 8, 1)
    assert grid_of(split, num_seqs=3, num_kv_heads=8, num_splits=5) == (3, 8, 5)
    assert 0 in grid_of(single, num_seqs=0, num_kv_heads=8)
    assert 0 in grid_of(split, num_seqs=0, num_kv_heads=8, num_splits=5)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_planned_grids_fill_the_device_whatever_the_batch(fmt: str) -> None:
    planned = find(f"paged_decode_attn_planned_{fmt}", f"paged_decode_attn_planned_{fmt}")
    blocks = constants(planned)["blocks_per_sm"] * HOPPER.num_sms
    assert [grid_of(planned, num_seqs=n) for n in (1, 512)] == [(blocks, 1, 1)] * 2
    assert 0 in grid_of(planned, num_seqs=0)
    with pytest.raises(ArgumentValueError, match="use the split-K launchers"):
        constants(planned, limits_of_capability(89, 100))


def test_other_grids() -> None:
    for fmt in ("fp8", "nvfp4"):
        reduce = find("paged_decode_attn_reduce", f"paged_decode_attn_reduce_{fmt}")
        assert grid_of(reduce, num_seqs=3, num_q_heads=8) == (3, 8, 1)
    tiled = find("paged_decode_attn_tiled", "paged_decode_attn_tiled")
    finalize = find("paged_decode_attn_tiled", "attention_finalize")
    assert grid_of(tiled, num_seqs=3, num_kv_heads=2) == (3, 2, 1)
    assert grid_of(finalize, num_seqs=3, num_q_heads=8) == (3, 8, 1)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_writer_grids_cover_every_group_of_values(fmt: str) -> None:
    entry = find(f"reshape_and_cache_{fmt}", f"reshape_and_cache_{fmt}")
    for tokens, heads, blocks in ((0, 2, 0), (1, 1, 1), (64, 1, 1), (65, 1, 2), (1000, 8, 125)):
        assert grid_of(entry, num_tokens=tokens, num_kv_heads=heads) == (blocks, 1, 1)


def test_absmax_grids() -> None:
    flat, rows = find("bf16_absmax", "bf16_absmax"), find("bf16_absmax", "bf16_absmax_rows")
    for n_elems, blocks in ((0, 0), (1, 1), (512, 1), (513, 2), (512 * 256, 256), (2**32 - 1, 256)):
        assert grid_of(flat, n_elems=n_elems) == (blocks, 1, 1)
    for num_rows, row_elems, blocks in ((0, 8, 0), (8, 0, 0), (1, 8, 1), (2**20, 8, 1024)):
        assert grid_of(rows, num_rows=num_rows, row_elems=row_elems) == (blocks, 1, 1)


@pytest.mark.parametrize(
    ("capability", "kib", "bulk"),
    [
        *((80, 163, False), (86, 99, False), (87, 163, False), (88, 163, False), (89, 99, False)),
        *((90, 227, True), (100, 227, True), (103, 227, True), (120, 99, True), (121, 99, True)),
    ],
)
def test_limits_of_capabilities(capability: int, kib: int, bulk: bool) -> None:
    limits = limits_of_capability(capability, 7)
    assert (limits.num_sms, limits.shared_per_block, limits.bulk_copies) == (7, kib * 1024, bulk)
    assert limits.shared_per_block < limits.shared_per_sm


def test_div_ceil() -> None:
    for a in range(50):
        for b in range(1, 20):
            assert (div_ceil(a, b) - 1) * b < a <= div_ceil(a, b) * b
    assert div_ceil(2**63, 2) == 2**62
