"""Handles of the package's own kernels: specialisation, geometry, alignment, and arrays as arguments."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.launch import KernelLaunch
from cupaged.registry.decode import planned_spec
from tests.fake_backend import FakeBackend, aligned, builder

REDUCE = ("paged_decode_attn_reduce", "paged_decode_attn_reduce_fp8")
WRITER = ("reshape_and_cache_fp8", "reshape_and_cache_fp8")
DECODE = ("paged_decode_attn_bf16", "paged_decode_attn_bf16")
ADDRESS = 1 << 20


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def reduce(gpu: FakeBackend, kernel: KernelHandle, head_dim: int = 64, **changed: Any) -> KernelLaunch:
    """A launch of the split-K reduction, still to be launched: 3 sequences, 8 heads."""
    values = {"workspace": ADDRESS, "output": ADDRESS, "seq_lens": ADDRESS, "num_seqs": 3} | changed
    launch = builder(gpu, kernel)
    for name in ("workspace", "output", "seq_lens"):
        launch.arg_ptr(values[name])
    return launch.arg_u32(8).arg_u32(head_dim).arg_u32(2).arg_u32(values["num_seqs"])


def decode(gpu: FakeBackend, kernel: KernelHandle, **changed: int) -> KernelLaunch:
    values = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16} | changed
    launch = builder(gpu, kernel)
    for _ in range(6):
        launch.arg_ptr(ADDRESS)
    launch.arg_u32(4).arg_u32(3)
    for name in ("num_q_heads", "num_kv_heads", "head_dim", "block_size"):
        launch.arg_u32(values[name])
    return launch.arg_f32(0.125).arg_u32(512).arg_u32(0).arg_u32(7)


def test_a_kernel_of_the_package_has_its_own_geometry(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*REDUCE)
    assert kernel.owns_geometry
    reduce(gpu, kernel).launch(0)
    assert (gpu.last.grid, gpu.last.block) == ((3, 8, 1), (32, 1, 1))
    reduce(gpu, kernel).grid([3, 8, 1]).block([32, 1, 1]).launch(0)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ([3, 8, 2], [32, 1, 1], r"grid: got \(3, 8, 2\), but .* own .* is \(3, 8, 1\)"),
        ([8, 3, 1], None, r"grid: got \(8, 3, 1\), but .* is \(3, 8, 1\)"),
        (None, [256, 1, 1], r"block: got \(256, 1, 1\), but .* is \(32, 1, 1\)"),
    ],
)
def test_a_contradicting_geometry_is_refused(
    gpu: FakeBackend, grid: list[int] | None, block: list[int] | None, message: str
) -> None:
    launch = reduce(gpu, gpu.kernel(*REDUCE))
    if grid:
        launch.grid(grid)
    if block:
        launch.block(block)
    with pytest.raises(ArgumentValueError, match=f"paged_decode_attn_reduce_fp8: {message}"):
        launch.launch(0)
    assert gpu.launches == []


def test_nothing_to_do_is_not_launched_whatever_the_pointers(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*REDUCE)
    reduce(gpu, kernel, num_seqs=0, workspace=0, output=1).launch(0)
    assert gpu.launches == []
    with pytest.raises(ArgumentTypeError, match="stream"):
        reduce(gpu, kernel, num_seqs=0).launch(None)


def test_a_grid_beyond_the_limits_is_refused(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*REDUCE)
    reduce(gpu, kernel, num_seqs=70_000).launch(0)
    assert gpu.last.grid == (70_000, 8, 1)
    with pytest.raises(ArgumentValueError, match=r"reduce_fp8: got grid \(2147483648, 8, 1\), allowed is"):
        reduce(gpu, kernel, num_seqs=2**31).launch(0)


@pytest.mark.parametrize(("parameter", "multiple"), [("workspace", 8), ("output", 16), ("seq_lens", 4)])
def test_misaligned_pointers_name_the_parameter(gpu: FakeBackend, parameter: str, multiple: int) -> None:
    kernel = gpu.kernel(*REDUCE)
    for offset in range(1, multiple):
        with pytest.raises(
            ArgumentValueError,
            match=f"^{parameter}: got {ADDRESS + offset:#x}, its address, .* be a multiple of {multiple}",
        ):
            reduce(gpu, kernel, **{parameter: ADDRESS + offset}).launch(0)
    assert gpu.launches == []
    reduce(gpu, kernel, **{parameter: ADDRESS + multiple}).launch(0)
    assert gpu.last.values[parameter] == ADDRESS + multiple


SPEC = {"head_dim": 64, "gqa_ratio": 4, "num_kv_heads": 2, "block_size": 16}
RING = ("block_heads", "block_head_tiles", "warp_row_tiles", "token_warps", "stage_tiles", "stages",
        "blocks_per_sm", "bulk", "joined", "fill_delay", "sequence_cost")  # fmt: skip


def warmed(gpu: FakeBackend) -> dict[str, int]:
    """Every constant of the decode kernel that `decode` launches."""
    return dict(gpu.kernel(*DECODE).warm(**SPEC).constants)


def test_one_load_for_each_specialisation(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*DECODE)
    for _ in range(3):
        decode(gpu, kernel).launch(0)
    assert len(gpu.loads) == 1
    assert gpu.last.constants == {f"SPEC_{name.upper()}": str(value) for name, value in warmed(gpu).items()}
    for changed in ({"head_dim": 128}, {"block_size": 32}, {"num_q_heads": 2}, {"num_kv_heads": 4}):
        decode(gpu, kernel, **changed).launch(0)
    assert len(gpu.loads) == 6  # one of them by `warmed`
    assert len({source.defines for source in gpu.loads}) == 5


def test_warm_loads_what_the_launch_then_uses(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*DECODE)
    found = kernel.warm(**dict(reversed(SPEC.items()))).constants
    assert {name: found[name] for name in SPEC} == SPEC
    assert set(found) == {*SPEC, *RING, "split"}
    assert found["split"] == 0
    assert (len(gpu.loads), len(gpu.launches)) == (1, 0)
    decode(gpu, kernel).launch(0)
    assert len(gpu.loads) == 1


def test_warm_wants_every_constant_and_no_other(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*DECODE, head_dim=64)
    needed = r"needed are \['block_size', 'gqa_ratio', 'head_dim', 'num_kv_heads'\]"
    with pytest.raises(ArgumentValueError, match=needed):
        kernel.warm(gqa_ratio=4)
    rest = {name: value for name, value in SPEC.items() if name != "head_dim"}
    allowed = "allowed: head_dim, gqa_ratio, num_kv_heads, block_size"
    with pytest.raises(ArgumentValueError, match=f"unknown .* tokens; {allowed}"):
        kernel.warm(**rest, tokens=1)
    with pytest.raises(ArgumentValueError, match="head_dim is pinned to 64, but this launch asks for 128"):
        kernel.warm(**rest, head_dim=128)
    assert gpu.loads == []
    kernel.warm(**rest)
    assert len(gpu.loads) == 1


BAD_CONSTANTS: list[tuple[str, Any, type[Exception]]] = [
    ("head_dim", 72, ValueError),
    ("head_dim", 272, ValueError),
    ("head_dim", 0, ValueError),
    ("head_dim", "64", TypeError),
    ("head_dim", True, TypeError),
    ("gqa_ratio", 0, ValueError),
    ("gqa_ratio", 129, ValueError),
    ("gqa_ratio", 4.0, TypeError),
    ("num_kv_heads", 0, ValueError),
    ("block_size", 0, ValueError),
    ("block_size", 257, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_CONSTANTS)
def test_unsupported_constants_are_refused_when_pinned_and_when_warmed(
    gpu: FakeBackend, name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: got {value!r}.*allowed"):
        gpu.kernel(*DECODE, **{name: value})
    constants = SPEC | {name: value}
    with pytest.raises(error, match=rf"^{name}: got {value!r}.*allowed"):
        gpu.kernel(*DECODE).warm(**constants)
    assert gpu.loads == []


def test_a_pinned_constant_must_match_the_launch(gpu: FakeBackend) -> None:
    kernel = gpu.kernel(*DECODE, gqa_ratio=4, block_size=16)
    assert "gqa_ratio=4" in repr(kernel)
    decode(gpu, kernel).launch(0)
    for changed, message in (
        ({"num_q_heads": 2}, "gqa_ratio is pinned to 4, but this launch asks for 1"),
        ({"block_size": 32}, "block_size is pinned to 16, but this launch asks for 32"),
    ):
        with pytest.raises(ArgumentValueError, match=f"paged_decode_attn_bf16: {message}"):
            decode(gpu, kernel, **changed).launch(0)
    assert len(gpu.launches) == len(gpu.loads) == 1


PLANNED = ("paged_decode_attn_planned", "paged_decode_attn_plan")
BAD_PLANNED: list[tuple[str, Any, type[Exception]]] = [
    *((name, 2, ValueError) for name in ("heads_first", "joined", "causal", "soft_cap", "query_f16", "many")),
    *((name, bad, ValueError) for name in ("key_format", "value_format") for bad in (-1, 3)),
    *(("query_tokens", bad, ValueError) for bad in (0, 25)),
    *((name, True, TypeError) for name in ("causal", "latency", "key_format")),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_PLANNED)
def test_unsupported_constants_of_the_planned_kernels(
    gpu: FakeBackend, name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: got {value!r}.*allowed"):
        gpu.kernel(*PLANNED, **planned_spec(**SPEC) | {name: value})
    assert gpu.loads == []


def test_kernels_that_scalars_do_not_specialise_want_every_constant_pinned(gpu: FakeBackend) -> None:
    spec = planned_spec(**SPEC)

    def launch(kernel: KernelHandle) -> None:
        builder(gpu, kernel).arg_ptr(ADDRESS).arg_ptr(ADDRESS).arg_u32(4).arg_u32(3).arg_u32(0).launch(0)

    for left_out in spec:
        some = {name: value for name, value in spec.items() if name != left_out}
        with pytest.raises(ArgumentValueError, match=r"paged_decode_attn_plan: got constants .* needed are"):
            launch(gpu.kernel(*PLANNED, **some))
    assert gpu.loads == gpu.launches == []  # type: ignore[comparison-overlap]
    kernel = gpu.kernel(*PLANNED, **spec)
    assert kernel.grid_of(num_seqs=3) == (1, 1, 1)
    assert gpu.loads == []
    for _ in range(2):
        launch(kernel)
    assert (len(gpu.loads), gpu.last.grid, gpu.last.block) == (1, (1, 1, 1), (1024, 1, 1))


def test_unknown_constants_are_refused(gpu: FakeBackend) -> None:
    with pytest.raises(ArgumentValueError, match=r"unknown .* head_size; allowed: head_dim, gqa_ratio"):
        gpu.kernel(*DECODE, head_size=64)
    with pytest.raises(ArgumentValueError, match=r"unknown .* head_dim; allowed: none"):
        gpu.kernel("bf16_absmax", "bf16_absmax", head_dim=64)


def offer(gpu: FakeBackend, kernel: tuple[str, str], position: int, array: Any) -> None:
    """Give an array for the parameter at a position, after null pointers."""
    launch = builder(gpu, gpu.kernel(*kernel))
    for _ in range(position):
        launch.arg_ptr(0)
    launch.arg_ptr(array)


ACCEPTED: list[tuple[tuple[str, str], int, Any]] = [
    (WRITER, 0, ml_dtypes.bfloat16),
    (WRITER, 0, np.uint16),
    (WRITER, 2, np.uint8),
    (WRITER, 2, ml_dtypes.float8_e4m3fn),
    (WRITER, 4, np.int64),
    (DECODE, 1, np.uint16),
    (DECODE, 4, np.int32),
    (REDUCE, 0, np.float32),
    (("reshape_and_cache_nvfp4", "reshape_and_cache_nvfp4"), 2, np.uint8),
]
BF16_BITS, E4M3_BITS = "uint16 (BF16 as bits)", "uint8 (E4M3 as bits)"
REFUSED: list[tuple[tuple[str, str], int, Any, str]] = [
    (WRITER, 0, np.float16, f"key: got dtype float16, allowed: bfloat16, {BF16_BITS}"),
    (WRITER, 0, np.float32, f"key: got dtype float32, allowed: bfloat16, {BF16_BITS}"),
    (WRITER, 0, np.int16, f"key: got dtype int16, allowed: bfloat16, {BF16_BITS}"),
    (WRITER, 1, ml_dtypes.float8_e4m3fn, f"value: got dtype float8_e4m3fn, allowed: bfloat16, {BF16_BITS}"),
    (
        WRITER,
        2,
        ml_dtypes.float8_e5m2,
        f"k_cache: got dtype float8_e5m2, allowed: float8_e4m3fn, {E4M3_BITS}",
    ),
    (WRITER, 2, np.int8, f"k_cache: got dtype int8, allowed: float8_e4m3fn, {E4M3_BITS}"),
    (WRITER, 3, np.uint16, f"v_cache: got dtype uint16, allowed: float8_e4m3fn, {E4M3_BITS}"),
    (WRITER, 4, np.int32, "slot_mapping: got dtype int32, allowed: int64"),
    (WRITER, 4, np.uint64, "slot_mapping: got dtype uint64, allowed: int64"),
    (DECODE, 4, np.uint32, "block_tables: got dtype uint32, allowed: int32"),
    (DECODE, 5, np.int64, "seq_lens: got dtype int64, allowed: int32"),
    (DECODE, 1, ml_dtypes.float8_e4m3fn, f"k_cache: got dtype float8_e4m3fn, allowed: bfloat16, {BF16_BITS}"),
    (REDUCE, 0, np.float64, "workspace: got dtype float64, allowed: float32"),
    (REDUCE, 0, np.dtype(">f4"), "workspace: got dtype >f4, allowed: float32"),
]


@pytest.mark.parametrize(("kernel", "position", "dtype"), ACCEPTED)
def test_dtypes_accepted(gpu: FakeBackend, kernel: tuple[str, str], position: int, dtype: Any) -> None:
    offer(gpu, kernel, position, aligned((4, 2, 16), dtype))


@pytest.mark.parametrize(("kernel", "position", "dtype", "message"), REFUSED)
def test_dtypes_refused(
    gpu: FakeBackend, kernel: tuple[str, str], position: int, dtype: Any, message: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{re.escape(message)}$"):
        offer(gpu, kernel, position, aligned((4, 2, 16), dtype))


WIDE = aligned((8, 2, 64), np.uint16)
STRIDED: dict[str, tuple[Any, bool, bool]] = {
    # array, allowed for key (strided along its first axis), allowed for k_cache
    "contiguous": (WIDE, True, True),
    "gaps between rows": (WIDE[:, :1], True, False),
    "every other row": (WIDE[::2], True, False),
    "one row of a strided array": (WIDE[:1, :1], True, True),
    "reversed": (WIDE[::-1], False, False),
    "broadcast": (np.broadcast_to(WIDE[:1], (8, 2, 64)), False, False),
    "overlapping rows": (np.lib.stride_tricks.as_strided(WIDE, (8, 2, 64), (2, 128, 2)), False, False),
    "Fortran order": (np.asfortranarray(WIDE), False, False),
    "transposed heads": (WIDE.transpose(1, 0, 2), False, False),
    "gaps within a row": (WIDE[:, :, ::2], False, False),
    "empty": (WIDE[:0], True, True),
    "empty in the middle": (np.zeros((8, 0, 64), np.uint16), True, True),
}


@pytest.mark.parametrize("case", STRIDED)
def test_strides(gpu: FakeBackend, case: str) -> None:
    array, for_key, for_cache = STRIDED[case]
    module = ("reshape_and_cache_bf16", "reshape_and_cache_bf16")
    for position, name, allowed in ((0, "key", for_key), (2, "k_cache", for_cache)):
        if allowed:
            offer(gpu, module, position, array)
        else:
            with pytest.raises(
                ArgumentValueError, match=rf"^{name}: got strides .*for shape .*allowed is C or"
            ):
                offer(gpu, module, position, array)


class Unstrided:
    """A device array of a library whose arrays have no strides."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.dtype, self.shape, self.size = array.dtype, array.shape, array.size
        self.array = array


def test_arrays_without_strides_are_contiguous(gpu: FakeBackend) -> None:
    with pytest.raises(ArgumentTypeError, match="paged_decode_attn_bf16: q: got Unstrided"):
        offer(gpu, DECODE, 0, Unstrided(WIDE))  # past the checks: this backend does not know the type
    with pytest.raises(ArgumentTypeError, match="q: got dtype float32"):
        offer(gpu, DECODE, 0, Unstrided(np.zeros(1, np.float32)))


def test_an_address_as_a_numpy_integer_is_no_array(gpu: FakeBackend) -> None:
    reduce(gpu, gpu.kernel(*REDUCE), workspace=np.int64(ADDRESS), output=np.uint64(ADDRESS)).launch(0)
    assert gpu.last.values["workspace"] == gpu.last.values["output"] == ADDRESS


def test_an_array_where_a_scalar_belongs_names_both_kinds(gpu: FakeBackend) -> None:
    launch = builder(gpu, gpu.kernel("bf16_absmax", "bf16_absmax")).arg_ptr(0).arg_ptr(0)
    launch.arg_ptr(aligned(4, np.int32))
    with pytest.raises(ArgumentTypeError, match="argument 2 is ptr, but parameter 'n_elems' is u32"):
        launch.launch(0)


def test_names_and_handles_that_are_none(gpu: FakeBackend) -> None:
    for names, wrong in (((1, "x"), "module: got 1"), ((REDUCE[0], ["x"]), r"entry: got \['x'\]")):
        with pytest.raises(ArgumentTypeError, match=f"^{wrong}, allowed is a name"):
            gpu.kernel(*names)  # type: ignore[arg-type]
    for nothing in (None, gpu, "reduce"):
        with pytest.raises(ArgumentTypeError, match=r"^kernel: got .*, allowed is a handle"):
            KernelLaunch(gpu, nothing)  # type: ignore[arg-type]
