"""Faults are found, and their reports name kernel, block, thread and cause."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.errors import CompileError, DeadlockFault, KernelFault, LaunchError, WarpMismatchFault
from tests.emulator.launching import launch


def test_deadlock_names_lanes_and_what_they_wait_for(gpu: EmulatorBackend) -> None:
    with pytest.raises(DeadlockFault) as caught:
        launch(gpu, "faults", "stuck", gpu.zeros(64, np.uint32), block=64)
    text = str(caught.value)
    assert "stuck" in text
    assert caught.value.kernel == "stuck"
    assert caught.value.block == (0, 0, 0)
    assert "warp 1" in text
    assert "0xffff0000 wait in __syncthreads" in text
    assert "0x0000ffff wait in __shfl_xor_sync(mask 0xffffffff) for 0xffff0000" in text


def test_half_a_warp_in_a_full_shuffle(gpu: EmulatorBackend) -> None:
    with pytest.raises(WarpMismatchFault, match=r"__shfl_xor_sync.*meets|meets __shfl_xor_sync"):
        launch(gpu, "faults", "half_a_warp", gpu.zeros(32, np.uint32))


def test_mask_without_the_caller(gpu: EmulatorBackend) -> None:
    with pytest.raises(WarpMismatchFault, match="leaves out the calling lane") as caught:
        launch(gpu, "faults", "mask_without_self", gpu.zeros(32, np.uint32))
    assert caught.value.thread is not None
    assert caught.value.thread[0] >= 16


def test_matrix_product_of_part_of_a_warp(fifo: EmulatorBackend) -> None:
    with pytest.raises(WarpMismatchFault, match="needs all 32 lanes"):
        launch(fifo, "faults", "partial_warp_product", block=20)


@pytest.mark.parametrize("workers", [1, 2])
def test_endless_spin(gpu: EmulatorBackend, workers: int) -> None:
    gpu.workers = workers
    with pytest.raises(DeadlockFault, match=r"load_acquire|spin_pause"):
        launch(gpu, "faults", "waits_for_nobody", gpu.zeros(1, np.uint32), grid=(3, 1, 1))


@pytest.mark.parametrize("workers", [1, 2])
def test_trap_names_its_thread(gpu: EmulatorBackend, workers: int) -> None:
    gpu.workers = workers
    with pytest.raises(KernelFault, match="__trap") as caught:
        launch(gpu, "faults", "traps", grid=(1, 2, 1))
    assert caught.value.block == (0, 1, 0)
    assert caught.value.thread == (5, 0, 0)


def test_the_backend_works_after_a_fault(gpu: EmulatorBackend) -> None:
    for _ in range(20):
        with pytest.raises(DeadlockFault):
            launch(gpu, "faults", "stuck", gpu.zeros(64, np.uint32), block=64)
        total = gpu.zeros(1, np.uint32)
        launch(gpu, "geometry", "count_threads", total, block=64)
        assert total[0] == 64


def test_compile_error_holds_the_log(fifo: EmulatorBackend) -> None:
    with pytest.raises(CompileError, match="no_such_name") as caught:
        launch(fifo, "faults", "does_not_compile", SPEC_BAD=1)
    assert "no_such_name" in caught.value.log
    assert "faults.cu" in caught.value.command + caught.value.log


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block": 1025}, "1025 threads"),
        ({"block": (0, 1, 1)}, "0"),
        ({"shared_mem": 300_000}, "shared memory are"),
    ],
)
def test_impossible_launches(fifo: EmulatorBackend, wrong: dict[str, int], message: str) -> None:
    with pytest.raises((LaunchError, ValueError), match=message):
        launch(fifo, "geometry", "nothing", **wrong)
