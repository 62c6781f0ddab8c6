"""The benchmark's float64 reference and its pools, against the oracle of the tests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.device import Device
from benchmarks.loads import Load
from benchmarks.pools import Arenas, Batch
from cupaged.formats import FORMATS, FP8, NVFP4, CacheFormat
from tests.oracle import attention_float64, decode_bf16_float64
from tests.poison import decode_pool

LOADS = (
    Load(4, 2, 64, 16, (40, 3), query_tokens=3, heads_first=True),
    Load(4, 2, 64, 16, (1, 70, 33)),
    Load(3, 1, 32, 5, (23, 8)),
    Load(4, 2, 64, 16, (90, 40), sliding_window=37),
)


def tokens_of(batch: Batch, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a sequence, decoded by the tests' own decoder."""
    ids = batch.tables[0][seq, : batch.load.block_counts[seq]]
    k, v = (
        decode_pool(np.ascontiguousarray(pool[ids]), layout).reshape(
            -1, layout.num_kv_heads, layout.head_dim
        )[: batch.load.seq_lens[seq]]
        for pool, layout in zip(batch.pools, (batch.layout, batch.value_layout), strict=True)
    )
    return k, v


def queries(batch: Batch, seq: int) -> np.ndarray:
    q = batch.q[seq]
    values = q.astype(np.float64) if q.dtype == np.float16 else decode_bf16_float64(q)
    return values.reshape(batch.load.query_tokens, batch.load.num_q_heads, -1)


def expected(batch: Batch, seq: int) -> np.ndarray:
    load = batch.load
    k, v = tokens_of(batch, seq)
    hidden = range(load.query_tokens - 1, -1, -1)  # newest tokens that each query token does not see
    rows = [
        attention_float64(q, k[: len(k) - n], v[: len(v) - n], load.head_dim**-0.5, load.sliding_window)[0]
        for q, n in zip(queries(batch, seq), hidden, strict=True)
    ]
    return np.stack(rows).reshape(batch.output[seq].shape)


@pytest.mark.parametrize("load", LOADS, ids=lambda x: x.label)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("chunk", [1, 4096, accuracy.CHUNK_VALUES])
def test_attention_equals_the_oracle(
    device: Device, fmt: CacheFormat, load: Load, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_VALUES", chunk)
    batch = Arenas(device, 1 << 16).batch(fmt, load)
    for seq in range(batch.num_seqs):
        got = accuracy.sequence(device, batch, seq, batch.tables[0])
        np.testing.assert_allclose(got, expected(batch, seq), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("float16", [False, True])
def test_mixed_formats_and_float16(device: Device, float16: bool) -> None:
    load = Load(4, 2, 64, 16, (70, 33))
    batch = Arenas(device, 1 << 16).batch(FP8, load, NVFP4, float16)
    assert (batch.layout.format, batch.value_layout.format) == (FP8, NVFP4)
    assert batch.q.dtype == batch.output.dtype == (np.float16 if float16 else np.uint16)
    assert accuracy.relative_error(device, batch, batch.tables[0]) == math.inf  # nothing was written
    for seq in range(batch.num_seqs):
        got = accuracy.sequence(device, batch, seq, batch.tables[0])
        np.testing.assert_allclose(got, expected(batch, seq), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("fmt", FORMATS)
def test_pools_are_finite_in_every_layout(device: Device, fmt: CacheFormat) -> None:
    arenas = Arenas(device, 1 << 17)
    for load in LOADS[1:]:  # one arena, cut anew
        batch = arenas.batch(fmt, load)
        for pool in batch.pools:
            values = decode_pool(pool, batch.layout)
            assert np.isfinite(values).all()
            assert values.min() < -0.5 < 0.5 < values.max()
            assert values.std() > 0.3
    assert (batch.k_bytes != batch.v_bytes).mean() > 0.5


def test_tables_are_disjoint(device: Device) -> None:
    batch = Arenas(device, 1 << 18).batch(FORMATS[0], LOADS[1])
    owned = np.concatenate([t[t >= 0] for t in batch.tables])
    assert len(batch.tables) > 1
    assert len(np.unique(owned)) == owned.size
    assert owned.max() < batch.num_blocks
    for table in batch.tables:
        assert tuple((table >= 0).sum(axis=1)) == LOADS[1].block_counts


def test_an_error_is_seen(device: Device) -> None:
    batch = Arenas(device, 1 << 16).batch(FORMATS[0], LOADS[1])
    assert accuracy.relative_error(device, batch, batch.tables[0]) == math.inf  # nothing was written
    for seq in range(3):
        right = expected(batch, seq).astype(np.float32)
        batch.output[seq] = (right.view(np.uint32) + 0x8000) >> 16
    assert accuracy.relative_error(device, batch, batch.tables[0]) < accuracy.BOUND
    batch.output[1, 2] = batch.output[1, 1]
    assert accuracy.relative_error(device, batch, batch.tables[0]) > accuracy.BOUND
