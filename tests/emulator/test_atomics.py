"""Atomics, and threads that wait for each other through memory."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from tests.emulator.launching import launch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), [("u32", np.uint32), ("i32", np.int32), ("u64", np.uint64)])
def test_integer_atomics(gpu: EmulatorBackend, name: str, dtype: type, workers: int) -> None:
    gpu.workers = workers
    info = np.iinfo(dtype)
    rng = np.random.default_rng(1)
    values = rng.integers(info.min, info.max, 4 * 96, dtype=dtype, endpoint=True)
    start = np.array([5, info.min, info.max, -1 if info.min else info.max, 0, 3], dtype)
    cells = gpu.asarray(start)
    launch(gpu, "atomics", f"atomics_{name}", cells, gpu.asarray(values), grid=(4, 1, 1), block=96)
    with np.errstate(over="ignore"):
        total = functools.reduce(np.add, values, start[0])
    expected = [
        total,
        values.max(),
        values.min(),
        np.bitwise_and.reduce(values),
        np.bitwise_or.reduce(values),
        np.bitwise_xor.reduce(values) ^ start[5],
    ]
    np.testing.assert_array_equal(cells, np.array(expected, dtype))


def test_float_add(gpu: EmulatorBackend) -> None:
    gpu.workers = 2
    cell = gpu.zeros(1, np.float32)
    launch(gpu, "atomics", "atomic_add_f32", cell, grid=(10, 1, 1), block=100)
    assert cell[0] == 1000


def test_exchange_and_wrapping_counters(gpu: EmulatorBackend) -> None:
    cells = gpu.asarray(np.array([0, 0, 2], np.uint32))
    old = gpu.empty((64, 3), np.uint32)
    launch(gpu, "atomics", "ordered_atomics", cells, old, block=64)
    assert sorted([*old[:, 0], cells[0]]) == list(range(65))
    counts = np.bincount(old[:, 1], minlength=5)
    assert counts.sum() == 64
    assert counts.max() - counts.min() <= 1
    assert cells[1] == 64 % 5
    assert set(old[:, 2]) == {0, 1, 2, 3, 4}
    assert cells[2] == (2 - 64) % 5


@pytest.mark.parametrize("workers", [1, 2])
def test_spin_lock(gpu: EmulatorBackend, workers: int) -> None:
    gpu.workers = workers
    lock, total = gpu.zeros(1, np.uint32), gpu.zeros(1, np.uint64)
    launch(gpu, "atomics", "spin_lock", lock, total, grid=(4, 1, 1), block=64)
    assert total[0] == 256
    assert lock[0] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_last_block_sees_all_others(gpu: EmulatorBackend, workers: int) -> None:
    gpu.workers = workers
    partial, counter, out = gpu.zeros(40, np.uint32), gpu.zeros(1, np.uint32), gpu.zeros(1, np.uint32)
    for _ in range(3):
        out[0] = 0
        launch(gpu, "atomics", "last_block_sums", partial, counter, out, grid=(40, 1, 1), block=64)
        assert out[0] == 820
        assert counter[0] == 0


def test_acquire_waits_for_release(gpu: EmulatorBackend) -> None:
    flag, data = gpu.zeros(1, np.uint32), gpu.zeros(2, np.uint32)
    launch(gpu, "atomics", "acquire_release", flag, data, block=64)
    assert tuple(data) == (41, 42)
