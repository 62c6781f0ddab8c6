"""Check mode finds every deliberate mistake, and names both places; the correct twins stay silent."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend, places
from cupaged.errors import (
    ArgumentValueError,
    AsyncCopyFault,
    DataRaceFault,
    DeadlockFault,
    KernelFault,
    MisalignedFault,
    OutOfBoundsFault,
    UninitialisedSharedFault,
    WarpMismatchFault,
)
from cupaged.pointers import DevicePtr
from tests.emulator import checked_cases as cases
from tests.emulator.checked_cases import Case, place
from tests.emulator.launching import launch

SCHEDULES = ("fifo", "reverse", "random")
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
STRESS_LAUNCHES = 2000


@dataclass(frozen=True)
class Mistake:
    """A mistake and its report.

    Attributes:
        case: the kernel.
        fault: which of its mistakes.
        module: its file.
        errors: what it raises, where the schedule decides which accesses meet.
        marks: lines of which the report names all; after ``|``: others that it may name instead.
        text: part of the message.
    """

    case: Case
    fault: int
    module: str
    errors: type[KernelFault] | tuple[type[KernelFault], ...]
    marks: str
    text: str = ""

    def named(self) -> list[list[str]]:
        return [[place(self.module, m.strip()) for m in way.split("+")] for way in self.marks.split("|")]


def _mistakes(module: str, *rows: tuple[object, ...]) -> list[Mistake]:
    return [Mistake(row[0], row[1], module, *row[2:]) for row in rows]  # type: ignore[arg-type]


RACE, OUTSIDE, EARLY, UNSET = DataRaceFault, OutOfBoundsFault, AsyncCopyFault, UninitialisedSharedFault
MISTAKES = [
    *_mistakes(
        "faulty_barriers",
        (cases.rotate, 1, RACE, "rotate write + rotate read", "static shared memory at byte"),
        (cases.rotate, 2, RACE, "rotate write + rotate read"),
        (cases.swap_neighbours, 1, RACE, "swap write + swap read"),
        (cases.swap_neighbours, 2, RACE, "swap write + swap read"),
        (cases.swap_neighbours, 3, RACE, "swap write + swap read"),
        (cases.read_written, 1, UNSET, "cells sum", "static shared memory"),
        (cases.read_written, 2, UNSET, "bytes sum", "1-byte read of dynamic shared memory at byte 5"),
        (cases.pack_bytes, 1, RACE, "pack shared", "1-byte write"),
        (cases.publish, 1, RACE, "publish write + publish read"),
        (cases.add_up, 1, RACE, "add plainly + add atomically", "atomic update"),
        (cases.add_up, 2, UNSET, "add atomically"),
        (cases.add_up, 3, RACE, "add atomically + add read"),
    ),
    *_mistakes(
        "faulty_bounds",
        (cases.store, 1, OUTSIDE, "store", "0 bytes past the end of parameter 'out' (128 bytes)"),
        (cases.store, 2, OUTSIDE, "store", "4 bytes before parameter 'out' (128 bytes)"),
        (cases.store, 3, OUTSIDE, "store atomic", "atomic update"),
        (cases.store, 4, OUTSIDE, "store wide", "the last 4 of them past the end of parameter 'out'"),
        (cases.read_table, 1, OUTSIDE, "table", "0 bytes past the end of parameter 'table' (60 bytes)"),
        (cases.copy, 1, OUTSIDE, "const write", "parameter 'in' at byte"),
        (cases.index_shared, 1, OUTSIDE, "index array", "index 32 is outside an array"),
        (cases.index_shared, 2, OUTSIDE, "index dynamic", "dynamic shared memory (128 bytes)"),
        (cases.index_shared, 3, OUTSIDE, "index pointer", "before static shared memory"),
        (cases.load_vector, 1, MisalignedFault, "vector", "not a multiple of 16"),
        (cases.load_vector, 2, MisalignedFault, "vector atomic", "8-byte atomic"),
        (cases.load_vector, 3, OUTSIDE, "vector", "null pointer"),
        (cases.divide, 1, KernelFault, "divide", "division by zero"),
        (cases.copy_struct, 1, OUTSIDE, "struct", "160-byte read"),
        (cases.fetch_ahead, 1, OUTSIDE, "prefetch line", "prefetch outside every buffer of the launch"),
        (cases.fetch_ahead, 2, OUTSIDE, "prefetch line", "1-byte prefetch"),
        (cases.fetch_ahead, 3, OUTSIDE, "prefetch bulk", "272-byte prefetch"),
        (cases.fetch_ahead, 4, EARLY, "prefetch bulk", "must be multiples of 16"),
        (cases.fetch_ahead, 5, OUTSIDE, "prefetch line", "1-byte prefetch"),
    ),
    *_mistakes(
        "faulty_copies",
        (cases.load_fragments, 1, EARLY, "fragment load + fragment copy"),
        (cases.load_fragments, 2, EARLY, "fragment load + fragment copy"),
        (cases.load_fragments, 3, EARLY, "fragment load + fragment copy"),
        (cases.load_fragments, 4, OUTSIDE, "fragment copy", "past the end of parameter 'in'"),
        (cases.stream, 1, EARLY, "stream read + stream copy"),
        (cases.stream, 2, (RACE, EARLY), "stream read + stream copy"),
        (cases.bulk_stream, 1, EARLY, "bulk expect | bulk copy"),
        (cases.bulk_stream, 2, RACE, "bulk copy + bulk read", "write by an asynchronous copy"),
        (cases.bulk_stream, 3, (EARLY, UNSET), "bulk read"),
        (cases.bulk_stream, 4, RACE, "bulk copy + bulk read"),
        (cases.bulk_stream, 5, DeadlockFault, "bulk empty", "lacks 0 arrivals"),
        (cases.bulk_stream, 6, EARLY, "bulk wait | bulk copy", "bytes"),
        (cases.bulk_stream, 7, EARLY, "bulk copy", "must be multiples of 16"),
        (cases.bulk_stream, 8, OUTSIDE, "bulk copy", "256-byte read"),
        (cases.bulk_stream, 9, EARLY, "bulk read + bulk copy", "thread (95, 0, 0)"),
        (cases.bulk_stream, 10, (RACE, EARLY), "bulk wait"),
        (cases.arrive_stream, 1, (EARLY, UNSET), "arrive read + arrive copy | arrive read"),
        (cases.arrive_stream, 2, EARLY, "arrive read + arrive copy"),
        (cases.arrive_stream, 3, EARLY, "arrive late | arrive read + arrive copy"),
        (cases.arrive_stream, 4, DeadlockFault, "arrive empty", "of the arrivals"),
        (cases.arrive_stream, 5, EARLY, "arrive late | arrive copy"),
        (cases.arrive_stream, 6, RACE, "arrive note + arrive note read"),
        (cases.arrive_stream, 7, EARLY, "arrive read + arrive copy", "thread (31, 0, 0)"),
    ),
    *_mistakes(
        "faulty_blocks",
        (cases.own_cells, 1, RACE, "own cell", "parameter 'out' at byte"),
        (cases.last_block_sums, 1, RACE, "part write + part read"),
        (cases.last_block_sums, 2, RACE, "part write + part read"),
        (cases.last_block_sums, 3, RACE, "part write + part read"),
        (cases.last_block_sums, 4, RACE, "part write + part read"),
        (cases.last_block_sums, 5, RACE, "part write + part read"),
        (cases.read_neighbour, 1, RACE, "neighbour write + neighbour read"),
        (cases.hand_over, 1, RACE, "hand write + hand read"),
        (cases.hand_over, 2, RACE, "hand write + hand read"),
        (cases.hand_over, 3, RACE, "hand plain flag + hand spin", "atomic read"),
        (cases.release_acquire, 1, RACE, "release write + acquire read"),
        (cases.release_acquire, 2, RACE, "release write + acquire read"),
        (cases.watch_flag, 1, RACE, "watch write + watch read"),
        (cases.watch_flag, 2, RACE, "watch plain flag + watch spin", "atomic read"),
        (cases.locked_sum, 1, RACE, "locked"),
    ),
    *_mistakes(
        "faults",
        (cases.stuck, 1, DeadlockFault, "stuck", "wait in __syncthreads"),
        (cases.half_a_warp, 1, WarpMismatchFault, "half a shuffle | whole warp", "meets"),
        (cases.mask_without_self, 1, WarpMismatchFault, "wrong mask", "leaves out the calling lane"),
        (cases.waits_for_nobody, 1, DeadlockFault, "endless spin"),
        (cases.traps, 1, KernelFault, "trap"),
    ),
]


@schedules
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.case.__name__}-{m.fault}")
def test_mistakes_are_found(mistake: Mistake, schedule: str) -> None:
    gpu = EmulatorBackend(check="full", schedule=schedule, seed=3)
    with pytest.raises(mistake.errors) as caught:
        mistake.case(gpu, mistake.fault)
    if mistake.errors is KernelFault:
        assert type(caught.value) is KernelFault
    text = str(caught.value)
    assert caught.value.kernel == mistake.case.__name__
    assert text.startswith(
        f"{caught.value.kernel}, block {caught.value.block}, thread {caught.value.thread}, at "
    )
    assert any(all(line in text for line in lines) for lines in mistake.named()), text
    assert mistake.text in text


@schedules
def test_correct_twins_stay_silent(schedule: str) -> None:
    launches = 0
    seeds = itertools.count()
    while launches < -(-STRESS_LAUNCHES // len(SCHEDULES)):
        gpu = EmulatorBackend(check="full", schedule=schedule, seed=next(seeds))
        for case, count in cases.TWINS.items():
            case(gpu, 0)
            launches += count


def test_both_parties_are_named() -> None:
    gpu = EmulatorBackend(check="full")
    with pytest.raises(DataRaceFault) as caught:
        cases.own_cells(gpu, 1)
    assert (caught.value.block, caught.value.thread) == ((1, 0, 0), (0, 0, 0))
    line = place("faulty_blocks", "own cell")
    assert str(caught.value) == (
        f"own_cells, block (1, 0, 0), thread (0, 0, 0), at {line}: data race: nothing orders this 4-byte "
        f"write of parameter 'out' at byte 0 after the write by block (0, 0, 0), thread (0, 0, 0) at {line}"
    )


def test_places_without_addr2line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "TOOLS", ())
    places.source_lines.cache_clear()
    with pytest.raises(DataRaceFault, match=r"at own_cells_\w+\.so\+0x[0-9a-f]+ \(install addr2line"):
        cases.own_cells(EmulatorBackend(check="full"), 1)
    places.source_lines.cache_clear()


# ---- what pointers stand for


def copy_words(gpu: EmulatorBackend, source: object, target: object) -> None:
    launch(gpu, "faulty_bounds", "copy", source, target, 0)


def test_addresses_stand_for_their_allocation() -> None:
    gpu = EmulatorBackend(check="full")
    source, target = cases.numbers(gpu, 64), gpu.zeros(64, np.uint32)
    copy_words(gpu, gpu.pointer(source) + 128, gpu.pointer(target) + 4)
    np.testing.assert_array_equal(target[1:33], np.arange(32, 64))
    with pytest.raises(OutOfBoundsFault, match="'out' \\(256 bytes\\)"):
        copy_words(gpu, source, gpu.pointer(target) + 132)


def test_sized_pointers_stand_for_their_bytes() -> None:
    gpu = EmulatorBackend(check="full")
    source, target = cases.numbers(gpu, 64), gpu.zeros(64, np.uint32)
    copy_words(gpu, DevicePtr(gpu.pointer(source), 128), DevicePtr(gpu.pointer(target)))
    with pytest.raises(OutOfBoundsFault, match="'in' \\(124 bytes\\)"):
        copy_words(gpu, DevicePtr(gpu.pointer(source), 124), target)


def test_unknown_addresses_are_refused() -> None:
    gpu = EmulatorBackend(check="full")
    foreign = np.zeros(64, np.uint32)
    with pytest.raises(ArgumentValueError, match=r"in: got the address 0x.*DevicePtr"):
        copy_words(gpu, foreign.ctypes.data, gpu.zeros(32, np.uint32))
    copy_words(gpu, foreign, gpu.zeros(32, np.uint32))


def test_null_and_empty_pointers_have_nothing_behind_them() -> None:
    gpu = EmulatorBackend(check="full")
    for nothing in (0, gpu.zeros(0, np.uint32), DevicePtr(gpu.pointer(gpu.zeros(4, np.uint32)), 0)):
        with pytest.raises(OutOfBoundsFault):
            copy_words(gpu, nothing, gpu.zeros(32, np.uint32))


def test_overlapping_views() -> None:
    """A buffer passed twice may be written where either parameter may write."""
    gpu = EmulatorBackend(check="full")
    cells = cases.numbers(gpu, 64)
    copy_words(gpu, cells, cells[32:])
    np.testing.assert_array_equal(cells[32:], np.arange(32))
    with pytest.raises(DataRaceFault):
        copy_words(gpu, cells, cells[1:])


def test_launches_from_many_threads_wait_for_each_other() -> None:
    gpu = EmulatorBackend(check="full")
    cases.bulk_stream(gpu, 0)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                cases.bulk_stream(gpu, 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
