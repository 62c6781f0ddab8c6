"""Indices, parameters, types and fresh shared memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from tests.emulator.launching import launch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["fifo", "reverse", "random"])
def test_every_thread_runs_once(schedule: str, workers: int) -> None:
    gpu = EmulatorBackend(schedule=schedule, workers=workers, seed=3)
    grid, block = (3, 2, 5), (5, 3, 2)
    out = gpu.empty((3 * 2 * 5 * 30, 6), np.int32)
    dims = gpu.empty(6, np.uint64)
    launch(gpu, "geometry", "indices", out, dims, grid=grid, block=block)
    expected = [
        (x, y, z, bx, by, bz)
        for bz, by, bx in itertools.product(*(range(n) for n in reversed(grid)))
        for z, y, x in itertools.product(*(range(n) for n in reversed(block)))
    ]
    np.testing.assert_array_equal(out, expected)
    assert tuple(dims) == grid + block


def test_parameters_of_every_kind(fifo: EmulatorBackend) -> None:
    out = fifo.empty(6, np.float64)
    cell = fifo.asarray(np.array([17], np.uint32))
    launch(fifo, "geometry", "parameters", out, 2**32 - 1, -5, 2**52 + 1, -(2**40), 0.5, cell)
    np.testing.assert_array_equal(out, [2**32 - 1, -5, 2**52 + 1, -(2**40), 0.5, 17])


def test_vector_alignments_are_cudas(fifo: EmulatorBackend) -> None:
    out = fifo.empty(10, np.uint32)
    launch(fifo, "geometry", "sizes", out, block=1, shared_mem=64)
    np.testing.assert_array_equal(out, [4, 4, 4, 8, 16, 16, 12, 32, 0, 0])


@pytest.mark.parametrize("workers", [1, 2])
def test_each_block_finds_poisoned_shared_memory(workers: int) -> None:
    gpu = EmulatorBackend(workers=workers)
    out = gpu.zeros((50, 64), np.uint32)
    launch(gpu, "geometry", "untouched_shared", out, grid=(50, 1, 1), shared_mem=128)
    assert (out == 0xFFFFFFFF).all()


def test_many_small_blocks(gpu: EmulatorBackend) -> None:
    total = gpu.zeros(1, np.uint32)
    launch(gpu, "geometry", "count_threads", total, grid=(100_000, 1, 1))
    assert total[0] == 3_200_000


def test_stacks_are_reused(fifo: EmulatorBackend) -> None:
    def mappings() -> int:
        with Path("/proc/self/maps").open() as maps:
            return sum(1 for _ in maps)

    total = fifo.zeros(1, np.uint32)
    values = fifo.zeros(1024, np.float32)
    launch(fifo, "collectives", "rotate", values, 1, block=1024, SPEC_BROKEN=0)
    before = mappings()
    for _ in range(50):
        launch(fifo, "collectives", "rotate", values, 1, block=1024, SPEC_BROKEN=0)
        launch(fifo, "geometry", "count_threads", total, block=1024)
    assert mappings() <= before + 10
    assert total[0] == 50 * 1024
