"""The streaming step and its finalisation against the host references and float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import ops
from cupaged.formats import ElementStrides, paged_strides, scratch_strides
from cupaged.reference import AttnState, finalize_ref, step_tile_ref
from tests import oracle
from tests.rig import Rig, bits

layouts = pytest.mark.parametrize("scratch", [False, True], ids=["paged", "scratch"])


@dataclass
class Stream:
    """Sequences whose blocks arrive in tiles. Dead slots hold NaN."""

    q: npt.NDArray[Any]
    keys: list[npt.NDArray[Any]]
    values: list[npt.NDArray[Any]]
    block_size: int
    scratch: bool

    @property
    def num_kv_heads(self) -> int:
        return int(self.keys[0].shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[2])

    @property
    def strides(self) -> ElementStrides:
        make = scratch_strides if self.scratch else paged_strides
        return make(self.num_kv_heads, self.head_dim, self.block_size)

    def pools(self) -> tuple[npt.NDArray[Any], int, int, list[npt.NDArray[np.int32]]]:
        """Flat elements, where K and V begin in them, and each sequence's block ids (shuffled)."""
        counts = [-(-len(k) // self.block_size) for k in self.keys]
        total = sum(counts) + 2
        ids = np.random.default_rng(0).permutation(total).astype(np.int32)
        blk, tok, kvh = self.strides
        v_begin = self.num_kv_heads * self.block_size * self.head_dim if self.scratch else total * blk
        size = total * blk if self.scratch else 2 * total * blk
        flat = np.full(size, 0x7FC0, np.uint16).view(ml_dtypes.bfloat16)
        tables, used = [], 0
        for key, value, count in zip(self.keys, self.values, counts, strict=True):
            table = ids[used : used + count]
            used += count
            for t in range(len(key)):
                for h in range(self.num_kv_heads):
                    at = int(table[t // self.block_size]) * blk + t % self.block_size * tok + h * kvh
                    flat[at : at + self.head_dim] = key[t, h]
                    flat[v_begin + at : v_begin + at + self.head_dim] = value[t, h]
            tables.append(table)
        return flat, 0, v_begin, tables


def _stream(lengths: list[int], *, heads: tuple[int, int] = (4, 2), head_dim: int = 64, block_size: int = 16,
            scratch: bool = False, seed: int = 0, magnitude: float = 1.0) -> Stream:  # fmt: skip
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.standard_normal(shape) * magnitude).astype(ml_dtypes.bfloat16)  # noqa: E731
    return Stream(
        q=draw(len(lengths), heads[0], head_dim),
        keys=[draw(n, heads[1], head_dim) for n in lengths],
        values=[draw(n, heads[1], head_dim) for n in lengths],
        block_size=block_size,
        scratch=scratch,
    )


def _tiles(tables: list[npt.NDArray[np.int32]], lengths: list[int], block_size: int, capacity: int) -> Any:
    """Per tile: ids [num_seqs, capacity] (poison where unused), counts, valid slots of the last block."""
    longest = max([1, *(len(t) for t in tables)])
    for first in range(0, longest, capacity):
        ids = np.full((len(tables), capacity), 0x7FFFFFFF, np.int32)
        counts = np.zeros(len(tables), np.int32)
        valid = np.full(len(tables), block_size, np.int32)
        for seq, table in enumerate(tables):
            part = table[first : first + capacity]
            ids[seq, : len(part)], counts[seq] = part, len(part)
            if len(part) and first + len(part) == len(table):
                valid[seq] = lengths[seq] - (len(table) - 1) * block_size
        yield ids, counts, valid


class DeviceState:
    def __init__(self, rig: Rig, num_seqs: int, num_q_heads: int, head_dim: int) -> None:
        self.m = rig.gpu.asarray(np.full((num_seqs, num_q_heads), -np.inf, np.float32))
        self.l = rig.gpu.zeros((num_seqs, num_q_heads), np.float32)
        self.o = rig.gpu.zeros((num_seqs, num_q_heads, head_dim), np.float32)


def _step(rig: Rig, stream: Stream, pool: Any, v_begin: int, state: DeviceState, tile: Any) -> None:
    ids, counts, valid = tile
    item = 2
    base = rig.gpu.pointer(pool)
    num_seqs, num_q_heads, head_dim = stream.q.shape
    ops.paged_decode_attn_tiled(
        rig.gpu,
        rig.kernel("paged_decode_attn_tiled"),
        rig.upload(stream.q),
        base,
        base + item * v_begin,
        rig.upload(ids),
        rig.upload(counts),
        state.m,
        state.l,
        state.o,
        num_seqs,
        num_q_heads,
        stream.num_kv_heads,
        head_dim,
        stream.block_size,
        ids.shape[1],
        num_q_heads // stream.num_kv_heads,
        *stream.strides,
        stream.block_size,
        rig.stream,
        last_block_valid_slots_per_seq=rig.upload(valid),
    )


def _finalize(rig: Rig, state: DeviceState) -> npt.NDArray[Any]:
    output = rig.full_bf16(state.o.shape)
    ops.attention_finalize(
        rig.gpu,
        rig.kernel("paged_decode_attn_tiled", "attention_finalize"),
        state.l,
        state.o,
        output,
        *state.o.shape,
        rig.stream,
    )
    return rig.download_bf16(output)


def _run(rig: Rig, stream: Stream, capacity: int) -> tuple[DeviceState, AttnState]:
    """All tiles through the device and through the reference."""
    flat, _, v_begin, tables = stream.pools()
    lengths = [len(k) for k in stream.keys]
    pool = rig.upload(flat)
    state = DeviceState(rig, *stream.q.shape)
    reference = AttnState(*stream.q.shape)
    for tile in _tiles(tables, lengths, stream.block_size, capacity):
        _step(rig, stream, pool, v_begin, state, tile)
        ids, counts, valid = tile
        step_tile_ref(
            reference,
            stream.q,
            flat,
            flat[v_begin:],
            ids,
            counts,
            stream.num_kv_heads,
            stream.block_size,
            capacity,
            stream.q.shape[1] // stream.num_kv_heads,
            *stream.strides,
            stream.block_size,
            last_block_valid_slots_per_seq=valid,
        )
    return state, reference


def _expected(stream: Stream) -> np.ndarray:
    scale = stream.head_dim**-0.5
    return np.stack(
        [
            oracle.attention_float64(q, k, v, scale)[0]
            for q, k, v in zip(stream.q, stream.keys, stream.values, strict=True)
        ]
    )


@layouts
@pytest.mark.parametrize("capacity", [1, 3, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_against_references(rig: Rig, scratch: bool, capacity: int, head_dim: int) -> None:
    stream = _stream([100, 1, 0, 48], head_dim=head_dim, scratch=scratch)
    state, reference = _run(rig, stream, capacity)
    np.testing.assert_allclose(rig.download(state.m), reference.m, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rig.download(state.l), reference.l, rtol=2e-4)
    np.testing.assert_allclose(rig.download(state.o), reference.o, rtol=0, atol=3e-2)
    got = _finalize(rig, state)
    oracle.assert_matches(got, _expected(stream))
    oracle.assert_matches(finalize_ref(reference), _expected(stream))
    assert not bits(got[2]).any(), "no token at all is a row of zeros"


@layouts
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (28, 4), (16, 1), (32, 2)], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_ratios_and_block_sizes(rig: Rig, scratch: bool, heads: tuple[int, int], block_size: int) -> None:
    stream = _stream([70, 33], heads=heads, block_size=block_size, scratch=scratch)
    state, _ = _run(rig, stream, 4)
    oracle.assert_matches(_finalize(rig, state), _expected(stream))


def test_an_empty_tile_keeps_the_bits(rig: Rig) -> None:
    stream = _stream([40, 20])
    flat, _, v_begin, tables = stream.pools()
    pool, state = rig.upload(flat), DeviceState(rig, *stream.q.shape)
    nothing = (np.full((2, 4), -1, np.int32), np.zeros(2, np.int32), np.full(2, 16, np.int32))
    _step(rig, stream, pool, v_begin, state, nothing)
    assert (rig.download(state.m) == -np.inf).all()
    for tile in _tiles(tables, [40, 20], 16, 4):
        _step(rig, stream, pool, v_begin, state, tile)
    before = [rig.download(x).copy() for x in (state.m, state.l, state.o)]
    _step(rig, stream, pool, v_begin, state, nothing)
    for old, new in zip(before, (state.m, state.l, state.o), strict=True):
        np.testing.assert_array_equal(rig.download(new).view(np.uint32), old.view(np.uint32))


def test_m_is_the_largest_score(rig: Rig) -> None:
    stream = _stream([64], magnitude=4.0)
    state, _ = _run(rig, stream, 2)
    scores = np.einsum(
        "hd,thd->th",
        stream.q[0].astype(np.float64),
        stream.keys[0].astype(np.float64).repeat(2, axis=1),
    )
    np.testing.assert_allclose(rig.download(state.m)[0], scores.max(axis=0) / 8.0, rtol=1e-6)


def test_large_scores(rig: Rig) -> None:
    stream = _stream([64, 17], magnitude=60.0)
    state, _ = _run(rig, stream, 1)
    oracle.assert_matches(_finalize(rig, state), _expected(stream))


@pytest.mark.parametrize("fault", ["id", "count", "valid"])
def test_a_bad_tile_makes_its_row_nan(rig: Rig, fault: str) -> None:
    stream = _stream([40, 20])
    flat, _, v_begin, tables = stream.pools()
    pool, state = rig.upload(flat), DeviceState(rig, *stream.q.shape)
    ids, counts, valid = next(iter(_tiles(tables, [40, 20], 16, 4)))
    if fault == "id":
        ids[0, 1] = -7
    elif fault == "count":
        counts[0] = 5
    else:
        valid[0] = 17
    _step(rig, stream, pool, v_begin, state, (ids, counts, valid))
    expected = _expected(stream)
    expected[0] = np.nan
    oracle.assert_matches(_finalize(rig, state), expected)
