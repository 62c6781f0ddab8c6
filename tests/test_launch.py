"""The launch builder with kernels of the user's own: packing, kinds, ranges, counts, geometry, threads."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupaged import DevicePtr
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.fake_backend import FakeBackend, aligned, own_kernel, small

C_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
SIX = ("u32", "ptr", "u32", "u64", "f32", "u32")
LIMITS = {
    "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "u64": (0, 2**64 - 1),
    "i64": (-(2**63), 2**63 - 1),
}


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def with_argument(gpu: FakeBackend, folder: Path, kind: str, value: Any) -> bytes:
    """The bytes that a kernel with one parameter gets."""
    launch = small(gpu, own_kernel(gpu, folder, (kind,)))
    getattr(launch, f"arg_{kind}")(value).launch(0)
    return gpu.last.packed[0]


def test_six_arguments_arrive_byte_for_byte_at_their_natural_alignment(
    gpu: FakeBackend, tmp_path: Path
) -> None:
    kernel = own_kernel(gpu, tmp_path, SIX)
    launch = small(gpu, kernel).arg_u32(0x01020304).arg_ptr(0x1122334455667788).arg_u32(0xFFFFFFFF)
    launch.arg_u64(2**63 + 5).arg_f32(1.5).arg_u32(7).launch(3)
    assert gpu.last.offsets == [0, 8, 16, 24, 32, 36]
    assert b"".join(gpu.last.packed) == bytes.fromhex(
        "040302018877665544332211ffffffff05000000000000800000c03f07000000"
    )
    assert gpu.last.stream == 3


@given(kinds=st.lists(st.sampled_from(sorted(C_TYPES)), min_size=1, max_size=12), data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_signature_is_laid_out_as_a_c_compiler_does(
    tmp_path: Path, kinds: list[str], data: st.DataObject
) -> None:
    class Struct(ctypes.Structure):
        _fields_ = [(f"p{i}", C_TYPES[kind]) for i, kind in enumerate(kinds)]

    gpu = FakeBackend()
    launch = small(gpu, own_kernel(gpu, tmp_path, tuple(kinds)))
    expected = Struct()
    for i, kind in enumerate(kinds):
        low, high = LIMITS.get(kind, (0, 2**64 - 1))
        value = data.draw(st.floats(width=32) if kind == "f32" else st.integers(low, high))
        setattr(expected, f"p{i}", value)
        getattr(launch, f"arg_{kind}")(value)
    launch.launch(0)
    raw = bytes(expected)
    offsets = [getattr(Struct, f"p{i}").offset for i in range(len(kinds))]
    assert gpu.last.offsets == offsets
    for offset, packed in zip(offsets, gpu.last.packed, strict=True):
        assert packed == raw[offset : offset + len(packed)]


def test_f32_is_the_nearest_float32(gpu: FakeBackend, tmp_path: Path) -> None:
    assert with_argument(gpu, tmp_path, "f32", 128**-0.5) == bytes.fromhex("f304b53d")


@pytest.mark.parametrize(
    "value",
    [
        *(1, 0.0, -0.0, 1e-45, 1e-50, Fraction(1, 3), ml_dtypes.bfloat16(1.5), np.array(0.1), np.array(7)),
        *(np.float32(0.1), np.float64(0.1), np.float16(0.1), np.int64(-3)),
    ],
)
def test_f32_takes_every_real_scalar(gpu: FakeBackend, tmp_path: Path, value: Any) -> None:
    assert with_argument(gpu, tmp_path, "f32", value) == struct.pack("<f", float(value))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_f32_lets_infinities_and_nan_pass(gpu: FakeBackend, tmp_path: Path, value: float) -> None:
    (received,) = struct.unpack("<f", with_argument(gpu, tmp_path, "f32", value))
    assert received == value or (math.isnan(received) and math.isnan(value))


LARGEST = float(np.finfo(np.float32).max)
ROUNDS_TO_INFINITY = 3.4028235677973366e38  # half-way between the largest float32 and 2^128


def test_f32_range_ends_where_rounding_gives_infinity(gpu: FakeBackend, tmp_path: Path) -> None:
    below = math.nextafter(ROUNDS_TO_INFINITY, 0.0)
    assert with_argument(gpu, tmp_path, "f32", -below) == struct.pack("<f", -LARGEST)
    assert with_argument(gpu, tmp_path, "f32", below) == struct.pack("<f", LARGEST)


@pytest.mark.parametrize("value", [1e300, -1e300, ROUNDS_TO_INFINITY, np.float64(1e39), 10**400, -(10**39)])
def test_f32_beyond_float32_is_an_error(gpu: FakeBackend, tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArgumentValueError, match=r"k_f32: p0: got .* fit a float32"):
        with_argument(gpu, tmp_path, "f32", value)
    assert gpu.launches == []


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), "1.0", None, 1j, np.zeros(1), [1.0]])
def test_f32_of_another_type_is_an_error(gpu: FakeBackend, tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"k_f32: p0: got .*, allowed is a real number"):
        with_argument(gpu, tmp_path, "f32", value)


@pytest.mark.parametrize("kind", sorted(LIMITS))
def test_integers_reach_their_limits_and_not_beyond(gpu: FakeBackend, tmp_path: Path, kind: str) -> None:
    low, high = LIMITS[kind]
    for value in (low, high):
        raw = with_argument(gpu, tmp_path, kind, value)
        assert int.from_bytes(raw, "little", signed=low < 0) == value
    launched = len(gpu.launches)
    for value in (low - 1, high + 1):
        with pytest.raises(
            ArgumentValueError, match=rf"k_{kind}: p0: got {value}, allowed .*{low} to {high}"
        ):
            with_argument(gpu, tmp_path, kind, value)
    assert len(gpu.launches) == launched


@pytest.mark.parametrize("kind", sorted(LIMITS))
@pytest.mark.parametrize(
    "value", [True, False, np.True_, 1.5, 1.0, np.float32(2), "1", None, np.zeros(1, int)]
)
def test_integers_of_another_type_are_an_error(
    gpu: FakeBackend, tmp_path: Path, kind: str, value: Any
) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"k_{kind}: p0: got .*, allowed is an integer"):
        with_argument(gpu, tmp_path, kind, value)


@pytest.mark.parametrize("kind", sorted(LIMITS))
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_numpy_integers_are_integers(gpu: FakeBackend, tmp_path: Path, kind: str, dtype: str) -> None:
    scalar = np.dtype(dtype).type(100)
    for value in (scalar, np.array(scalar)):
        assert int.from_bytes(with_argument(gpu, tmp_path, kind, value), "little") == 100


@pytest.mark.parametrize(("kind", "bad"), [("u32", np.int64(-1)), ("i32", np.uint32(2**31))])
def test_numpy_integers_do_not_wrap(gpu: FakeBackend, tmp_path: Path, kind: str, bad: Any) -> None:
    with pytest.raises(ArgumentValueError, match=f"got {bad}"):
        with_argument(gpu, tmp_path, kind, bad)


class DeviceScalar:
    """Reading it would synchronise."""

    shape = ()
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __index__(self) -> int:
        raise AssertionError("read the device")

    item = __float__ = __repr__ = __index__  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["u32", "u64", "i32", "i64", "f32"])
def test_scalars_on_a_device_are_not_read(gpu: FakeBackend, tmp_path: Path, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match="p0: got a DeviceScalar on a device"):
        with_argument(gpu, tmp_path, kind, DeviceScalar())


def test_pointers_come_as_int_numpy_integer_device_ptr_or_array(gpu: FakeBackend, tmp_path: Path) -> None:
    array = aligned(4, np.float32)
    kernel = own_kernel(gpu, tmp_path, ("ptr",) * 5)
    pointer = DevicePtr(4096, nbytes=8)
    small(gpu, kernel).arg_ptr(0).arg_ptr(2**64 - 1).arg_ptr(np.uint64(48)).arg_ptr(pointer).arg_ptr(
        array
    ).launch(0)
    assert list(gpu.last.values.values()) == [0, 2**64 - 1, 48, 4096, array.ctypes.data]
    assert set(gpu.last.arguments) == {2, 3, 4}
    assert gpu.last.arguments[3] is pointer
    assert gpu.last.arguments[4] is array


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        *((bad, ValueError) for bad in (-1, 2**64)),
        *((bad, TypeError) for bad in (None, "4096", 1.0, True, [1, 2])),
    ],
)
def test_bad_pointers_name_kernel_and_parameter(
    gpu: FakeBackend, tmp_path: Path, bad: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^k_ptr: p0: .*got .*allowed"):
        with_argument(gpu, tmp_path, "ptr", bad)


def test_device_ptr_arithmetic() -> None:
    pointer = DevicePtr(1000, nbytes=64)
    assert pointer + 24 == DevicePtr(1024, nbytes=40)
    assert pointer + 64 == DevicePtr(1064, nbytes=0)
    assert DevicePtr(1000) + 24 == DevicePtr(1024)
    assert (pointer + 24) + -24 == pointer
    assert int(DevicePtr(5)) == 5
    with pytest.raises(ArgumentValueError, match="offset: got 65, allowed is at most the 64 bytes"):
        pointer + 65
    with pytest.raises(ArgumentValueError, match="address: got -1, allowed"):
        DevicePtr(1000) + -1001
    with pytest.raises(ArgumentValueError, match=f"address: got {2**64}"):
        DevicePtr(2**64)
    for bad in (True, 1.0, None, np.int64(1)):
        with pytest.raises(ArgumentTypeError, match=f"address: got {type(bad).__name__}, allowed is int"):
            DevicePtr(bad)  # type: ignore[arg-type]


def test_sizes_of_a_device_ptr() -> None:
    """NumPy's integers become ints, whose sums do not overflow."""
    pointer = DevicePtr(2**40, nbytes=np.uint8(200)) + np.uint8(100)  # type: ignore[arg-type]
    assert (type(pointer.address), type(pointer.nbytes)) == (int, int)
    assert pointer == DevicePtr(2**40 + 100, nbytes=100)
    with pytest.raises(ArgumentValueError, match="nbytes: got -1, allowed is 0 or more"):
        DevicePtr(1000, -1)
    for bad in (True, 1.0, "8"):
        with pytest.raises(ArgumentTypeError, match=f"nbytes: got {bad!r}, allowed is an integer"):
            DevicePtr(1000, bad)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match=f"offset: got {bad!r}, allowed is an integer"):
            DevicePtr(1000) + bad  # type: ignore[operator]


def test_too_few_arguments_name_the_missing_ones(gpu: FakeBackend, tmp_path: Path) -> None:
    launch = small(gpu, own_kernel(gpu, tmp_path, SIX)).arg_u32(1).arg_ptr(0).arg_u32(1).arg_u64(1)
    with pytest.raises(ArgumentTypeError, match=r"k_u32_.*: got 4 arguments of 6; missing: 'p4', 'p5'"):
        launch.launch(0)
    assert gpu.launches == []


def test_too_many_arguments_name_the_last_parameter(gpu: FakeBackend, tmp_path: Path) -> None:
    launch = small(gpu, own_kernel(gpu, tmp_path, ("u32", "f32"))).arg_u32(1).arg_f32(1).arg_u32(1)
    with pytest.raises(ArgumentTypeError, match=r"k_u32_f32: got 3 arguments, the kernel has 2.*'p1'"):
        launch.launch(0)
    with pytest.raises(ArgumentTypeError, match=r"k_: got 1 arguments, the kernel has no parameters"):
        small(gpu, own_kernel(gpu, tmp_path, ())).arg_u32(1).launch(0)
    assert gpu.launches == []


@pytest.mark.parametrize("given_kind", sorted(C_TYPES))
@pytest.mark.parametrize("wanted", sorted(C_TYPES))
def test_an_argument_of_another_kind_names_both(
    gpu: FakeBackend, tmp_path: Path, given_kind: str, wanted: str
) -> None:
    launch = small(gpu, own_kernel(gpu, tmp_path, ("u32", wanted))).arg_u32(1)
    getattr(launch, f"arg_{given_kind}")(1)
    if given_kind == wanted:
        launch.launch(0)
        assert len(gpu.launches) == 1
    else:
        message = f"argument 1 is {given_kind}, but parameter 'p1' is {wanted}"
        with pytest.raises(ArgumentTypeError, match=message):
            launch.launch(0)
        assert gpu.launches == []


def test_a_kernel_without_parameters(gpu: FakeBackend, tmp_path: Path) -> None:
    small(gpu, own_kernel(gpu, tmp_path, ())).launch(0)
    assert gpu.last.packed == []


def test_a_reused_builder_launches_the_same_again(gpu: FakeBackend, tmp_path: Path) -> None:
    launch = small(gpu, own_kernel(gpu, tmp_path, ("u32", "f32"))).arg_u32(5).arg_f32(2.5)
    launch.launch(1)
    launch.grid([9, 1, 1]).launch(2)
    first, second = gpu.launches
    assert first.packed == second.packed
    assert (first.grid, second.grid) == ((1, 1, 1), (9, 1, 1))
    assert (first.stream, second.stream) == (1, 2)


def test_interleaved_builders_do_not_mix(gpu: FakeBackend, tmp_path: Path) -> None:
    one_kernel = own_kernel(gpu, tmp_path, ("u32", "u64"))
    other_kernel = own_kernel(gpu, tmp_path, ("u64", "u32"))
    one, other, third = (small(gpu, k) for k in (one_kernel, other_kernel, one_kernel))
    one.arg_u32(1)
    other.arg_u64(2)
    third.arg_u32(3)
    other.arg_u32(4)
    third.arg_u64(5)
    one.arg_u64(6)
    for launch in (third, one, other, one):
        launch.launch(0)
    assert [list(launch.values.values()) for launch in gpu.launches] == [[3, 5], [1, 6], [2, 4], [1, 6]]


def test_each_thread_sees_its_own_arguments(gpu: FakeBackend, tmp_path: Path) -> None:
    """All threads have packed before any of them reads what it packed."""
    threads, rounds = 8, 20
    kernel = own_kernel(gpu, tmp_path, SIX)
    barrier = threading.Barrier(threads, timeout=60)
    gpu.before_read = barrier.wait

    def run(seed: int) -> None:
        for _ in range(rounds):
            launch = small(gpu, kernel).arg_u32(seed).arg_ptr(seed << 40).arg_u32(seed + 1)
            launch.arg_u64(seed << 33).arg_f32(seed / 2).arg_u32(seed + 2).launch(seed)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(1, threads + 1)))
    assert len(gpu.launches) == threads * rounds
    for launch in gpu.launches:
        s = launch.stream
        assert list(launch.values.values()) == [s, s << 40, s + 1, s << 33, s / 2, s + 2]
