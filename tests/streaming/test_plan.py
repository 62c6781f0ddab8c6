"""Cutting work into tiles, and sharing the room for resident blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.streaming.policy import share_room
from cupaged.streaming.tiles import plan_tiles, table_entries

RANGES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RANGES, st.integers(1, 30))
def test_tiles_cover_every_block_once_and_in_order(ranges: list[tuple[int, int]], slot_blocks: int) -> None:
    tiles = plan_tiles(ranges, slot_blocks)
    found: dict[int, list[int]] = {seq: [] for seq in range(len(ranges))}
    for tile in tiles:
        assert 1 <= tile.num_blocks <= slot_blocks
        blocks, counts = tile.table()
        assert blocks.size + counts.size <= table_entries(slot_blocks)
        assert len({run.seq for run in tile.runs}) == len(tile.runs)
        begin = 0
        for run in tile.runs:
            row = run.seq - tile.first_seq
            assert counts[row] == run.count
            assert list(blocks[row, : run.count]) == list(range(begin, begin + run.count))
            assert (blocks[row, run.count :] == -1).all()
            begin += run.count
            found[run.seq] += range(run.first, run.first + run.count)
        assert counts.sum() == tile.num_blocks
    assert found == {seq: list(range(*r)) for seq, r in enumerate(ranges)}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 500))
def test_room_is_used_up_and_shared(wanted: list[int], room: int) -> None:
    given_out = share_room(wanted, room)
    assert all(0 <= got <= want for got, want in zip(given_out, wanted, strict=True))
    assert sum(given_out) == min(sum(wanted), room)
    short = [got for got, want in zip(given_out, wanted, strict=True) if got < want]
    if short:  # who does not get all has at least what anyone else has, to within one block
        assert min(short) + 1 >= max(given_out)


@pytest.mark.parametrize("empty", range(6, 24))
def test_a_tiles_counts_have_room_too(empty: int) -> None:
    """Blocks of two sequences with many empty ones between them: a row and a count for each."""
    tiles = plan_tiles([(0, 1), *[(0, 0)] * empty, (0, 1)], 4)
    for tile in tiles:
        assert sum(array.size for array in tile.table()) <= table_entries(4)
    assert sum(tile.num_blocks for tile in tiles) == 2


def test_tiles_are_full_where_they_can_be() -> None:
    tiles = plan_tiles([(0, 100), (5, 6), (0, 0), (0, 29)], 10)
    assert [tile.num_blocks for tile in tiles] == [10] * 13
    assert (tiles[10].first_seq, tiles[10].num_seqs) == (1, 3)
    np.testing.assert_array_equal(tiles[10].table()[1], [1, 0, 9])
