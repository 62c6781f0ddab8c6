"""Shuffles, votes and barriers against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend
from tests.emulator.launching import launch

FULL = 0xFFFFFFFF
KINDS = ("indexed", "up", "down", "exchange")


def source_lane(kind: str, lane: int, operand: int, width: int) -> int:
    """The lane that a shuffle reads, as the CUDA programming guide defines it."""
    start = lane // width * width
    if kind == "indexed":
        return start + operand % width
    if kind == "up":
        return lane - operand if lane - operand >= start else lane
    if kind == "down":
        return lane + operand if lane + operand < start + width else lane
    source = lane ^ operand
    return source if source < start + width else lane


def random_partition(rng: np.random.Generator) -> np.ndarray:
    """masks u32 [32]: lanes fall into disjoint groups, one of which (mask 0) takes no part."""
    group = rng.integers(0, 4, 32)
    bits = 1 << np.arange(32, dtype=np.uint64)
    masks = np.array([bits[group == g].sum() for g in range(4)], np.uint32)
    masks[3] = 0
    return masks[group]


@pytest.mark.parametrize("width", [32, 16, 8, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), [("u32", np.uint32), ("u64", np.uint64), ("f32", np.float32)])
def test_full_shuffles(gpu: EmulatorBackend, kind: str, width: int, name: str, dtype: type) -> None:
    rng = np.random.default_rng(width)
    values = gpu.asarray(rng.integers(0, 2**31, 96).astype(dtype))
    operands = gpu.asarray(rng.integers(0, 32, 96, dtype=np.int32))
    if kind != "indexed":
        operands[:] = operands[0]
    masks = gpu.asarray(np.full(32, FULL, np.uint32))
    out = gpu.zeros(96, dtype)
    launch(
        gpu,
        "collectives",
        f"shuffle_{name}",
        values,
        out,
        operands,
        masks,
        KINDS.index(kind),
        width,
        block=96,
    )
    sources = [i // 32 * 32 + source_lane(kind, i % 32, int(operands[i]), width) for i in range(96)]
    np.testing.assert_array_equal(out, values[sources])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_shuffles_of_disjoint_groups(gpu: EmulatorBackend, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = gpu.asarray(rng.integers(0, 2**31, 32, dtype=np.uint32))
    operands = gpu.asarray(np.full(32, rng.integers(1, 8), np.int32))
    masks = gpu.asarray(random_partition(rng))
    out = gpu.zeros(32, np.uint32)
    launch(gpu, "collectives", "shuffle_u32", values, out, operands, masks, KINDS.index(kind), 32)
    for lane in range(32):
        source = source_lane(kind, lane, int(operands[lane]), 32)
        if masks[lane] == 0:
            expected = 0
        elif masks[lane] >> source & 1:
            expected = values[source]
        else:
            expected = FULL  # undefined on the device; the emulator gives all ones
        assert out[lane] == expected


@pytest.mark.parametrize("seed", range(4))
def test_votes(gpu: EmulatorBackend, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = random_partition(rng) if seed else np.full(32, FULL, np.uint32)
    predicates = rng.integers(0, 2, 64, dtype=np.int32) * 5
    predicates[rng.random(64) < 0.3] = 0
    out = gpu.zeros((64, 3), np.uint32)
    launch(gpu, "collectives", "votes", gpu.asarray(predicates), out, gpu.asarray(masks), block=64)
    for i in range(64):
        mask = int(masks[i % 32])
        ballot = sum(1 << b for b in range(32) if mask >> b & 1 and predicates[i // 32 * 32 + b])
        expected = [ballot, ballot != 0, ballot == mask] if mask else [0, 0, 0]
        np.testing.assert_array_equal(out[i], expected)


@pytest.mark.parametrize("threads", [1, 31, 64, 100, 1024])
def test_block_votes(gpu: EmulatorBackend, threads: int) -> None:
    for holding in {0, threads // 2, threads}:
        predicates = np.zeros(threads, np.int32)
        predicates[:holding] = 2
        out = gpu.zeros((threads, 3), np.int32)
        launch(gpu, "collectives", "block_votes", gpu.asarray(predicates), out, block=threads)
        np.testing.assert_array_equal(out, np.tile([holding > 0, holding == threads, holding], (threads, 1)))


def test_overlapping_masks(gpu: EmulatorBackend) -> None:
    out = gpu.zeros(32, np.uint32)
    launch(gpu, "collectives", "nested_masks", out)
    values = np.array([lane ^ 1 if lane < 16 else lane for lane in range(32)])
    np.testing.assert_array_equal(out, values[np.arange(32) ^ 16])


def test_exited_lanes_are_not_waited_for(gpu: EmulatorBackend) -> None:
    out = gpu.zeros(96, np.uint32)
    launch(gpu, "collectives", "early_exit", out, block=96)
    expected = np.where(np.arange(96) % 32 < 20, (1 << 20) - 1, 0)
    np.testing.assert_array_equal(out, expected)


def test_activemask_leaves_out_waiting_lanes(gpu: EmulatorBackend) -> None:
    out = gpu.zeros(32, np.uint32)
    launch(gpu, "collectives", "active", out)
    lanes = np.arange(0, 32, 2)
    assert ((out[lanes] >> lanes) & 1 == 1).all()


def test_barriers_order_shared_memory(gpu: EmulatorBackend) -> None:
    values = gpu.asarray(np.arange(1024, dtype=np.float32))
    launch(gpu, "collectives", "rotate", values, 5, block=1024, SPEC_BROKEN=0)
    np.testing.assert_array_equal(values, np.roll(np.arange(1024), -5))


@pytest.mark.parametrize("broken", [1, 2])
def test_a_missing_barrier_gives_a_wrong_result(gpu: EmulatorBackend, broken: int) -> None:
    values = gpu.asarray(np.arange(1024, dtype=np.float32))
    launch(gpu, "collectives", "rotate", values, 5, block=1024, SPEC_BROKEN=broken)
    assert not np.array_equal(values, np.roll(np.arange(1024), -5))
