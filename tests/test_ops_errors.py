"""Launchers: bad arguments raise before anything is launched, and the message names the argument."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.fake_backend import FakeBackend, aligned
from tests.launcher_cases import (
    FACTORS,
    INTEGERS,
    LAUNCHERS,
    SCALARS,
    addresses,
    arguments,
    call,
    format_of,
    handle,
    pairs,
    rows,
)

POINTERS: set[str] = set()
POOLS = {"k_cache", "v_cache", "k_pool", "v_pool"}
TILED = [name for name, _ in pairs({"tile_capacity"})]


DTYPES = {
    "bf16": ("bfloat16", "uint16"),
    "fp8": ("float8_e4m3fn", "uint8"),
    "nvfp4": ("uint8",),
    "bytes": ("uint8", "float8_e4m3fn", "uint16", "bfloat16"),
    "f16": ("float16",),
    "f32": ("float32",),
    "i32": ("int32",),
    "u32": ("uint32",),
    "i64": ("int64",),
}
HELD = {
    "f32": "workspace m_state l_state o_state out_max scales lses out_lse",
    "i32": "block_tables seq_lens tile_blocks tile_block_counts block_ids pairs",
    "bytes": "pool k_source v_source k_target v_target",
    "i64": "slot_mapping",
    "bf16": "q key value output data",
}


def holds(launcher: str, name: str) -> str:
    """The format of a pointer parameter."""
    if name in POOLS:
        return format_of(launcher)
    if name[1:] in ("_parts", "_out"):
        return "f32"
    if name in ("outputs", "out") or (name == "output" and launcher.startswith("gather")):
        kinds = launcher.removeprefix("merge_states_").split("_to_")
        return kinds[0].rpartition("_")[2] if name == "outputs" else kinds[-1].rpartition("_")[2]
    return next(held for held, names in HELD.items() if name in names.split())


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def refused(
    gpu: FakeBackend,
    launcher: str,
    given: dict[str, Any],
    error: type[Exception],
    names: str,
    /,
    **changed: Any,
) -> str:
    """The message of the error that a call raises; one of the names must be in it, as a word."""
    with pytest.raises(error, match=rf"\b({names})\b") as caught:
        call(gpu, launcher, given, **changed)
    assert isinstance(caught.value, (ArgumentTypeError, ArgumentValueError))
    assert gpu.launches == []
    return str(caught.value)


@pytest.mark.parametrize(("launcher", "name"), pairs(INTEGERS))
def test_integers_of_another_type(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    for bad in (None, "3", 1.5, float(given[name]), True, False, np.True_, [3], np.array([3]), 3j):
        message = refused(gpu, launcher, given, TypeError, name, **{name: bad})
        assert repr(bad) in message
        assert "allowed is an integer" in message


@pytest.mark.parametrize(("launcher", "name"), pairs(INTEGERS))
def test_negative_integers(gpu: FakeBackend, launcher: str, name: str) -> None:
    for given in (arguments(launcher), addresses(launcher)):
        for bad in (-1, np.int64(-1)):
            message = refused(gpu, launcher, given, ValueError, name, **{name: bad})
            assert re.search(r"got (\d+, )?-1\b", message)


@pytest.mark.parametrize(("launcher", "name"), pairs(INTEGERS))
def test_integers_too_large(gpu: FakeBackend, launcher: str, name: str) -> None:
    """Beyond 64 bits nothing fits; which check comes first is left open."""
    for given in (arguments(launcher), addresses(launcher)):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=r"got|reaches over"):
            call(gpu, launcher, given, **{name: 2**64})
    assert gpu.launches == []


@pytest.mark.parametrize(("launcher", "name"), pairs(FACTORS))
def test_factors_must_be_finite_and_positive_as_float32(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    for bad in (0, 0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-50, 1e300, -1e-50, 10**400):
        refused(gpu, launcher, given, ValueError, name, **{name: bad})
        if isinstance(bad, float):
            for same in (np.float64(bad), np.array(bad)):
                refused(gpu, launcher, given, ValueError, name, **{name: same})
    for bad in (np.float32(0.0), np.float32("nan"), np.float32("inf"), np.int32(0)):
        refused(gpu, launcher, given, ValueError, name, **{name: bad})


@pytest.mark.parametrize(("launcher", "name"), pairs(FACTORS))
def test_factors_of_another_type(gpu: FakeBackend, launcher: str, name: str) -> None:
    for bad in (None, "1", True, 1j, np.ones(1), [1.0], np.True_):
        refused(gpu, launcher, arguments(launcher), TypeError, name, **{name: bad})


@pytest.mark.parametrize("launcher", TILED)
def test_the_tiled_launchers_softmax_scale(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    for bad in (0.0, -1.0, math.nan, 1e-50, 1e300):
        refused(gpu, launcher, given, ValueError, "inv_sqrt_d", inv_sqrt_d=bad)
    refused(gpu, launcher, given, TypeError, "inv_sqrt_d", inv_sqrt_d="1")


@pytest.mark.parametrize("launcher", TILED)
def test_the_tiled_launchers_numbers_of_splits(gpu: FakeBackend, launcher: str) -> None:
    for bad in (0, 65_536):
        message = refused(gpu, launcher, addresses(launcher), ValueError, "num_splits", num_splits=bad)
        assert message == f"num_splits: got {bad}, allowed is 1 to 65535"


@pytest.mark.parametrize(("launcher", "name"), pairs(POINTERS))
def test_pointers_of_another_type(gpu: FakeBackend, launcher: str, name: str) -> None:
    for bad in (None, "4096", 4096.0, True, [1, 2], object()):
        message = refused(gpu, launcher, arguments(launcher), TypeError, name, **{name: bad})
        assert type(bad).__name__ in message
        assert "allowed" in message
    refused(gpu, launcher, arguments(launcher), ValueError, name, **{name: -16})
    refused(gpu, launcher, arguments(launcher), ValueError, name, **{name: 2**64})


def retyped(array: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """An array of the same shape, with the same strides in elements."""
    steps = [stride // array.itemsize for stride in array.strides]
    reach = 1 + sum((length - 1) * step for length, step in zip(array.shape, steps, strict=True))
    storage = aligned(reach, dtype)
    strides = [step * storage.itemsize for step in steps]
    again: np.ndarray[Any, Any] = np.ndarray(array.shape, dtype, storage.view(np.uint8).data, strides=strides)
    return again


@pytest.mark.parametrize(("launcher", "name"), pairs(POINTERS))
def test_arrays_of_another_dtype(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    wrong = {"float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"}
    wrong |= {"uint64", "bool", "complex64", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float4_e2m1fn"}
    allowed = DTYPES[holds(launcher, name)]
    assert given[name].dtype.name in allowed
    for dtype in sorted(wrong - set(allowed)):
        message = refused(gpu, launcher, given, TypeError, name, **{name: retyped(given[name], dtype)})
        told = re.sub(r" \((BF16|E4M3) as bits\)", "", message)
        assert told == f"{name}: got dtype {dtype}, allowed: {', '.join(allowed)}"
    for dtype in allowed:
        call(gpu, launcher, given, **{name: retyped(given[name], dtype)})
    assert len(gpu.launches) == len(allowed)


@pytest.mark.parametrize(("launcher", "name"), pairs(POINTERS))
def test_misaligned_pointers(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = addresses(launcher)
    multiple = handle(gpu, launcher).known.multiples[name]  # type: ignore[union-attr]
    for offset in {1, multiple // 2} - {0, multiple}:
        message = refused(gpu, launcher, given, ValueError, name, **{name: given[name] + offset})
        assert message.startswith(f"{name}: got {given[name] + offset:#x}, its address")
        assert f"multiple of {multiple}" in message
        refused(gpu, launcher, given, ValueError, name, **{name: DevicePtr(given[name] + offset)})


# Pools are checked through their number of blocks.
UNSIZED = POOLS | {"pool", "k_source", "v_source", "k_target", "v_target"}


@pytest.mark.parametrize(("launcher", "name"), [p for p in pairs(POINTERS) if p[1] not in UNSIZED])
def test_arrays_one_element_too_small(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    array = given[name]
    reach = 1 + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) // array.itemsize
    exact = aligned(reach, array.dtype)
    message = refused(gpu, launcher, given, ValueError, name, **{name: exact[:-1]})
    by_head = rf"got shape \({reach - 1},\), allowed is \({reach},\)"
    by_size = rf"\b{reach - 1} elements, needed are {reach}\b"
    assert re.search(by_head if name.endswith("scales") else by_size, message)
    call(gpu, launcher, given, **{name: exact})
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("launcher", TILED)
def test_the_tiled_launchers_lengths_too_small(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    name = "last_block_valid_slots_per_seq"
    for bad, error in (
        (aligned(2, np.int32), ValueError),
        (aligned(3, np.int64), TypeError),
        ("x", TypeError),
    ):
        refused(gpu, launcher, given, error, name, **{name: bad})


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"k_cache"})])
@pytest.mark.parametrize("pool", ["k_cache", "v_cache"])
def test_pools_smaller_than_the_number_of_blocks_given(gpu: FakeBackend, launcher: str, pool: str) -> None:
    given = arguments(launcher)
    smaller = {pool: given[pool][:5]}
    message = refused(gpu, launcher, given, ValueError, "num_blocks", num_blocks=6, **smaller)
    assert f"got 6, but {pool} holds 5 blocks" in message
    small = {pool: DevicePtr(4096, nbytes=given[pool][:5].nbytes)}
    refused(gpu, launcher, given, ValueError, "num_blocks", num_blocks=6, **small)
    call(gpu, launcher, given, num_blocks=5, **smaller)


@pytest.mark.parametrize(
    "launcher", [n for n in LAUNCHERS if n.startswith(("paged_decode_attn", "resh")) and "reduce" not in n]
)
def test_bad_numbers_of_blocks(gpu: FakeBackend, launcher: str) -> None:
    for bad, error in ((-1, ValueError), (2**31, ValueError), (2**64, ValueError), (1.5, TypeError)):
        refused(gpu, launcher, addresses(launcher), error, "num_blocks", num_blocks=bad)
    for other in (True, "6", np.float32(6)):
        refused(gpu, launcher, addresses(launcher), TypeError, "num_blocks", num_blocks=other)


@pytest.mark.parametrize(("launcher", "name"), pairs(POINTERS))
def test_bad_strides(gpu: FakeBackend, launcher: str, name: str) -> None:
    """Reversed, broadcast and Fortran-ordered arrays, and ones with gaps within a row."""
    given = arguments(launcher)
    array = given[name]
    wide = aligned((*array.shape, 2), array.dtype)
    bad = {"gaps": wide[..., 0]} if array.shape[-1] > 1 else {}
    if array.shape[0] > 1:
        bad["reversed"] = array[::-1]
        bad["broadcast"] = np.broadcast_to(array[:1], array.shape)
    if array.ndim > 1:
        bad["Fortran"] = np.asfortranarray(array)
    for wrong in bad.values():
        assert wrong.shape == array.shape
        message = refused(gpu, launcher, given, ValueError, f"{name}|{name}_stride", **{name: wrong})
        assert "stride" in message or "reaches over" in message or "between rows" in message


STRIDES = {"q_stride": "q", "key_stride": "key", "value_stride": "value", "row_stride": "data"}


@pytest.mark.parametrize(("launcher", "name"), pairs(set(STRIDES)))
def test_row_strides(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = arguments(launcher)
    row = given["row_elems"] if name == "row_stride" else given[STRIDES[name]][0].size
    message = refused(gpu, launcher, addresses(launcher), ValueError, name, **{name: row - 8})
    assert message == f"{name}: got {row - 8}, a row has {row} elements"
    if name != "row_stride":
        refused(gpu, launcher, addresses(launcher), ValueError, name, **{name: given[name] + 4})
        message = refused(gpu, launcher, given, ValueError, name, **{name: given[name] + 8})
        assert f"{STRIDES[name]} has {given[name]} elements between rows" in message
    one_row = {"num_seqs": 1, "num_tokens": 1, "num_rows": 1}
    call(gpu, launcher, addresses(launcher) | {n: v for n, v in one_row.items() if n in given}, **{name: 8})
    assert len(gpu.launches) == 1


def test_rows_beyond_the_end_of_a_flat_array(gpu: FakeBackend) -> None:
    """A flat array has no stride of its own to contradict: only its end can tell."""
    given = arguments("reshape_and_cache_bf16")
    flat = aligned(9 * given["key_stride"] + 128, np.uint16)
    call(gpu, "reshape_and_cache_bf16", given, key=flat)
    with pytest.raises(ArgumentValueError, match="key: reaches over 1423 elements, needed are 1424"):
        call(gpu, "reshape_and_cache_bf16", given, key=flat[:-1])
    other = rows(2, 5 * given["key_stride"], (2, 64)).reshape(2, 1, 2, 64)
    with pytest.raises(ArgumentValueError, match="key_stride: got 144, but key has 720 elements between"):
        call(gpu, "reshape_and_cache_bf16", given, key=other)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [p for p in pairs({"cache_stride", "data_section_bytes", "block_stride_bytes"}) if "gather" not in p[0]],
)
def test_block_strides(gpu: FakeBackend, launcher: str, name: str) -> None:
    given = addresses(launcher)
    least = {"cache_stride": 2048, "data_section_bytes": 1024}
    least["block_stride_bytes"] = SCALARS["data_section_bytes"] + 128
    message = refused(gpu, launcher, given, ValueError, name, **{name: least[name] - 16})
    assert message == f"{name}: got {least[name] - 16}, a block needs {least[name]}"
    for offset in (1, 8):
        message = refused(gpu, launcher, given, ValueError, name, **{name: given[name] + offset})
        assert "must be a multiple of 16" in message
    call(gpu, launcher, given, **{name: least[name]})
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"slot_mapping"})])
def test_the_order_of_a_blocks_rows(gpu: FakeBackend, launcher: str) -> None:
    for bad in (1, 0, None, "yes", np.True_):
        with pytest.raises(ArgumentTypeError, match=r"heads_first: got .*, allowed are True and False"):
            call(gpu, launcher, addresses(launcher), heads_first=bad)
    call(gpu, launcher, addresses(launcher), heads_first=True)
    assert gpu.last.values["heads_first"] == 1
    if launcher == "reshape_and_cache_nvfp4":
        return  # its blocks have no shape
    given = arguments(launcher)
    pool = aligned((6, 2, 16, 64), given["k_cache"].dtype)
    message = refused(gpu2 := FakeBackend(), launcher, given, ValueError, "v_cache", v_cache=pool)
    assert "allowed is [n, 16, 2, 64]" in message
    stride = {"cache_stride": 2048}
    call(gpu2, launcher, given, k_cache=pool, v_cache=pool, heads_first=True, **stride)


@pytest.mark.parametrize("launcher", ["gather_tokens_f32", "gather_tokens_bf16"])
def test_gathers_pools_and_formats(gpu: FakeBackend, launcher: str) -> None:
    """The pool reaches to the last scale of its last block: 3 blocks, 15 tokens, 1 head and 4 bytes on."""
    given = arguments(launcher)
    needed = 3 * SCALARS["block_stride_bytes"] + SCALARS["data_section_bytes"] + 15 * 8 + 4 + 4
    exact = aligned(needed, np.uint8)
    for short in (exact[:-1], DevicePtr(4096, nbytes=needed - 1)):
        message = refused(gpu, launcher, given, ValueError, "num_blocks", pool=short, num_blocks=4)
        assert message == "num_blocks: got 4, but pool holds 3 blocks"
    message = refused(gpu, launcher, given, ValueError, "cache_format", cache_format=3)
    assert message == "cache_format: got 3, allowed are 0 (bf16), 1 (fp8), 2 (nvfp4)"
    for head_dim in (0, 8, 24, 100):
        refused(gpu, launcher, addresses(launcher), ValueError, "head_dim", head_dim=head_dim)
    for name in ("block_stride_bytes", "token_stride_bytes", "head_stride_bytes", "data_section_bytes"):
        message = refused(gpu, launcher, given, ValueError, name, **{name: given[name] + 4})
        assert "must be a multiple of 8" in message
    call(gpu, launcher, given, pool=exact, num_blocks=4)


def test_copied_pools(gpu: FakeBackend) -> None:
    given = arguments("copy_cache_blocks")
    for side, blocks, stride, section in (("source", 6, 1184, 1040), ("target", 5, 1200, 1056)):
        needed = (blocks - 1) * stride + section + 128  # to the end of the last block's scales
        for name in (f"k_{side}", f"v_{side}"):
            short = {name: DevicePtr(4096, nbytes=needed - 1)}
            message = refused(gpu, "copy_cache_blocks", given, ValueError, name, **short)
            assert message == f"{name}: got {needed - 1} bytes, needed are {needed}"
        for name in (f"{side}_stride_bytes", f"{side}_section_bytes"):
            refused(gpu, "copy_cache_blocks", given, ValueError, name, **{name: given[name] - 8})
        refused(
            gpu, "copy_cache_blocks", given, ValueError, f"num_{side}_blocks", **{f"num_{side}_blocks": 2**31}
        )


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name.startswith("merge_states")])
def test_merged_parts(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    refused(gpu, launcher, given, ValueError, "num_parts", num_parts=0)
    message = refused(gpu, launcher, given, ValueError, "part_stride", part_stride=13 * 64 + 20)
    assert "outputs has 848 elements between rows" in message
    message = refused(gpu, launcher, given, ValueError, "lse_stride", lse_stride=14)
    assert "lses has 15 elements between rows" in message
    for head_dim in (0, 2, 62):
        refused(gpu, launcher, addresses(launcher), ValueError, "head_dim", head_dim=head_dim)
    refused(gpu, launcher, addresses(launcher), ValueError, "part_stride", part_stride=13 * 64 + 2)


@pytest.mark.parametrize(("launcher", "name"), pairs({"blk_stride", "tok_stride", "kvh_stride"}))
def test_tiled_strides(gpu: FakeBackend, launcher: str, name: str) -> None:
    given, multiple = addresses(launcher), 16 if launcher.endswith("fp8") else 8
    refused(gpu, launcher, given, ValueError, name, **{name: -multiple})
    for offset in (1, multiple // 2):
        message = refused(gpu, launcher, given, ValueError, name, **{name: given[name] + offset})
        assert f"must be a multiple of {multiple}" in message


@pytest.mark.parametrize("launcher", TILED)
def test_last_block_valid_slots(gpu: FakeBackend, launcher: str) -> None:
    for bad in (-1, 17):
        message = refused(
            gpu,
            launcher,
            arguments(launcher),
            ValueError,
            "last_block_valid_slots",
            last_block_valid_slots=bad,
        )
        assert message.endswith(f"got {bad}, allowed is 0 to block_size, 16")
