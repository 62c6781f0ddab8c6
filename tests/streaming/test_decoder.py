"""Streaming decode against float64 and against the in-memory kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.decode import Decoder
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat
from cupaged.streaming import FileStore, encode_records
from cupaged.streaming import decoder as decoder_module
from cupaged.streaming.tiles import Tile, plan_tiles
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    Context,
    assert_within_one_ulp,
    decode,
    file_store,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
    scales_of,
)

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
# Tile of so many tokens: (block_size, blocks).
TILES = {1: (1, 1), 7: (7, 1), 128: (16, 8), 4096: (64, 64)}


def in_memory(rig: Rig, context: Context, scale: float | None = None) -> Any:
    """The same by `Decoder`, everything in one pool."""
    layout = context.layout
    parts, tables, used = [], [], 0
    for seq, key in enumerate(context.keys):
        records, _ = encode_records(layout, key, context.values[seq], **scales_of(layout))
        parts.append(records)
        tables.append(list(range(used, used + len(records))))
        used += len(records)
    half = layout.block_stride_bytes
    everything = np.concatenate([*parts, np.zeros((1, 2 * half), np.uint8)])
    pools = [
        rig.gpu.asarray(np.ascontiguousarray(part).view(np.uint16 if layout.format == BF16 else np.uint8))
        for part in (everything[:, :half], everything[:, half:])
    ]
    width = max(1, *map(len, tables))
    table = np.full((len(tables), width), -1, np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    output = rig.full_bf16(context.q.shape)
    decoder = Decoder(rig.gpu, layout, context.num_q_heads, len(tables))
    decoder.decode(
        rig.upload(context.q), *pools, rig.upload(table),
        rig.upload(np.array([len(k) for k in context.keys], np.int32)), output,
        num_seqs=len(tables), max_blocks_per_seq=width, stream=rig.stream, softmax_scale=scale,
        **scales_of(layout),
    )  # fmt: skip
    return rig.download_bf16(output)


@formats
@pytest.mark.parametrize("tokens", TILES)
def test_any_tile_size(rig: Rig, fmt: CacheFormat, tokens: int) -> None:
    block_size, tile_blocks = TILES[tokens]
    lengths = [4500, 700] if tokens == 4096 else [150, 0, 41, 1]
    context = random_context(fmt, lengths, block_size=block_size)
    decoder = make_decoder(rig, context, tile_blocks=tile_blocks)
    assert decoder.tile_blocks * block_size == tokens
    got = decode(rig, decoder, context, open_all(decoder, stores(rig, context)))
    assert_matches(got, context.expected())
    if block_size >= 16:  # the planned kernels copy whole rows of a block
        assert_within_one_ulp(got, in_memory(rig, context))


def stores(rig: Rig, context: Context) -> list[Any]:
    return [pinned_store(rig, context, seq) for seq in range(len(context.keys))]


@formats
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_tiles(rig: Rig, fmt: CacheFormat, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    context = random_context(fmt, [300, 77, 160])
    decoder = make_decoder(rig, context, tile_blocks=3)
    sequences = open_all(decoder, stores(rig, context))
    in_order = decode(rig, decoder, context, sequences)

    def shuffled(ranges: Any, slot_blocks: int) -> list[Tile]:
        tiles = plan_tiles(ranges, slot_blocks)
        return [tiles[i] for i in np.random.default_rng(seed).permutation(len(tiles))]

    monkeypatch.setattr(decoder_module, "plan_tiles", shuffled)
    got = decode(rig, decoder, context, sequences)
    assert_matches(got, context.expected())
    assert_within_one_ulp(got, in_order)


@formats
@pytest.mark.parametrize("base", [1e4, -1e4])
def test_scores_around_1e4(rig: Rig, fmt: CacheFormat, base: float) -> None:
    """All scores lie near +-1e4 and many tokens count, in every tile."""
    context = random_context(fmt, [200, 90])
    for key in context.keys:
        key[:, :, 0] = 6.0
    context.q[:, :, 0] = base * 8 / 6
    scores = np.einsum(
        "hd,thd->th", context.q[0].astype(np.float64), np.repeat(context.dense(0)[0], 2, axis=1)
    )
    assert (np.sign(base) * scores / 8 > 9e3).all()
    assert 1 < np.ptp(scores / 8, axis=0).min() < 20
    decoder = make_decoder(rig, context, tile_blocks=2)
    got = decode(rig, decoder, context, open_all(decoder, stores(rig, context)))
    assert_within_one_ulp(got, in_memory(rig, context))
    assert_matches(got, context.expected())


@formats
def test_scores_of_both_signs_up_to_1e4(rig: Rig, fmt: CacheFormat) -> None:
    context = random_context(fmt, [200, 90], magnitude=4000.0)
    query, key = context.q[0].astype(np.float64), np.repeat(context.dense(0)[0], 2, axis=1)
    scores = np.einsum("hd,thd->th", query, key) / 8
    assert scores.min() < -1e4 < 1e4 < scores.max()
    decoder = make_decoder(rig, context, tile_blocks=2)
    got = decode(rig, decoder, context, open_all(decoder, stores(rig, context)))
    assert_within_one_ulp(got, in_memory(rig, context))
    assert_matches(got, context.expected())


@formats
@pytest.mark.parametrize("resident_blocks", [1, 7, 100])
def test_resident_blocks_are_used_in_place(rig: Rig, fmt: CacheFormat, resident_blocks: int) -> None:
    context = random_context(fmt, [200, 64, 31])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=resident_blocks)
    sequences = open_all(decoder, stores(rig, context))
    kept = sum(len(s.resident) for s in sequences)
    assert kept == min(resident_blocks, 12 + 4 + 1)
    moved: list[tuple[int, int]] = []
    got = decode(rig, decoder, context, sequences, progress=lambda done, total: moved.append((done, total)))
    assert_matches(got, context.expected())
    record = 2 * context.layout.block_stride_bytes
    assert moved[-1] == ((17 - kept) * record, (17 - kept) * record)
    assert moved == sorted(moved)


@formats
@pytest.mark.parametrize("io", ["mmap", "read", "direct"])
def test_from_a_file(rig: Rig, fmt: CacheFormat, io: str, tmp_path: Path) -> None:
    context = random_context(fmt, [3000, 100])
    decoder = make_decoder(rig, context, tile_blocks=16, resident_blocks=3)
    for seq in range(2):
        file_store(tmp_path, context, seq).close()
    files = [FileStore.open(tmp_path / f"{seq}.kv", io=io) for seq in range(2)]
    got = decode(rig, decoder, context, open_all(decoder, files))
    assert_matches(got, context.expected())
    decoder.shutdown()
    for file in files:
        file.close()


@formats
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 1), (32, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes(rig: Rig, fmt: CacheFormat, heads: tuple[int, int], head_dim: int) -> None:
    context = random_context(fmt, [90, 33], heads=heads, head_dim=head_dim)
    decoder = make_decoder(rig, context, tile_blocks=3)
    got = decode(rig, decoder, context, open_all(decoder, stores(rig, context)), softmax_scale=0.11)
    assert_matches(got, context.expected(0.11))


@formats
def test_a_subset_in_another_order(rig: Rig, fmt: CacheFormat) -> None:
    context = random_context(fmt, [100, 50, 70])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=4)
    sequences = open_all(decoder, stores(rig, context))
    expected = context.expected()
    for order in ([2, 0], [1], [0, 1, 2]):
        part = Context(context.layout, context.q[order], [], [])
        got = decode(rig, decoder, part, [sequences[i] for i in order])
        assert_matches(got, expected[order])


@formats
def test_the_memory_that_it_says(rig: Rig, fmt: CacheFormat) -> None:
    context = random_context(fmt, [40, 0, 5])
    decoder = make_decoder(rig, context, tile_blocks=3, slots=2, resident_blocks=7)
    states = [*decoder._states.arrays, *decoder._merged.arrays]
    held = [decoder._pool._memory, *(slot._memory for slot in decoder._pipeline.slots), *states]
    assert decoder.device_bytes == sum(array.nbytes for array in held)


def test_results_are_the_same_bits_every_time(rig: Rig) -> None:
    context = random_context(FP8, [500, 20])
    decoder = make_decoder(rig, context, tile_blocks=5, slots=3)
    sequences = open_all(decoder, stores(rig, context))
    first = decode(rig, decoder, context, sequences)
    for _ in range(3):
        np.testing.assert_array_equal(
            decode(rig, decoder, context, sequences).view(np.uint16), first.view(np.uint16)
        )
