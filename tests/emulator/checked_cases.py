"""The kernels of ``kernels/faulty_*.cu`` with their arguments, for any backend and any of their faults."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from cupaged.backends.emulator import EmulatorBackend
from tests.emulator.launching import KERNELS, launch

Case = Callable[[EmulatorBackend, int], None]


def place(module: str, mark: str) -> str:
    """``file:line`` of the line that ends with the comment ``here: mark``."""
    lines = (KERNELS / f"{module}.cu").read_text().splitlines()
    found = [n for n, line in enumerate(lines, 1) if re.search(rf"// here: {re.escape(mark)}$", line)]
    assert len(found) == 1, f"{module}.cu has {len(found)} lines marked {mark!r}"
    return f"{module}.cu:{found[0]}"


def numbers(gpu: EmulatorBackend, count: int, dtype: type = np.uint32) -> np.ndarray:
    return gpu.asarray(np.arange(count).astype(dtype))


# ---- barriers


def rotate(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty(64, np.float32)
    launch(gpu, "faulty_barriers", "rotate", numbers(gpu, 64, np.float32), out, 3, fault, block=64)
    assert fault or np.array_equal(out, np.roll(np.arange(64), -3 * 37))


def swap_neighbours(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty(32, np.uint32)
    launch(gpu, "faulty_barriers", "swap_neighbours", numbers(gpu, 32), out, fault)
    assert fault or np.array_equal(out, np.arange(32) ^ 1)


def meet_in_parts(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_barriers", "meet_in_parts", gpu.empty(32, np.uint32))


def read_written(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty(2, np.uint32)
    launch(gpu, "faulty_barriers", "read_written", out, fault, grid=(2, 1, 1), block=64, shared_mem=64)
    assert fault or (out == 64 * 63).all()


def pack_bytes(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty((2, 64), np.uint8)
    launch(gpu, "faulty_barriers", "pack_bytes", out, fault, grid=(2, 1, 1), block=64)


def publish(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_barriers", "publish", gpu.empty(96, np.uint32), 5, fault, block=96)


def add_up(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty(1, np.uint32)
    launch(gpu, "faulty_barriers", "add_up", out, fault, block=64)
    assert fault or out[0] == 64


# ---- bounds


def store(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_bounds", "store", gpu.zeros(34, np.uint32)[1:33], 32, fault)


def read_table(gpu: EmulatorBackend, fault: int) -> None:
    # A table inside a larger array: only the view counts.
    table = gpu.zeros((4, 5), np.int32)[:3]
    launch(
        gpu, "faulty_bounds", "read_table", table, gpu.zeros(3, np.int32), 5, fault, grid=(3, 1, 1), block=1
    )


def copy(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_bounds", "copy", numbers(gpu, 32), gpu.empty(32, np.uint32), fault)


def index_shared(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_bounds", "index_shared", gpu.empty(32, np.uint32), fault, shared_mem=128)


def load_vector(gpu: EmulatorBackend, fault: int) -> None:
    out, counter = gpu.empty((8, 4), np.float32), gpu.zeros(2, np.uint64)
    launch(gpu, "faulty_bounds", "load_vector", gpu.zeros(36, np.float32), out, counter, fault, block=8)


def divide(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_bounds", "divide", gpu.empty(32, np.uint32), 1 - fault)


def copy_struct(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_bounds", "copy_struct", numbers(gpu, 40), gpu.empty(40, np.uint32), fault, block=1)


def fetch_ahead(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty(32, np.uint32)
    launch(gpu, "faulty_bounds", "fetch_ahead", numbers(gpu, 64), out, 64, fault)
    assert fault or np.array_equal(out, 2 * np.arange(32))


# ---- asynchronous copies


def load_fragments(gpu: EmulatorBackend, fault: int) -> None:
    out = gpu.empty((32, 4), np.uint32)
    launch(gpu, "faulty_copies", "load_fragments", numbers(gpu, 256, np.uint16), out, fault)


def stream(gpu: EmulatorBackend, fault: int) -> None:
    tiles = numbers(gpu, 7 * 64 * 4, np.float32)
    out = gpu.empty((64, 4), np.float32)
    launch(gpu, "faulty_copies", "stream", tiles, out, 7, fault, block=64)
    assert fault or np.array_equal(np.roll(out, 1, axis=0), tiles.reshape(7, 64, 4).sum(axis=0))


def bulk_stream(gpu: EmulatorBackend, fault: int) -> None:
    tiles = numbers(gpu, 7 * 64, np.float32)
    out = gpu.empty(64, np.float32)
    launch(gpu, "faulty_copies", "bulk_stream", tiles, out, 7, fault, block=96)
    assert fault or np.array_equal(out, tiles.reshape(7, 64).sum(axis=0))


def arrive_stream(gpu: EmulatorBackend, fault: int) -> None:
    tiles = numbers(gpu, 7 * 64, np.float32)
    out = gpu.empty(64, np.float32)
    launch(gpu, "faulty_copies", "arrive_stream", tiles, out, 7, fault, block=96)
    assert fault or np.array_equal(out, tiles.reshape(7, 64).sum(axis=0))


# ---- blocks together


def own_cells(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faulty_blocks", "own_cells", gpu.empty(96, np.uint32), fault, grid=(3, 1, 1))


def last_block_sums(gpu: EmulatorBackend, fault: int) -> None:
    parts, counter, out = gpu.empty((5, 64), np.uint32), gpu.zeros(1, np.uint32), gpu.zeros(1, np.uint32)
    launch(gpu, "faulty_blocks", "last_block_sums", parts, counter, out, fault, grid=(5, 1, 1), block=64)
    assert fault or out[0] == 5 * 32 * 63


def last_block_by_fences(gpu: EmulatorBackend, fault: int) -> None:
    parts, counter, out = gpu.empty((5, 64), np.uint32), gpu.zeros(1, np.uint32), gpu.zeros(1, np.uint32)
    launch(gpu, "faulty_blocks", "last_block_by_fences", parts, counter, out, grid=(5, 1, 1), block=64)
    assert out[0] == 5 * 32 * 63


def read_neighbour(gpu: EmulatorBackend, fault: int) -> None:
    """Twice: a counter that is not set back does no harm before the second launch."""
    parts, counters, out = (
        gpu.empty((3, 64), np.uint32),
        gpu.zeros(2, np.uint32),
        gpu.empty((3, 64), np.uint32),
    )
    for _ in range(2):
        launch(
            gpu, "faulty_blocks", "read_neighbour", parts, counters, out, fault,
            grid=(3, 1, 1), block=64, cooperative=True,
        )  # fmt: skip


def hand_over(gpu: EmulatorBackend, fault: int) -> None:
    data = gpu.zeros(2, np.uint32)
    launch(gpu, "faulty_blocks", "hand_over", gpu.zeros(1, np.uint32), data, fault, block=64)
    assert fault or data.tolist() == [41, 42]


def release_acquire(gpu: EmulatorBackend, fault: int) -> None:
    data = gpu.zeros(2, np.uint32)
    launch(gpu, "faulty_blocks", "release_acquire", gpu.zeros(1, np.uint32), data, fault, block=64)
    assert fault or data.tolist() == [41, 42]


def watch_flag(gpu: EmulatorBackend, fault: int) -> None:
    data = gpu.zeros(2, np.uint32)
    launch(gpu, "faulty_blocks", "watch_flag", gpu.zeros(1, np.uint32), data, fault, block=64)
    assert fault or data.tolist() == [41, 42]


def locked_sum(gpu: EmulatorBackend, fault: int) -> None:
    lock, total = gpu.zeros(1, np.uint32), gpu.zeros(1, np.uint32)
    launch(gpu, "faulty_blocks", "locked_sum", lock, total, fault, grid=(3, 1, 1), block=128)
    assert fault or total[0] == 12


def shift_blocks(gpu: EmulatorBackend, fault: int) -> None:
    cells = [numbers(gpu, 96), gpu.empty(96, np.uint32)]
    for _ in range(2):
        launch(gpu, "faulty_blocks", "shift_blocks", *cells, grid=(3, 1, 1))
        cells.reverse()


# Correct twins, and the launches that each makes.
TWINS: dict[Case, int] = {
    **dict.fromkeys(
        [
            rotate, swap_neighbours, meet_in_parts, read_written, pack_bytes, publish, add_up,
            store, read_table, copy, index_shared, load_vector, divide, copy_struct, fetch_ahead,
            load_fragments, stream, bulk_stream, arrive_stream,
            own_cells, last_block_sums, last_block_by_fences, hand_over, release_acquire, watch_flag,
            locked_sum,
        ],
        1,
    ),
    read_neighbour: 2,
    shift_blocks: 2,
}  # fmt: skip


# ---- deadlocks and wrong masks: kernels of faults.cu, which are never right


def stuck(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faults", "stuck", gpu.zeros(64, np.uint32), block=64)


def half_a_warp(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faults", "half_a_warp", gpu.zeros(32, np.uint32))


def mask_without_self(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faults", "mask_without_self", gpu.zeros(32, np.uint32))


def waits_for_nobody(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faults", "waits_for_nobody", gpu.zeros(1, np.uint32))


def traps(gpu: EmulatorBackend, fault: int) -> None:
    launch(gpu, "faults", "traps", grid=(1, 2, 1))
