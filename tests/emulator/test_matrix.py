"""Matrix instructions against float64 and their PTX layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.errors import MisalignedFault
from tests.emulator.launching import launch

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def product(gpu: EmulatorBackend, a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str) -> np.ndarray:
    out = gpu.asarray(c.astype(np.float32))
    launch(gpu, "matrix", "multiply", gpu.asarray(a), gpu.asarray(b), out, int(name == "bf16"))
    return out


@pytest.mark.parametrize("name", DTYPES)
def test_product_is_rounded_once(gpu: EmulatorBackend, name: str) -> None:
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-8, 8, (16, 16))).astype(DTYPES[name])
    b = rng.standard_normal((16, 8)).astype(DTYPES[name])
    c = rng.standard_normal((16, 8)).astype(np.float32)
    exact = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(product(gpu, a, b, c, name), exact.astype(np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_every_half_passes_through(fifo: EmulatorBackend, name: str) -> None:
    identity = np.eye(16, 8).astype(DTYPES[name])
    identity_8 = np.eye(16, 8, k=-8).astype(DTYPES[name])
    finite = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    finite = np.where(np.isfinite(finite.astype(np.float32)), finite, np.zeros(1, DTYPES[name]))
    zero = np.zeros((16, 8))
    for block in finite.reshape(-1, 16, 16)[::7]:
        left, right = (product(fifo, block, b, zero, name) for b in (identity, identity_8))
        np.testing.assert_array_equal(np.hstack([left, right]), block.astype(np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_nan_and_infinity_stay_in_their_rows(fifo: EmulatorBackend, name: str) -> None:
    a = np.ones((16, 16), DTYPES[name])
    a[3, 5], a[4, 6], a[5, 0], a[5, 1] = np.nan, np.inf, np.inf, -np.inf
    b = np.ones((16, 8), DTYPES[name])
    expected = np.full((16, 8), 16.0, np.float32)
    expected[3], expected[4], expected[5] = np.nan, np.inf, np.nan
    np.testing.assert_array_equal(product(fifo, a, b, np.zeros((16, 8)), name), expected)


def test_transposition(gpu: EmulatorBackend) -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = gpu.empty((8, 8), np.uint16)
    launch(gpu, "matrix", "transpose", gpu.asarray(matrix), out)
    np.testing.assert_array_equal(out, matrix.T)


def test_fragments_from_shared_memory(gpu: EmulatorBackend) -> None:
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = gpu.empty((2, 32, 4, 2), np.uint16)
    launch(gpu, "matrix", "load_fragments", gpu.asarray(matrices), out, 0)
    for i in range(4):
        np.testing.assert_array_equal(out[0, :, i].reshape(8, 8), matrices[i])
        np.testing.assert_array_equal(out[1, :, i].reshape(8, 8), matrices[i].T)


def test_misaligned_matrix_row(fifo: EmulatorBackend) -> None:
    matrices, out = fifo.zeros(256, np.uint16), fifo.empty(512, np.uint32)
    with pytest.raises(MisalignedFault, match="16-byte"):
        launch(fifo, "matrix", "load_fragments", matrices, out, 4)
