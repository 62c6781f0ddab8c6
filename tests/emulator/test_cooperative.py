"""Cooperative launches: all blocks at once."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.errors import DeadlockFault, LaunchError
from tests.emulator.launching import launch


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_blocks_meet_at_a_grid_barrier(gpu: EmulatorBackend, blocks: int) -> None:
    counter, cells = gpu.zeros(1, np.uint32), gpu.zeros(blocks, np.uint32)
    out = gpu.empty((blocks, 2), np.uint32)
    launch(
        gpu, "cooperative", "pass_round", counter, cells, out, 5,
        grid=(blocks, 1, 1), block=96, shared_mem=256, cooperative=True,
    )  # fmt: skip
    ids = np.arange(blocks)
    np.testing.assert_array_equal(out, np.stack([(ids + 5) % blocks, 100 + ids], axis=1))


def test_blocks_one_after_another_deadlock_at_a_grid_barrier(gpu: EmulatorBackend) -> None:
    counter, cells, out = gpu.zeros(1, np.uint32), gpu.zeros(2, np.uint32), gpu.empty((2, 2), np.uint32)
    with pytest.raises(DeadlockFault, match="only spin"):
        launch(gpu, "cooperative", "pass_round", counter, cells, out, 1, grid=(2, 1, 1), shared_mem=256)


def test_the_report_names_the_waiting_blocks(gpu: EmulatorBackend) -> None:
    counter = gpu.zeros(1, np.uint32)
    with pytest.raises(DeadlockFault) as caught:
        launch(gpu, "cooperative", "one_block_missing", counter, grid=(4, 1, 1), block=64, cooperative=True)
    text = str(caught.value)
    for x in (0, 1, 3):
        assert f"block ({x}, 0, 0):" in text
    assert "block (2, 0, 0):" not in text
    assert "load_acquire" in text or "spin_pause" in text
    assert "0xfffffffe wait in __syncthreads" in text


def test_too_many_resident_threads(fifo: EmulatorBackend) -> None:
    most = fifo.limits.cooperative_threads
    assert most is not None
    blocks = most // 1024
    counter, cells = fifo.zeros(1, np.uint32), fifo.zeros(blocks + 1, np.uint32)
    out = fifo.empty((blocks + 1, 2), np.uint32)

    def pass_round(count: int) -> None:
        launch(
            fifo, "cooperative", "pass_round", counter, cells, out, 1,
            grid=(count, 1, 1), block=1024, shared_mem=256, cooperative=True,
        )  # fmt: skip

    pass_round(blocks)
    np.testing.assert_array_equal(out[:blocks, 0], (np.arange(blocks) + 1) % blocks)
    with pytest.raises(LaunchError, match=f"cooperative launch of {blocks + 1} blocks of 1024 threads"):
        pass_round(blocks + 1)
