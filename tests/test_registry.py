"""What the registry says about each kernel agrees with its source, and what it refuses."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from cupaged.errors import ArgumentValueError, KernelSourceError
from cupaged.registry import (
    DTYPES,
    MAX_BLOCK_SIZE,
    MAX_GQA_RATIO,
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
from cupaged.registry.decode import planned_spec
from cupaged.registry.ring import RingProblem, can_bulk, ring_constants, ring_shape
from cupaged.source import include_closure, kernels_dir
from tests.registry_cases import (
    ATTENTION,
    DECODE,
    DEVICES,
    EVERY,
    HOPPER,
    PINNED,
    TILED,
    WITH_BLOCKS,
    WITH_HEAD_DIM,
    constants,
    parameters_of,
    specialise,
    text_of,
)

ENTRIES = {
    "input_checks": [
        *("input_blocks", "input_finite", "input_range", "input_scale_bytes"),
        *("input_scales", "input_sinks", "input_slots", "input_value"),
    ],
    "reshape_and_cache_bf16": ["reshape_and_cache_bf16"],
    "reshape_and_cache_fp8": ["reshape_and_cache_fp8"],
    "reshape_and_cache_nvfp4": ["reshape_and_cache_nvfp4"],
    "bf16_absmax": ["bf16_absmax", "bf16_absmax_rows"],
    "cache_blocks": ["copy_cache_blocks", "gather_tokens_bf16", "gather_tokens_f32"],
    "merge_states": [f"merge_states_{kind}" for kind in ("bf16", "f16", "f32", "f32_to_bf16", "f32_to_f16")],
    "paged_decode_attn_bf16": ["paged_decode_attn_bf16", "paged_decode_attn_splitk_bf16"],
    "paged_decode_attn_fp8": ["paged_decode_attn_fp8", "paged_decode_attn_splitk_fp8"],
    "paged_decode_attn_nvfp4": ["paged_decode_attn_nvfp4", "paged_decode_attn_splitk_nvfp4"],
    "paged_decode_attn_planned": [
        *("paged_decode_attn_chunked", "paged_decode_attn_merge_chunks"),
        *("paged_decode_attn_plan", "paged_decode_attn_planned"),
    ],
    "paged_decode_attn_reduce": ["paged_decode_attn_reduce_fp8", "paged_decode_attn_reduce_nvfp4"],
    "paged_decode_attn_tiled": ["attention_finalize", "attention_merge_states", "paged_decode_attn_tiled"],
    "paged_decode_attn_tiled_fp8": ["paged_decode_attn_tiled_fp8"],
    "paged_decode_attn_tiled_nvfp4": ["paged_decode_attn_tiled_nvfp4"],
}


def test_the_kernels_there_are() -> None:
    found: dict[str, list[str]] = {}
    for entry in sorted(entries(), key=lambda e: e.entry):
        found.setdefault(entry.module, []).append(entry.entry)
        assert find(entry.module, entry.entry) is entry
    assert found == ENTRIES


def test_every_entry_in_the_sources_is_registered() -> None:
    for path in kernels_dir().glob("*.cu"):
        declarations = path.read_text().split('extern "C" __global__ void')[1:]
        names = [re.search(r"(\w+)\(\s*(?:const )?\w+\*", text) for text in declarations]
        assert sorted(name[1] for name in names if name) == ENTRIES[path.stem]
        assert len(declarations) == len(ENTRIES[path.stem])


@pytest.mark.parametrize(("module", "entry"), [("zz", "qq"), ("", "")])
def test_an_unknown_kernel_is_named_with_those_there_are(module: str, entry: str) -> None:
    with pytest.raises(KernelSourceError, match=f"no kernel {module}:{entry}; there are bf16_absmax:bf16"):
        find(module, entry)


def test_a_typo_is_answered_with_the_nearest_names() -> None:
    right = "; the nearest are bf16_absmax:bf16_absmax, bf16_absmax:bf16_absmax_rows$"
    with pytest.raises(KernelSourceError, match=right):
        find("bf16_absmx", "bf16_absmx")


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
    assert {*entry.nullable, *sum(entry.nullable.values(), ())} <= parameters_of(entry).keys()
    element = {"bf16": 2, "f16": 2, "half": 2, "fp8": 1, "nvfp4": 1, "bytes": 1, "f32": 4, "i32": 4, "u32": 4,
               "i64": 8}  # fmt: skip
    assert element.keys() == DTYPES.keys()
    for name in pointers:
        multiple = entry.multiples[name]
        assert multiple & (multiple - 1) == 0
        assert multiple % element[entry.holds[name]] == 0, name


C_TYPES = {
    "bf16": ("bf16_bits*", "u8*"),
    "half": ("u16*",),
    "f16": ("u16*",),
    "fp8": ("u8*",),
    "nvfp4": ("u8*",),
    "bytes": ("u8*",),
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
        "first",
        "output",
        "m_state",
        "l_state",
        "o_state",
        "out_max",
        "lse",
        "part_o",
        "part_state",
        "counters",
        "k_target",
        "v_target",
        "out",
        "out_lse",
        "m_out",
        "l_out",
        "o_out",
    }
    if entry.entry.startswith("reshape"):
        written |= {"k_cache", "v_cache"}
    if "splitk" in entry.entry:
        written.add("workspace")
    if entry.entry == "attention_finalize":
        written -= {"l_state", "o_state"}
    if entry.entry == "paged_decode_attn_chunked":
        written.add("states")
    if entry.entry == "paged_decode_attn_plan":
        written.add("plan")
    for name in entry.holds:
        assert parameters_of(entry)[name].const == (name not in written), name


SHAPING = {"SPEC_LATENCY"}  # for `ring_shape` alone


@EVERY
def test_constants_are_the_macros_that_the_source_uses(entry: KernelEntry) -> None:
    """Those that a source gives a default (``#ifndef``) may be left out."""
    assert set(entry.spec_names) == set(specialise(entry))
    defines = dict(entry.defines(constants(entry)))
    assert defines["SPEC_HEAD_DIM"] == "64" if "head_dim" in entry.spec_names else not defines
    closure = include_closure(kernels_dir() / f"{entry.module}.cu", (kernels_dir(),))
    text = "".join(re.sub(r"//[^\n]*", "", path.read_text()) for path in closure)
    used, optional = set(re.findall(r"\bSPEC_\w+", text)), set(re.findall(r"#ifndef (SPEC_\w+)", text))
    if entry.entry in ("attention_finalize", "attention_merge_states"):
        used = {"SPEC_HEAD_DIM"}  # the other entry of their module takes more, and is compiled out
    assert set(defines) - SHAPING <= used
    assert used - set(defines) <= (set() if entry.specialise is None else optional)


def test_each_entry_of_the_decode_modules_is_compiled_alone() -> None:
    for entry in (*DECODE, *PINNED):
        alone = {"split"} if entry in DECODE else {"entry"}
        others = [e for e in entries() if e.module == entry.module and e is not entry]
        mine, theirs = constants(entry), [constants(e) for e in others]
        assert others
        assert all(mine.keys() == their.keys() for their in theirs)
        assert all(any(mine[name] != their[name] for name in alone) for their in theirs)


@pytest.mark.parametrize("entry", WITH_HEAD_DIM, ids=lambda e: e.entry)
def test_unsupported_head_dims(entry: KernelEntry) -> None:
    for head_dim in (0, 1, 8, 15, 17, 46, 63, 65, 72, 100, 255, 264, 272, 512):
        with pytest.raises(ArgumentValueError, match=f"head_dim: got {head_dim}, allowed are 16, 32,.* 256$"):
            specialise(entry, head_dim=head_dim)


@pytest.mark.parametrize("entry", WITH_HEAD_DIM, ids=lambda e: e.entry)
def test_supported_head_dims(entry: KernelEntry) -> None:
    assert SUPPORTED_HEAD_DIMS == (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    for head_dim in SUPPORTED_HEAD_DIMS:
        assert specialise(entry, head_dim=head_dim)["head_dim"] == head_dim


@pytest.mark.parametrize("entry", WITH_BLOCKS, ids=lambda e: e.entry)
def test_block_sizes(entry: KernelEntry) -> None:
    for block_size in (1, 2, 3, 8, 16, 100, 255, MAX_BLOCK_SIZE):
        assert specialise(entry, block_size=block_size)["block_size"] == block_size
    for block_size in (0, MAX_BLOCK_SIZE + 1):
        with pytest.raises(ArgumentValueError, match=f"block_size: got {block_size}, allowed is 1 to 256"):
            specialise(entry, block_size=block_size)


@pytest.mark.parametrize(
    ("heads", "ratio"),
    [
        *(((9, 3), 3), ((28, 4), 7), ((24, 4), 6), ((5, 1), 5), ((1, 1), 1), ((16, 1), 16), ((17, 1), 17)),
        *(((128, 8), 16), ((64, 2), 32), ((128, 1), 128), ((100_000, 100_000), 1)),
    ],
)
def test_whole_ratios(heads: tuple[int, int], ratio: int) -> None:
    assert gqa_ratio(*heads) == ratio
    for entry in ATTENTION:
        changed = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "gqa_ratio": ratio}
        assert specialise(entry, **changed)["gqa_ratio"] == ratio


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (5, 0), (0, 0), (0, 2), (2, 4), (129, 1), (512, 2)])
def test_other_ratios_are_refused(heads: tuple[int, int]) -> None:
    message = f"num_q_heads, num_kv_heads: got {heads[0]}, {heads[1]}.*(must be|allowed)"
    with pytest.raises(ArgumentValueError, match=message):
        gqa_ratio(*heads)
    for entry in (*DECODE, *TILED):
        with pytest.raises(ArgumentValueError, match=message):
            specialise(entry, num_q_heads=heads[0], num_kv_heads=heads[1])


def test_constants_of_the_planned_kernels() -> None:
    spec = planned_spec(head_dim=64, gqa_ratio=4, num_kv_heads=2, block_size=16, causal=1)
    assert (spec["causal"], spec["query_tokens"], spec["soft_cap"]) == (1, 1, 0)
    for entry in PINNED:
        assert set(entry.spec_names) == set(spec)
    with pytest.raises(ArgumentValueError, match=r"got the constants \['size'\], allowed are key_format,"):
        planned_spec(size=3)


def test_the_tiled_kernels_own_ratio_must_agree() -> None:
    entry = find("paged_decode_attn_tiled", "paged_decode_attn_tiled")
    with pytest.raises(ArgumentValueError, match="gqa_ratio: got 2, but num_q_heads / num_kv_heads is 4"):
        specialise(entry, gqa_ratio=2)


RATIOS = (1, 2, 3, 7, 8, 9, 16, 17, 40, 64, 65, MAX_GQA_RATIO)


@EVERY
def test_blocks_are_whole_warps_and_fit_every_device(entry: KernelEntry) -> None:
    """Whatever a specialisation does not refuse must launch: threads and shared memory within the limits."""
    for head_dim, ratio, kv_heads, limits in itertools.product(
        SUPPORTED_HEAD_DIMS, RATIOS, (1, 2, 3, 5, 8, 32), DEVICES
    ):
        heads = {"num_q_heads": ratio * kv_heads, "num_kv_heads": kv_heads, "gqa_ratio": ratio}
        found = constants(entry, limits, head_dim=head_dim, **heads)
        x, y, z = entry.block(found)
        assert (y, z) == (1, 1)
        assert x % 32 == 0
        assert 32 <= x <= 1024
        assert 0 <= entry.shared_mem(found) <= limits.shared_per_block


def problems(count: int) -> list[tuple[RingProblem, DeviceLimits]]:
    """Problems of every kind, with a device for each."""
    draw = random.Random(7)
    formats = ("bf16", "fp8", "nvfp4")
    return [
        (
            RingProblem(
                draw.choice(formats),
                draw.choice(formats),
                draw.choice((1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 40, 128)),
                draw.choice(SUPPORTED_HEAD_DIMS),
                draw.choice((1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 100, 256)),
                draw.choice(RATIOS) * draw.randint(1, 8),
                heads_first=draw.random() < 0.3,
                latency=draw.randrange(4),
            ),
            draw.choice(DEVICES),
        )
        for _ in range(count)
    ]


def test_ring_shapes_divide_all_work_and_fit() -> None:
    """Every query row of every KV head has one warp position; stages hold whole tiles of every warp."""
    bulk = set()
    for problem, limits in problems(3000):
        shape = ring_shape(problem, limits)
        tiles = head_tiles(problem.head_rows)
        assert problem.num_kv_heads % shape.block_heads == 0
        assert shape.block_head_tiles % shape.warp_row_tiles == 0
        spare = shape.block_head_tiles - tiles  # of a KV head's last warp
        assert 0 <= spare < shape.warp_row_tiles or (shape.block_heads == 1 and spare < 0)
        slices = shape.slices(problem.num_kv_heads, problem.head_rows)
        parts = div_ceil(tiles, shape.block_head_tiles)
        assert slices * shape.block_heads == problem.num_kv_heads * parts
        assert shape.stage_tiles % shape.token_warps == 0
        assert 3 <= shape.stages <= 6
        assert shape.threads == 32 * shape.groups * shape.token_warps <= 512
        row = {"bf16": (2, 1), "fp8": (1, 1), "nvfp4": (9, 16)}  # bytes of a dim, as a ratio
        tile = 0
        for fmt in (problem.key_format, problem.value_format):
            over, under = row[fmt]
            tile += div_ceil(16 * shape.block_heads * problem.head_dim * over // under, 128) * 128
        ring = shape.stages * shape.stage_tiles * tile
        assert shape.blocks_per_sm * (ring + 1024) <= limits.shared_per_sm
        assert ring <= limits.shared_per_block
        assert shape.bulk <= limits.bulk_copies
        bulk.add(shape.bulk)
    assert bulk == {True, False}


@pytest.mark.parametrize(
    ("fmt", "heads", "head_dim", "block_size", "heads_first", "allowed"),
    [
        ("bf16", 1, 16, 1, False, True),  # a row of 32 bytes
        ("fp8", 1, 16, 1, False, True),
        ("nvfp4", 1, 16, 1, False, False),  # 8 bytes of values
        ("nvfp4", 2, 64, 2, False, True),  # scales of 2 tokens and 2 heads: 16 bytes
        ("nvfp4", 2, 64, 1, False, False),
        ("nvfp4", 2, 64, 15, False, False),  # runs of one token
        ("nvfp4", 3, 64, 48, False, True),
        ("nvfp4", 2, 64, 2, True, False),  # each head apart: 8 bytes of scales
        ("nvfp4", 2, 64, 4, True, True),
    ],
)
def test_bulk_copies_move_multiples_of_16_bytes(
    fmt: str, heads: int, head_dim: int, block_size: int, heads_first: bool, allowed: bool
) -> None:
    problem = RingProblem(fmt, fmt, heads, head_dim, block_size, 4, heads_first)
    assert can_bulk(problem, heads, HOPPER) == allowed
    assert not can_bulk(problem, heads, limits_of_capability(89, 100))


@pytest.mark.parametrize(("kv_heads", "joined"), [(8, 1), (16, 1), (17, 0), (32, 0)])
def test_only_blocks_with_all_heads_are_fetched_in_one_piece(kv_heads: int, joined: int) -> None:
    """A slice of the heads is contiguous in the values and in the scales, but not across them."""
    problem = RingProblem("nvfp4", "nvfp4", kv_heads, 64, 16, 4, joined=True, most_warps=16)
    found = ring_constants(problem, HOPPER)
    assert (found["joined"], found["block_heads"] == kv_heads) == (joined, bool(joined))
    assert found["bulk"] == can_bulk(replace(problem, joined=bool(joined)), found["block_heads"], HOPPER)


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
