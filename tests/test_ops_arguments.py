"""Launchers: their signatures, and that every argument reaches the kernel parameter of its name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr, ops
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.fake_backend import FakeBackend, aligned
from tests.launcher_cases import (
    FACTORS,
    INTEGERS,
    LAUNCHERS,
    NUM_BLOCKS,
    SCALARS,
    addresses,
    arguments,
    call,
    format_of,
    handle,
    pairs,
)

UNLIMITED = 2**31 - 1

# The contract: positional order after `gpu, kernel`.
_WRITER = "key value k_cache v_cache slot_mapping num_tokens num_kv_heads head_dim block_size"
_SPLIT = (
    "q k_cache v_cache workspace block_tables seq_lens max_blocks_per_seq num_q_heads num_kv_heads head_dim "
    "block_size inv_sqrt_d num_splits"
)
_SINGLE = (
    "q k_cache v_cache output block_tables seq_lens max_blocks_per_seq num_seqs num_q_heads num_kv_heads "
    "head_dim block_size inv_sqrt_d"
)
_REDUCE = "workspace output seq_lens num_q_heads head_dim num_splits num_seqs stream"
CONTRACT = {
    "reshape_and_cache_bf16": f"{_WRITER} key_stride value_stride stream",
    "reshape_and_cache_fp8": f"{_WRITER} k_scale v_scale key_stride value_stride cache_stride stream",
    "reshape_and_cache_nvfp4": (
        f"{_WRITER} key_stride value_stride block_stride_bytes data_section_bytes stream"
    ),
    "bf16_absmax": "data out_max n_elems stream",
    "paged_decode_attn_bf16": f"{_SINGLE} q_stride sliding_window stream",
    "paged_decode_attn_fp8": f"{_SINGLE} k_scale v_scale q_stride cache_stride sliding_window stream",
    "paged_decode_attn_nvfp4": f"{_SINGLE} q_stride block_stride_bytes data_section_bytes stream",
    "paged_decode_attn_splitk_bf16": f"{_SPLIT} q_stride num_seqs sliding_window stream",
    "paged_decode_attn_splitk_fp8": (
        f"{_SPLIT} k_scale v_scale q_stride cache_stride num_seqs sliding_window stream"
    ),
    "paged_decode_attn_splitk_nvfp4": (
        f"{_SPLIT} q_stride block_stride_bytes data_section_bytes num_seqs stream"
    ),
    "paged_decode_attn_reduce_fp8": _REDUCE,
    "paged_decode_attn_reduce_nvfp4": _REDUCE,
    "paged_decode_attn_tiled": (
        "q k_pool v_pool tile_blocks tile_block_counts m_state l_state o_state num_seqs num_q_heads "
        "num_kv_heads head_dim block_size tile_capacity gqa_ratio blk_stride tok_stride kvh_stride "
        "last_block_valid_slots stream"
    ),
    "attention_finalize": "l_state o_state output num_seqs num_q_heads head_dim stream",
}


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def of(launcher: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(ops, launcher)).parameters.values())


@pytest.mark.parametrize("launcher", CONTRACT)
def test_positional_order_is_the_contracts(launcher: str) -> None:
    positional = [p.name for p in of(launcher) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["gpu", "kernel", *CONTRACT[launcher].split()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_keyword_only_parameters_have_defaults(launcher: str) -> None:
    for parameter in of(launcher):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (parameter.default is not parameter.empty)
    assert getattr(ops, launcher).__name__ == launcher
    assert getattr(ops, launcher).__doc__


def expected(launcher: str, given: dict[str, Any]) -> dict[str, Any]:
    """Parameter name -> value of the kernel, from the arguments alone."""
    values = {n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in given.items()}
    if launcher.startswith("paged_decode_attn_tiled"):
        values |= {"inv_sqrt_d": 0.125, "last_block_valid_slots_per_seq": 0, "num_blocks": NUM_BLOCKS}
        values["num_splits"] = 1
    elif launcher.startswith("reshape"):
        values |= {"num_slots": NUM_BLOCKS * 16, "heads_first": 0}
        if launcher.endswith("bf16"):
            values["cache_stride"] = 16 * 2 * 64
        else:
            values = {"k_scale": 1.0, "v_scale": 1.0, "k_scales": 0, "v_scales": 0} | values
    elif launcher.startswith("gather"):
        values["num_blocks"] = NUM_BLOCKS
    elif "k_cache" in values:
        values.setdefault("sliding_window", 0)
        values["num_blocks"] = NUM_BLOCKS
    return values


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_argument_reaches_the_parameter_of_its_name(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    call(gpu, launcher, given)
    assert gpu.last.values == expected(launcher, given)
    assert gpu.last.source.entry == launcher
    arrays = {gpu.last.source.parameters[i].name: a for i, a in gpu.last.arguments.items()}
    assert {n: id(a) for n, a in arrays.items()} == {
        n: id(a) for n, a in given.items() if isinstance(a, np.ndarray)
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_positional_and_keyword_calls_are_the_same(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    call(gpu, launcher, given, stream=5)
    function, kernel = getattr(ops, launcher), handle(gpu, launcher)
    function(gpu=gpu, kernel=kernel, **given, stream=5)
    wide = {n: np.int64(v) if n in INTEGERS else v for n, v in given.items()}
    function(gpu, kernel, **wide, stream=5)
    one, two, three = gpu.launches
    assert one.packed == two.packed == three.packed
    assert (one.grid, one.block, one.stream) == (two.grid, two.block, 5)
    for name in INTEGERS & given.keys():
        with pytest.raises(TypeError, match=f"{name}: got '3'"):
            function(gpu, kernel, **given | {name: "3"}, stream=5)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_pointers_may_be_ints_numpy_integers_and_device_ptrs(gpu: FakeBackend, launcher: str) -> None:
    given = addresses(launcher)
    pointers = [name for name in given if name not in SCALARS]
    for make in (int, np.uint64, np.int64, DevicePtr):
        call(gpu, launcher, given | {name: make(given[name]) for name in pointers})
    assert [launch.packed for launch in gpu.launches[1:]] == [gpu.launches[0].packed] * 3
    for name in pointers:
        assert gpu.last.values[name] == given[name]


WITH_QUERY_STRIDE = [name for name, _ in pairs({"q_stride"})]


@pytest.mark.parametrize("launcher", WITH_QUERY_STRIDE)
def test_queries_may_have_one_row_for_each_head(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher) | {"q": aligned((3, 8, 64), np.uint16), "q_stride": 512}
    call(gpu, launcher, given)
    flat = given["q"].reshape(24, 64)
    call(gpu, launcher, given, q=flat)
    call(gpu, launcher, given, q=given["q"].reshape(3, 512))
    one, two, three = gpu.launches
    assert one.packed == two.packed == three.packed
    gaps = aligned((24, 128), np.uint16)[:, :64]
    other = aligned((8, 384), np.uint16)
    for bad, stride, has in ((flat, 520, 512), (gaps, 512, 128), (gaps, 1024, 128), (other, 512, 384)):
        with pytest.raises(ArgumentValueError, match=f"q_stride: got {stride}, but q has {has} elements"):
            call(gpu, launcher, given, q=bad, q_stride=stride)
    with pytest.raises(ArgumentValueError, match="q: reaches over 1472 elements, needed are 1536"):
        call(gpu, launcher, given, q=flat[:-1])
    assert len(gpu.launches) == 3


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("dtype", ["i2", "u2", "i4", "u4", "i8", "u8"])
def test_numpy_integers_are_the_same_as_ints(gpu: FakeBackend, launcher: str, dtype: str) -> None:
    given = arguments(launcher)
    call(gpu, launcher, given)
    scalar = np.dtype(dtype).type
    call(gpu, launcher, {n: scalar(v) if n in INTEGERS else v for n, v in given.items()})
    call(gpu, launcher, {n: np.array(v, dtype) if n in INTEGERS else v for n, v in given.items()})
    one, two, three = gpu.launches
    assert one.packed == two.packed == three.packed


def test_sizes_in_numpy_integers_do_not_overflow(gpu: FakeBackend) -> None:
    """2^15 * 2^6 * 2^10 rows are no small or negative number of them."""
    many = {"num_seqs": np.int32(2**15), "num_q_heads": np.int32(64), "num_splits": np.int32(1024)}
    given = addresses("paged_decode_attn_reduce_fp8") | many | {"head_dim": np.int32(64)}
    with pytest.raises(ValueError, match=f"workspace: got 1000 elements, needed are {2**31 * 66}"):
        call(gpu, "paged_decode_attn_reduce_fp8", given, workspace=aligned(1000, np.float32))


def test_large_pools_in_numpy_integers_do_not_overflow(gpu: FakeBackend) -> None:
    given = addresses("reshape_and_cache_bf16")
    sizes = {name: np.int32(given[name]) for name in ("num_kv_heads", "head_dim", "block_size")}
    pool = DevicePtr(1 << 30, nbytes=2**40)
    call(gpu, "reshape_and_cache_bf16", given, **sizes, k_cache=pool, v_cache=pool)
    assert gpu.last.values["num_slots"] == 2**40 // (2 * 2 * 64)


@pytest.mark.parametrize(("launcher", "name"), pairs(FACTORS))
def test_factors_are_the_same_in_every_type(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    value = float(np.float32(0.1))
    for same in (value, np.float32(0.1), np.float64(value), np.array(value), np.array(0.1, np.float32)):
        call(gpu, launcher, given, **{name: same})
    assert len(gpu.launches) == 5
    assert all(launch.packed == gpu.launches[0].packed for launch in gpu.launches)
    assert gpu.last.values[name] == value
    for one in (1, 1.0, np.int64(1), np.array(1)):
        call(gpu, launcher, given, **{name: one})
        assert gpu.last.values[name] == 1.0


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"tile_capacity"})])
def test_the_tiled_launchers_keywords(gpu: FakeBackend, launcher: str) -> None:
    per_sequence = aligned(3, np.int32)
    given = arguments(launcher)
    states = {
        f"{name}_state": aligned((3, 6, *given[f"{name}_state"].shape[1:]), np.float32) for name in "mlo"
    }
    call(
        gpu,
        launcher,
        given | states,
        inv_sqrt_d=0.75,
        last_block_valid_slots_per_seq=per_sequence,
        num_blocks=5,
        num_splits=6,
    )
    values = gpu.last.values
    assert (values["inv_sqrt_d"], values["num_blocks"], values["num_splits"]) == (0.75, 5, 6)
    assert values["last_block_valid_slots_per_seq"] == per_sequence.ctypes.data
    assert gpu.last.grid == (3, 2, 6)
    for name in states:
        with pytest.raises(ArgumentValueError, match=f"{name}: got .* elements, needed are"):
            call(gpu, launcher, given | states | {name: given[name]}, num_splits=6)


# Format -> elements that a block uses, elements between blocks.
BLOCK_ELEMENTS = {
    "bf16": (16 * 2 * 64, 16 * 2 * 64),
    "fp8": (16 * 2 * 64, SCALARS["cache_stride"]),
    "nvfp4": (SCALARS["data_section_bytes"] + 16 * 2 * 4, SCALARS["block_stride_bytes"]),
}


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"k_cache"})])
def test_the_pool_size_is_the_smallest_of_what_is_known(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    flat = given["k_cache"].reshape(-1)
    block, stride = BLOCK_ELEMENTS[format_of(launcher)]
    name, unit = ("num_slots", 16) if launcher.startswith("reshape") else ("num_blocks", 1)
    unlimited = 2**63 - 1 if name == "num_slots" else UNLIMITED
    for changed, blocks in (
        ({}, 6),
        ({"k_cache": given["k_cache"][:4]}, 4),
        ({"v_cache": given["v_cache"][:5]}, 5),
        ({"k_cache": flat[: 5 * stride + block]}, 6),
        ({"k_cache": flat[: 5 * stride + block - 1]}, 5),
        ({"k_cache": flat[: block - 1]}, 0),
        ({"num_blocks": 3}, 3),
        ({"num_blocks": np.int16(3)}, 3),
        ({"num_blocks": 0}, 0),
        ({"k_cache": 4096}, 6),
        ({"k_cache": DevicePtr(4096, nbytes=given["k_cache"][:2].nbytes), "v_cache": 4096}, 2),
        ({"k_cache": DevicePtr(4096), "v_cache": 4096}, None),
        ({"k_cache": 4096, "v_cache": 4096, "num_blocks": 2**20}, 2**20),
    ):
        if blocks == 0 and name == "num_blocks":  # a reader needs a block to stand in for those outside
            with pytest.raises(ArgumentValueError, match="num_blocks: got 0"):
                call(gpu, launcher, given, **changed)
            continue
        call(gpu, launcher, given, **changed)
        assert gpu.last.values[name] == (unlimited if blocks is None else blocks * unit), changed


def test_a_bf16_pool_by_the_stride_that_is_given(gpu: FakeBackend) -> None:
    stride = 2 * 16 * 2 * 64  # K and V in turns
    pool = aligned(6 * stride, np.uint16)
    given = arguments("reshape_and_cache_bf16") | {"k_cache": pool, "v_cache": pool}
    call(gpu, "reshape_and_cache_bf16", given, cache_stride=stride)
    assert gpu.last.values["num_slots"] == 6 * 16


# Bytes that a block of the cases uses, to its last row, and between blocks.
_TILES = {
    "paged_decode_attn_tiled": (2 * 16 * 2 * 64, 2 * 16 * 2 * 64),
    "paged_decode_attn_tiled_fp8": (16 * 2 * 64, 16 * 2 * 64),
    "paged_decode_attn_tiled_nvfp4": BLOCK_ELEMENTS["nvfp4"],
    "gather_tokens_f32": (SCALARS["data_section_bytes"] + 15 * 8 + 4 + 4, SCALARS["block_stride_bytes"]),
    "gather_tokens_bf16": (SCALARS["data_section_bytes"] + 15 * 8 + 4 + 4, SCALARS["block_stride_bytes"]),
}


@pytest.mark.parametrize("launcher", _TILES)
def test_pools_of_arrays_bound_what_steps_and_gathers_read(gpu: FakeBackend, launcher: str) -> None:
    """By strides, to the end of the last block: with no figure, and never beyond it with one."""
    given = arguments(launcher)
    block, stride = _TILES[launcher]
    for name in [n for n in ("k_pool", "v_pool", "pool") if n in given]:
        flat = given[name].reshape(-1).view(np.uint8)
        for nbytes, held in ((4 * stride + block, 5), (4 * stride + block - 2, 4), (block, 1)):
            array = flat[:nbytes].view(given[name].dtype)
            for pool in (array, DevicePtr(4096, nbytes=nbytes)):
                call(gpu, launcher, given, **{name: pool})
                assert gpu.last.values["num_blocks"] == held
                call(gpu, launcher, given, **{name: pool}, num_blocks=np.int8(1))
                assert gpu.last.values["num_blocks"] == 1
                with pytest.raises(ArgumentValueError) as caught:
                    call(gpu, launcher, given, **{name: pool}, num_blocks=held + 1)
                message = f"num_blocks: got {held + 1}, but {name} holds {held} blocks"
                assert str(caught.value) == message
        with pytest.raises(ArgumentValueError, match="a pool shorter than one block"):
            call(gpu, launcher, given, **{name: flat[: block - 2].view(given[name].dtype)})
    bare = addresses(launcher)
    call(gpu, launcher, bare)
    assert gpu.last.values["num_blocks"] == UNLIMITED


_OWN_LAUNCHER = """
from typing import Any, Optional
from cupaged.launch import KernelLaunch
from cupaged.ops._checks import launcher, remembered

def bf16_absmax(gpu: object, kernel: object, data: Any, out_max: Any, n_elems: int, stream: Any,
                *, seen: Any = None, most: Optional[int] = None, factor: float = 1.0) -> None:
    told.append((data, n_elems, most))

@remembered
def doubled(count: int, most: Optional[int] = None) -> int:
    return 2 * count if most is None else min(2 * count, most)

bf16_absmax = launcher(bf16_absmax)
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_annotations_may_be_text_or_types(gpu: FakeBackend, future: str) -> None:
    """Integers and pointers are found by what they are annotated with, however that was written."""
    space: dict[str, Any] = {"told": []}
    exec(compile(future + _OWN_LAUNCHER, "own_launcher", "exec", dont_inherit=True), space)
    given = ("data", 8192, np.int8(100), 0)
    space["bf16_absmax"](gpu, gpu.kernel("bf16_absmax", "bf16_absmax"), 4096, *given[1:], most=np.int8(3))
    assert space["told"] == [(4096, 100, 3)]
    assert [type(value) for value in space["told"][0]] == [int, int, int]
    with pytest.raises(ArgumentTypeError, match=r"most: got 'x' .*allowed is an integer"):
        space["bf16_absmax"](gpu, gpu.kernel("bf16_absmax", "bf16_absmax"), 4096, *given[1:], most="x")
    assert space["doubled"](np.int8(100)) == 200
    assert space["doubled"](np.int8(100), np.int8(120)) == 120
    with pytest.raises(ArgumentTypeError, match="count: got None"):
        space["doubled"](None)


def test_blocks_without_a_stride_are_all_the_same(gpu: FakeBackend) -> None:
    launcher = "paged_decode_attn_tiled"
    given = arguments(launcher)
    call(gpu, launcher, given, blk_stride=0)
    assert gpu.last.values["num_blocks"] == UNLIMITED
    with pytest.raises(ArgumentValueError, match="num_blocks: got 7, but k_pool holds 0 blocks"):
        call(gpu, launcher, given, blk_stride=0, num_blocks=7, k_pool=aligned((8,), given["k_pool"].dtype))


@pytest.mark.parametrize("launcher", ["paged_decode_attn_reduce_fp8", "paged_decode_attn_tiled_nvfp4"])
def test_many_sequences_go_along_x(gpu: FakeBackend, launcher: str) -> None:
    call(gpu, launcher, addresses(launcher), num_seqs=1_000_000)
    assert gpu.last.grid[0] == 1_000_000


@pytest.mark.parametrize("launcher", ["paged_decode_attn_bf16", "paged_decode_attn_splitk_fp8"])
def test_many_sequences_share_the_blocks_that_there_are(gpu: FakeBackend, launcher: str) -> None:
    call(gpu, launcher, addresses(launcher), num_seqs=1_000_000)
    grid = gpu.last.grid
    call(gpu, launcher, addresses(launcher), num_seqs=2_000_000)
    assert gpu.last.grid == grid
    assert 0 < grid[0] <= 2 * gpu.num_sms


ZERO = [
    (launcher, name)
    for launcher, name in pairs({"num_seqs", "num_tokens", "n_elems", "num_rows", "row_elems"})
]


@pytest.mark.parametrize(("launcher", "name"), ZERO)
@pytest.mark.parametrize("zero", [0, np.int64(0)])
def test_nothing_to_do_is_no_launch_and_no_error(
    gpu: FakeBackend, launcher: str, name: str, zero: Any
) -> None:
    given = {n: v if n in SCALARS else 0 for n, v in addresses(launcher).items()}
    call(gpu, launcher, given, **{name: zero})
    empty = {n: v if n in SCALARS else v[:0] for n, v in arguments(launcher).items()}
    call(
        gpu, launcher, empty | {n: 0 for n in ("out_max", "k_cache", "v_cache") if n in empty}, **{name: zero}
    )
    assert len(gpu.launches) == len(gpu.loads) == 0
