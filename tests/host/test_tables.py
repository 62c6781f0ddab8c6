"""Tables and slots of many sequences against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.blocks import BlockAllocator
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.tables import csr_to_padded, padded_to_csr, sequence_tables, token_slots

lengths_of = st.lists(st.integers(0, 20), max_size=6)


@settings(deadline=None, derandomize=True)
@given(lengths=lengths_of, block_size=st.integers(1, 5), spare=st.integers(0, 2))
def test_tables_of_sequences(lengths: list[int], block_size: int, spare: int) -> None:
    allocator = BlockAllocator(200, block_size)
    sequences = [allocator.allocate(n) for n in lengths]
    width = max([0, *(len(s.blocks) for s in sequences)])
    tables, seq_lens = sequence_tables(sequences, max_blocks_per_seq=width + spare if spare else None)
    assert (tables.dtype, seq_lens.dtype) == (np.int32, np.int32)
    assert tables.shape == (len(lengths), width + spare)
    assert seq_lens.tolist() == lengths
    for row, sequence in zip(tables.tolist(), sequences, strict=True):
        held = len(sequence.blocks)
        assert row[:held] == sequence.blocks
        assert row[held:] == [-1] * (width + spare - held)


@settings(deadline=None, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), block_size=st.integers(1, 5)
)
def test_slots_of_tokens(spans: list[tuple[int, int]], block_size: int) -> None:
    width = -(-18 // block_size)
    tables = np.random.default_rng(1).permutation(width * max(1, len(spans))).reshape(-1, width)[: len(spans)]
    first, counts = ([span[i] for span in spans] for i in (0, 1))
    slots = token_slots(tables, first, counts, block_size)
    expected = [
        int(tables[s, t // block_size]) * block_size + t % block_size
        for s, (start, count) in enumerate(spans)
        for t in range(start, start + count)
    ]
    assert slots.dtype == np.int64
    assert slots.tolist() == expected


def test_one_number_of_tokens_for_all() -> None:
    assert token_slots([[5, 7], [2, 9]], [4, 1], 1, 4).tolist() == [7 * 4, 2 * 4 + 1]
    assert token_slots(np.array([[2**30]], np.int32), [3], 2, 16).tolist() == [2**34 + 3, 2**34 + 4]


def test_slots_that_no_block_holds() -> None:
    with pytest.raises(ArgumentValueError, match=r"sequence 1 reaches to token 9, but .* 2 columns of 4"):
        token_slots([[0, 1], [2, 3]], [0, 5], [2, 4], 4)
    with pytest.raises(ArgumentValueError, match=r"block_tables: got -1 at \[1, 1\]"):
        token_slots([[0, 1], [2, -1]], [0, 3], [2, 2], 4)
    with pytest.raises(ArgumentValueError, match="first: got -1 for sequence 0"):
        token_slots([[0]], [-1], 1, 4)
    with pytest.raises(ArgumentValueError, match="num_tokens: got -2 for sequence 0"):
        token_slots([[0]], [0], [-2], 4)
    with pytest.raises(ArgumentValueError, match="first: got 2 sequences, block_tables has 1"):
        token_slots([[0]], [0, 0], 1, 4)
    with pytest.raises(ArgumentTypeError, match="block_tables: got dtype float64"):
        token_slots([[0.0]], [0], 1, 4)
    with pytest.raises(ArgumentValueError, match="block_size: got 0"):
        token_slots([[0]], [0], 1, 0)


@settings(deadline=None, derandomize=True)
@given(lengths=lengths_of, block_size=st.integers(1, 5), spare=st.integers(0, 2))
def test_compressed_rows_and_back(lengths: list[int], block_size: int, spare: int) -> None:
    counts = [-(-n // block_size) for n in lengths]
    indices = np.random.default_rng(2).permutation(sum(counts)).astype(np.int32)
    indptr = np.cumsum([0, *counts])
    last = [n - max(0, c - 1) * block_size for n, c in zip(lengths, counts, strict=True)]
    # Indices beyond the last row belong to nobody, as in a buffer that is used again.
    tables, seq_lens = csr_to_padded(indptr, np.append(indices, 99), last, block_size)
    assert (tables.dtype, seq_lens.dtype) == (np.int32, np.int32)
    assert seq_lens.tolist() == lengths
    for row, begin, count in zip(tables.tolist(), indptr, counts, strict=False):
        assert row == [*indices[begin : begin + count].tolist(), *[-1] * (tables.shape[1] - count)]
    wide = np.pad(tables, ((0, 0), (0, spare)), constant_values=0x7FFFFFFF)
    back = padded_to_csr(wide, seq_lens, block_size)
    assert [array.dtype for array in back] == [np.int32] * 3
    assert [array.tolist() for array in back] == [indptr.tolist(), indices.tolist(), last]


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 2], [1, 2], [5], r"last_page_len: got 5 for sequence 0 with 2 blocks; allowed is 1 to 4"),
        ([0, 2], [1, 2], [0], r"last_page_len: got 0 for sequence 0 with 2 blocks"),
        ([0, 0], [], [1], r"last_page_len: got 1 for sequence 0 with 0 blocks; .* 0 without blocks"),
        ([0, 2, 1], [1, 2], [1, 1], r"indptr: got .* never fall"),
        ([1, 2], [1, 2], [1], r"indptr: got .* begin with 0"),
        ([0, 3], [1, 2], [1], r"indptr: got .* for 2 indices"),
        ([0, 1, 2], [1, 2], [1], "indptr: got 3 entries, needed are 2"),
    ],
)
def test_compressed_rows_that_do_not_fit_together(
    indptr: list[int], indices: list[int], last: list[int], message: str
) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        csr_to_padded(indptr, indices, last, 4)


def test_tables_too_narrow() -> None:
    with pytest.raises(ArgumentValueError, match="max_blocks_per_seq: got 1, sequence 0 has 2"):
        csr_to_padded([0, 2], [1, 2], [1], 4, max_blocks_per_seq=1)
    with pytest.raises(ArgumentValueError, match=r"seq_lens: got 9 for sequence 1, .* 2 columns of 4"):
        padded_to_csr([[0, 1], [2, 3]], [8, 9], 4)
    with pytest.raises(ArgumentValueError, match="seq_lens: got -1 for sequence 0"):
        padded_to_csr([[0, 1]], [-1], 4)
    with pytest.raises(ArgumentValueError, match="max_blocks_per_seq: got 1, sequence 0 has 2"):
        sequence_tables([BlockAllocator(4, 2).allocate(3)], max_blocks_per_seq=1)


def test_what_32_bits_do_not_hold_is_refused() -> None:
    """It would become another block's id, or a length that is none."""
    beyond = 2**32 + 3
    for call, name, wrong in (
        (lambda: csr_to_padded([0, 1], [beyond], [1], 4), "indices", beyond),
        (lambda: csr_to_padded([0, 1], [-beyond], [1], 4), "indices", -beyond),
        (lambda: csr_to_padded([0, 2**16], np.zeros(2**16, int), [1], 2**16), "indptr", 2**32 - 2**16 + 1),
        (lambda: padded_to_csr([[beyond]], [1], 4), "block_tables", beyond),
        (lambda: token_slots([[2**60]], [0], 1, 16), "block_tables", 2**60),
    ):
        with pytest.raises(ArgumentValueError, match=f"^{name}: got {wrong}, allowed are 32-bit integers"):
            call()
    assert padded_to_csr([[0, beyond]], [4], 4)[1].tolist() == [0]  # columns past the last block may hold it
    assert token_slots([[2**31 - 1]], [0], 1, 2**20).tolist() == [(2**31 - 1) << 20]
    with pytest.raises(ArgumentTypeError, match=r"^sequences: got 3 among them"):
        sequence_tables([3])  # type: ignore[list-item]


def test_ids_and_shapes_that_are_no_tables() -> None:
    for call, message in (
        (lambda: csr_to_padded([0, 1], [-7], [3], 16), "indices: got -7, where tokens are"),
        (lambda: padded_to_csr([[-7, 1]], [20], 16), "block_tables: got -7, where tokens are"),
        (lambda: padded_to_csr([[1]], [2**31], 2**31), "seq_lens: got 2147483648, allowed are 32-bit"),
        (lambda: csr_to_padded([0], [], [], 16, max_blocks_per_seq=-1), "max_blocks_per_seq: got -1"),
        (lambda: sequence_tables([], max_blocks_per_seq=-1), "max_blocks_per_seq: got -1"),
        (lambda: token_slots([[1]], [0], [1, [2]], 16), "num_tokens: got lists of unequal length"),
        (lambda: token_slots([[1]], [0], [[1]], 16), r"num_tokens: got shape \(1, 1\), allowed are one"),
        (lambda: token_slots([[1]], [0], [1, 2, 3], 16), r"num_tokens: got shape \(3,\)"),
        (lambda: token_slots([[1], [2, 3]], [0, 0], 1, 16), "block_tables: got lists of unequal length"),
        (lambda: token_slots([[1]], [0], [2**40], 16), "first: sequence 0 reaches to token 1099511627776"),
        (lambda: token_slots([[1]], [2**62], [2**62], 16), f"first: sequence 0 reaches to token {2**63}"),
    ):
        with pytest.raises(ArgumentValueError, match=f"^{message}"):
            call()
    assert token_slots([[1]], [2**62], [0], 16).size == 0
