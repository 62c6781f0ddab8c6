"""Cutting what must be streamed into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_TABLE_SLACK = 4  # most entries of a tile's table for each of its blocks


@dataclass(frozen=True)
class Run:
    """Blocks of one sequence that follow each other.

    Attributes:
        seq: row of the sequence in the step.
        first: first block, in the sequence's store.
        count: blocks.
    """

    seq: int
    first: int
    count: int


@dataclass(frozen=True)
class Tile:
    """What travels in one scratch slot: the runs' records one after the other, at most one run a sequence.

    Attributes:
        runs: in order of their sequences.
    """

    runs: tuple[Run, ...]

    @property
    def num_blocks(self) -> int:
        """Records in the slot."""
        return sum(run.count for run in self.runs)

    @property
    def first_seq(self) -> int:
        """First row that the tile touches."""
        return self.runs[0].seq

    @property
    def num_seqs(self) -> int:
        """Rows from the first to the last that the tile touches."""
        return self.runs[-1].seq - self.runs[0].seq + 1

    @property
    def capacity(self) -> int:
        """Columns of its table."""
        return max(run.count for run in self.runs)

    def table(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Which record of the slot each block is, int32 ``[num_seqs, capacity]``, and counts ``[num_seqs]``.

        Columns that count for nothing hold -1.
        """
        blocks = np.full((self.num_seqs, self.capacity), -1, np.int32)
        counts = np.zeros(self.num_seqs, np.int32)
        begin = 0
        for run in self.runs:
            row = run.seq - self.first_seq
            blocks[row, : run.count] = np.arange(begin, begin + run.count)
            counts[row] = run.count
            begin += run.count
        return blocks, counts


def table_entries(slot_blocks: int) -> int:
    """Most int32 that the table and counts of a tile take, where a slot holds so many blocks."""
    return (_TABLE_SLACK + 1) * slot_blocks


def plan_tiles(ranges: Sequence[tuple[int, int]], slot_blocks: int) -> list[Tile]:
    """Tiles over all blocks to be streamed, sequence after sequence, each as full as it can be.

    Args:
        ranges: of each sequence, the first block that is not resident and the end.
        slot_blocks: records that a scratch slot holds.
    """
    tiles: list[Tile] = []
    runs: list[Run] = []
    room = slot_blocks

    def close() -> None:
        nonlocal runs, room
        if runs:
            tiles.append(Tile(tuple(runs)))
        runs, room = [], slot_blocks

    for seq, (first, end) in enumerate(ranges):
        while first < end:
            run = Run(seq, first, min(room, end - first))
            grown = Tile((*runs, run))
            if grown.num_seqs * (grown.capacity + 1) > table_entries(slot_blocks):
                close()
                continue
            runs.append(run)
            room -= run.count
            first += run.count
            if room == 0:
                close()
    close()
    return tiles
