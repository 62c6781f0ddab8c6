"""Conversions and intrinsics against numpy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from tests.emulator.launching import launch


def awkward_floats() -> np.ndarray:
    """Float32 values: every upper half of the bits, with lower halves at and around ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


def test_packing_rounds_to_nearest_even(fifo: EmulatorBackend) -> None:
    values = awkward_floats()
    f16, bf16 = fifo.empty(values.size, np.uint16), fifo.empty(values.size, np.uint16)
    launch(fifo, "arithmetic", "pack_halves", fifo.asarray(values), f16, bf16, values.size)
    nan = np.isnan(values)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(f16[~nan], values[~nan].astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(bf16[~nan], values[~nan].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert (f16[nan] == 0x7FFF).all()
    assert (bf16[nan] == 0x7FFF).all()


def test_half_products(fifo: EmulatorBackend) -> None:
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16)
    a = np.concatenate([every, every, rng.integers(0, 1 << 16, 1 << 18, dtype=np.uint16)])
    b = rng.integers(0, 1 << 16, a.size, dtype=np.uint16)
    b[: 1 << 16] = 0x5C00
    out = fifo.empty(a.size, np.uint16)
    launch(fifo, "arithmetic", "multiply_halves", fifo.asarray(a), fifo.asarray(b), out, a.size // 2)
    with np.errstate(all="ignore"):
        exact = a.view(np.float16).astype(np.float64) * b.view(np.float16).astype(np.float64)
        expected = exact.astype(np.float16)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(out[~nan], expected[~nan].view(np.uint16))
    assert np.isnan(out[nan].view(np.float16)).all()


def test_exp2(fifo: EmulatorBackend) -> None:
    rng = np.random.default_rng(0)
    special = [0, -0.0, 1, -126, -126.00001, -127, -150, -3e38, 127.99, 128, 3e38, np.inf, -np.inf, np.nan]
    values = np.concatenate([special, rng.uniform(-140, 128, 200_000), rng.uniform(-1, 1, 50_000)])
    values = values.astype(np.float32)
    out = fifo.empty(values.size, np.float32)
    launch(fifo, "arithmetic", "exp2_of", fifo.asarray(values), out, values.size)
    with np.errstate(over="ignore"):
        exact = np.exp2(values.astype(np.float64))
        expected = exact.astype(np.float32)
    expected[exact < 2.0**-126] = 0
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    ulp = np.spacing(expected[finite])
    assert (np.abs(out[finite] - exact[finite] * (expected[finite] != 0)) <= ulp).all()


def test_byte_permutation(fifo: EmulatorBackend) -> None:
    rng = np.random.default_rng(0)
    a, b, selector = rng.integers(0, 1 << 32, (3, 256), dtype=np.uint32)
    out = fifo.empty((256, 2), np.uint32)
    launch(fifo, "arithmetic", "permute_bytes", *map(fifo.asarray, (a, b, selector)), out, block=256)
    for i in range(256):
        pool = int(a[i]).to_bytes(4, "little") + int(b[i]).to_bytes(4, "little")
        expected = 0
        for k in range(4):
            nibble = int(selector[i]) >> 4 * k & 15
            byte = pool[nibble & 7]
            expected |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * k
        assert out[i, 0] == expected
    np.testing.assert_array_equal(out[:, 1], (a & selector) | (b & ~selector))


def test_bit_counts(fifo: EmulatorBackend) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 64, dtype=np.uint32) >> rng.integers(0, 32, 64, dtype=np.uint32)
    values[0] = 0
    out = fifo.empty((64, 4), np.int32)
    launch(fifo, "arithmetic", "count_bits", fifo.asarray(values), out, block=64)
    for value, row in zip(values.tolist(), out.tolist(), strict=True):
        assert row[:2] == [value.bit_count(), 32 - value.bit_length()]
        assert row[2] == (value & -value).bit_length()
        assert row[3] & 0xFFFFFFFF == int(f"{value:032b}"[::-1], 2)


def test_float_pairs(fifo: EmulatorBackend) -> None:
    inf, nan = np.inf, np.nan
    special = np.array([0.0, -0.0, 1.0, -1.0, 0.1, 3e38, 1e-45, inf, -inf, nan], np.float32)
    a, b = (m.reshape(-1) for m in np.meshgrid(special, special))
    out = fifo.empty((100, 6), np.float32)
    launch(fifo, "arithmetic", "float_pairs", fifo.asarray(a), fifo.asarray(b), out, block=100)
    with np.errstate(all="ignore"):
        columns = [np.fmax(a, b), np.fmin(a, b), a + b, a * b, a / b]
        fused = (a.astype(np.float64) * b + a).astype(np.float32)
    for i, expected in enumerate([*columns, fused]):
        np.testing.assert_array_equal(out[:, i], expected)
    zeros = (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(out[zeros, 0]), np.signbit(a[zeros]) & np.signbit(b[zeros]))
    np.testing.assert_array_equal(np.signbit(out[zeros, 1]), np.signbit(a[zeros]) | np.signbit(b[zeros]))


def test_mixed_signedness_compares_unsigned(fifo: EmulatorBackend) -> None:
    out = fifo.empty(5, np.uint64)
    launch(fifo, "arithmetic", "mixed_min_max", out, block=1)
    assert out.tolist() == [2**32 - 1, 1, 1, 2, 1]


@pytest.mark.parametrize(
    ("value", "nearest", "toward_zero", "unsigned"),
    [
        (2.5, 2, 2, 2),
        (3.5, 4, 3, 4),
        (-1.5, -2, -1, 0),
        (np.nan, 0, 0, 0),
        (1e20, 2**31 - 1, 2**31 - 1, -1),
        (-1e20, -(2**31), -(2**31), 0),
    ],
)
def test_float_to_int(
    fifo: EmulatorBackend, value: float, nearest: int, toward_zero: int, unsigned: int
) -> None:
    out = fifo.empty(3, np.int32)
    launch(fifo, "arithmetic", "float_to_int", fifo.asarray(np.array([value], np.float32)), out, block=1)
    assert out.tolist() == [nearest, toward_zero, unsigned]
