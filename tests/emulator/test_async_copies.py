"""cp.async groups, mbarriers and bulk copies."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.errors import AsyncCopyFault, DeadlockFault
from tests.emulator.launching import launch


def test_cp_async_ring(gpu: EmulatorBackend) -> None:
    tiles = np.random.default_rng(0).integers(-100, 100, (11, 64, 4)).astype(np.float32)
    out = gpu.empty((64, 4), np.float32)
    launch(gpu, "async_copies", "cp_async_ring", gpu.asarray(tiles), out, 11, block=64, SPEC_PENDING=1)
    np.testing.assert_array_equal(out, np.roll(tiles.sum(axis=0), -1, axis=0))


def test_a_wait_that_is_too_weak_reads_poison(fifo: EmulatorBackend) -> None:
    tiles = np.ones((11, 64, 4), np.float32)
    out = fifo.empty((64, 4), np.float32)
    launch(fifo, "async_copies", "cp_async_ring", fifo.asarray(tiles), out, 11, block=64, SPEC_PENDING=2)
    assert np.isnan(out).any()


def test_small_copies(gpu: EmulatorBackend) -> None:
    data = np.arange(32 * 12, dtype=np.uint32).astype(np.uint8)
    out = gpu.empty(data.size, np.uint8)
    launch(gpu, "async_copies", "cp_async_small", gpu.asarray(data), out)
    np.testing.assert_array_equal(out, data)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 17])
def test_producer_and_consumers(gpu: EmulatorBackend, tiles: int) -> None:
    data = np.random.default_rng(0).integers(-100, 100, (tiles, 64)).astype(np.float32)
    for seed in range(3):
        gpu.seed = seed
        out = gpu.empty(64, np.float32)
        launch(gpu, "async_copies", "bulk_ring", gpu.asarray(data), out, tiles, block=96)
        np.testing.assert_array_equal(out, data.sum(axis=0))


def bulk(
    gpu: EmulatorBackend,
    *,
    copied: int = 128,
    expected: int = 128,
    offset: int = 0,
    source: int = 0,
    wait: int = 1,
    early: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    data = gpu.asarray(np.arange(1024).astype(np.uint8))
    out = gpu.zeros(32, np.uint8)
    launch(gpu, "async_copies", "one_bulk_copy", data[source:], out, copied, expected, offset, wait, early)
    return data, out


def test_bulk_copy_lands_when_it_is_waited_for(gpu: EmulatorBackend) -> None:
    data, out = bulk(gpu)
    np.testing.assert_array_equal(out, data[:32])


def test_reading_before_the_wait_reads_poison(fifo: EmulatorBackend) -> None:
    _, out = bulk(fifo, early=1)
    assert (out == 0xFF).all()


@pytest.mark.parametrize("wrong", [{"offset": 8}, {"source": 4}, {"copied": 120}, {"copied": 0}])
def test_bulk_copy_wants_multiples_of_16(gpu: EmulatorBackend, wrong: dict[str, int]) -> None:
    with pytest.raises(AsyncCopyFault, match="multiples of 16") as caught:
        bulk(gpu, **wrong)
    assert caught.value.kernel == "one_bulk_copy"
    assert caught.value.block == (0, 0, 0)
    assert caught.value.thread == (0, 0, 0)


def test_more_bytes_than_expected(gpu: EmulatorBackend) -> None:
    for seed in range(4):
        gpu.seed = seed
        with pytest.raises(AsyncCopyFault, match=r"more bytes landed|still expects 112 bytes"):
            bulk(gpu, expected=112)


def test_fewer_bytes_than_expected(gpu: EmulatorBackend) -> None:
    with pytest.raises(DeadlockFault, match=r"lacks 0 arrivals and \d+ bytes, of which \d+ are in flight"):
        bulk(gpu, expected=144)


def test_a_copy_nobody_waits_for(fifo: EmulatorBackend) -> None:
    with pytest.raises(AsyncCopyFault, match="ended with 1 bulk copies in flight"):
        bulk(fifo, wait=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, "not initialised"),
        (1, "arrivals 0"),
        (3, "not in shared memory"),
        (4, "not in shared memory"),
        (5, "must be multiples of 16"),
    ],
)
def test_misuse(fifo: EmulatorBackend, kind: int, message: str) -> None:
    with pytest.raises(AsyncCopyFault, match=message):
        launch(fifo, "async_copies", "misused_barrier", kind, fifo.zeros(64, np.uint8), block=1)


def test_waiting_for_arrivals_that_never_come(gpu: EmulatorBackend) -> None:
    with pytest.raises(DeadlockFault, match="lacks 2 arrivals and 0 bytes"):
        launch(gpu, "async_copies", "misused_barrier", 2, gpu.zeros(64, np.uint8), block=1)


def stream(gpu: EmulatorBackend, tiles: int, fault: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What a ring filled by cp.async adds up, and what it should."""
    data = np.random.default_rng(0).integers(-100, 100, (tiles, 64)).astype(np.float32)
    out = gpu.empty(64, np.float32)
    launch(gpu, "faulty_copies", "arrive_stream", gpu.asarray(data), out, tiles, fault, block=96)
    return out, data.sum(axis=0)


@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 4, 17])
def test_copies_that_arrive_at_a_barrier(gpu: EmulatorBackend, tiles: int) -> None:
    for seed in range(3):
        gpu.seed = seed
        np.testing.assert_array_equal(*stream(gpu, tiles))


def test_arriving_before_the_copies_reads_poison(fifo: EmulatorBackend) -> None:
    assert np.isnan(stream(fifo, 3, fault=2)[0]).all()


def test_arrivals_nobody_waits_for(fifo: EmulatorBackend) -> None:
    with pytest.raises(AsyncCopyFault, match=r"ended with 32 arrivals of cp\.async copies in flight"):
        stream(fifo, 1, fault=1)


def test_more_arrivals_than_counted_on(fifo: EmulatorBackend) -> None:
    with pytest.raises(AsyncCopyFault, match="an arrival beyond the 32 of its phase, for which 31 arrivals"):
        stream(fifo, 1, fault=3)


def test_fewer_arrivals_than_counted_on(fifo: EmulatorBackend) -> None:
    message = "lacks 33 arrivals and 0 bytes, of which 0 are in flight, as are 32 of the arrivals"
    with pytest.raises(DeadlockFault, match=message):
        stream(fifo, 1, fault=4)
