"""Races in random programs: check mode reports one exactly where the definition finds one."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.errors import DataRaceFault
from tests.emulator.launching import launch

THREADS, CELL_BYTES = 40, 64
READ, WRITE, ATOMIC, BARRIER, WARP_SYNC = 1, 2, 3, 4, 5


def random_program(rng: np.random.Generator) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Commands and masks ``[steps, THREADS]`` as the kernel takes them."""
    steps = int(rng.integers(2, 14))
    density = rng.choice([0.02, 0.1, 0.5])
    span = int(rng.choice([8, 16, CELL_BYTES]))
    kinds = rng.choice([READ, WRITE, ATOMIC], (steps, THREADS), p=rng.dirichlet([2, 1, 1]))
    sizes = np.where(kinds == ATOMIC, 2, rng.integers(0, 4, kinds.shape))
    offsets = rng.integers(0, span, kinds.shape) >> sizes << sizes
    program = np.where(rng.random(kinds.shape) < density, kinds | offsets << 8 | sizes << 16, 0)
    masks = np.zeros(program.shape, np.uint32)
    for step in range(steps):
        choice = rng.random()
        if choice < 0.2:
            program[step] = BARRIER
        elif choice < 0.5:
            program[step] = WARP_SYNC
            groups = rng.integers(0, int(rng.choice([1, 2, 5])), THREADS)
            for i, j in itertools.product(range(THREADS), repeat=2):
                if i // 32 == j // 32 and groups[i] == groups[j]:
                    masks[step, i] |= np.uint32(1 << j % 32)
    return program.astype(np.uint32), masks


def has_race(program: npt.NDArray[np.uint32], masks: npt.NDArray[np.uint32]) -> bool:
    """By the definition: two accesses, one a write, not both atomic, that no chain of meetings orders."""
    known = np.zeros((THREADS, THREADS), int)  # known[i, j]: steps of j that happened before i
    done: list[tuple[int, int, int, int]] = []  # step, thread, kind, bytes as a mask
    for step, (commands, row) in enumerate(zip(program.tolist(), masks.tolist(), strict=True)):
        if commands[0] == BARRIER:
            known[:] = step
        elif commands[0] == WARP_SYNC:
            before = known.copy()
            np.fill_diagonal(before, step)
            for i in range(THREADS):
                met = [i // 32 * 32 + k for k in range(32) if row[i] >> k & 1]
                known[i] = before[met].max(axis=0)
        else:
            for i, command in enumerate(commands):
                kind = command & 0xFF
                if not kind:
                    continue
                reach = ((1 << (1 << (command >> 16))) - 1) << (command >> 8 & 0xFF)
                for when, j, other, other_reach in done:
                    conflict = WRITE in (kind, other) or (ATOMIC in (kind, other) and kind != other)
                    if j != i and conflict and reach & other_reach and known[i, j] <= when:
                        return True
                done.append((step, i, kind, reach))
    return False


@pytest.mark.parametrize("schedule", ["fifo", "reverse", "random"])
def test_races_are_found_exactly_where_there_are_any(schedule: str) -> None:
    found = 0
    programs = 150
    for seed in range(programs):
        program, masks = random_program(np.random.default_rng(seed))
        gpu = EmulatorBackend(check="full", schedule=schedule, seed=seed)
        out = gpu.empty(THREADS, np.uint32)
        arguments = (gpu.asarray(program), gpu.asarray(masks), out, len(program))
        expected = has_race(program, masks)
        found += expected
        if expected:
            with pytest.raises(DataRaceFault):
                launch(gpu, "random_program", "run_program", *arguments, block=THREADS)
        else:
            launch(gpu, "random_program", "run_program", *arguments, block=THREADS)
    assert programs / 4 < found < 3 * programs / 4
