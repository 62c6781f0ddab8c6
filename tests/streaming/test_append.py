"""Sequences that grow while they are decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError, StoreFullError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from cupaged.streaming import FileStore, PinnedStore, StreamingDecoder, encode_records
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    cut,
    decode,
    file_store,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
    scales_of,
)

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def stored(store: Any) -> Any:
    found = np.empty(store.num_blocks * 2 * store.layout.block_stride_bytes, np.uint8)
    store.read(0, found)
    return found.reshape(store.num_blocks, -1)


@formats
@pytest.mark.parametrize("resident_blocks", [0, 3, 100])
@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_one_token_at_a_time(
    rig: Rig, fmt: CacheFormat, resident_blocks: int, kind: str, tmp_path: Path
) -> None:
    """Three sequences, one of them empty at first, grow past several block ends."""
    whole = random_context(fmt, [90, 40, 61], block_size=8)
    lengths = [50, 0, 21]
    start = cut(whole, lengths)
    if kind == "pinned":
        stores: list[Any] = [PinnedStore(rig.gpu, whole.layout, 16) for _ in range(3)]
        for seq, store in enumerate(stores):
            records, tail = start.records(seq)
            store.append(records)
            if tail:
                store.keep_tail(tail)
    else:
        stores = [file_store(tmp_path, start, seq) for seq in range(3)]
    decoder = make_decoder(rig, whole, tile_blocks=2, resident_blocks=resident_blocks)
    sequences = open_all(decoder, stores)
    for step in range(40):
        keys, values = (
            np.stack([rows[s][lengths[s]] for s in range(3)]) for rows in (whole.keys, whole.values)
        )
        decoder.append(sequences, rig.upload(keys), rig.upload(values), stream=rig.stream)
        lengths = [n + 1 for n in lengths]
        assert [s.num_tokens for s in sequences] == lengths
        if step % 5 == 0 or step > 36:
            now = cut(whole, lengths)
            assert_matches(decode(rig, decoder, now, sequences), now.expected())
    now = cut(whole, lengths)
    for seq, store in enumerate(stores):
        np.testing.assert_array_equal(stored(store), now.records(seq)[0])
        assert store.num_blocks == lengths[seq] // 8
    for sequence in sequences:
        decoder.close(sequence)
    for seq, store in enumerate(stores):
        tail = now.records(seq)[1]
        assert (store.tail is None) == (tail is None)
        if tail is not None:
            assert store.tail.num_tokens == tail.num_tokens
    again = open_all(make_decoder(rig, whole, tile_blocks=3), stores)
    assert [s.num_tokens for s in again] == lengths


@formats
@pytest.mark.parametrize("steps", [(1, 100, 16, 15, 40), (172,), (15, 1, 156)], ids=str)
def test_many_tokens_at_once(rig: Rig, fmt: CacheFormat, steps: tuple[int, ...]) -> None:
    whole = random_context(fmt, [172])
    decoder = make_decoder(rig, whole, tile_blocks=2, resident_blocks=4)
    sequence = decoder.open(PinnedStore(rig.gpu, whole.layout, 10))
    begin = 0
    for count in steps:
        rows = [rig.upload(x[0][begin : begin + count]) for x in (whole.keys, whole.values)]
        decoder.extend(sequence, *rows, count, stream=rig.stream)
        begin += count
    assert len(sequence.resident) == 4
    np.testing.assert_array_equal(stored(sequence.store), whole.records(0)[0])
    assert_matches(decode(rig, decoder, whole, [sequence]), whole.expected())


def test_a_store_that_is_full(rig: Rig) -> None:
    """The block stays on the GPU, still counts, and goes to the store once there is room."""
    whole = random_context(BF16, [40], block_size=4)
    store = PinnedStore(rig.gpu, whole.layout, 3)
    decoder = make_decoder(rig, whole, tile_blocks=2)
    sequence = decoder.open(store)
    rows = [rig.upload(x[0]) for x in (whole.keys, whole.values)]
    with pytest.raises(StoreFullError, match="a pinned store of 3 blocks has 3; 1 more"):
        decoder.extend(sequence, *rows, 40, stream=rig.stream)
    assert sequence.num_tokens == 16
    now = cut(whole, [16])
    assert_matches(decode(rig, decoder, now, [sequence]), now.expected())
    one = [rig.upload(x[0][16:17]) for x in (whole.keys, whole.values)]
    with pytest.raises(StoreFullError):
        decoder.append([sequence], *one, stream=rig.stream)
    assert sequence.num_tokens == 16


def test_room_is_shared_and_given_back(rig: Rig) -> None:
    context = random_context(FP8, [160, 32, 160])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=12)
    stores = [pinned_store(rig, context, seq) for seq in range(3)]
    first = decoder.open(stores[0])
    assert len(first.resident) == 10
    second, third = decoder.open(stores[1]), decoder.open(stores[2])
    assert [len(s.resident) for s in (first, second, third)] == [5, 2, 5]
    assert_matches(decode(rig, decoder, context, [first, second, third]), context.expected())
    decoder.close(first)
    assert [len(s.resident) for s in (second, third)] == [2, 10]
    again = decoder.open(stores[0])
    assert_matches(decode(rig, decoder, context, [again, second, third]), context.expected())


def test_what_is_refused(rig: Rig, tmp_path: Path) -> None:
    context = random_context(FP8, [40, 40])
    decoder = make_decoder(rig, context, tile_blocks=2)
    store = pinned_store(rig, context, 0)
    first = decoder.open(store)
    key = rig.upload(context.keys[0][:1])
    with pytest.raises(ArgumentValueError, match=r"store: has .* this decoder takes"):
        decoder.open(PinnedStore(rig.gpu, CacheLayout(BF16, 2, 64, 16), 1))
    other = FileStore.create(tmp_path / "f", context.layout, k_scale=2.0)
    with pytest.raises(ArgumentValueError, match=r"was written with k_scale, v_scale 2\.0, 1\.0"):
        decoder.open(other)
    decoder.open(pinned_store(rig, context, 1))
    with pytest.raises(ArgumentValueError, match="2 sequences are open, which is max_seqs"):
        decoder.open(pinned_store(rig, context, 1))
    with pytest.raises(ArgumentValueError, match="sequences: one is named twice"):
        decoder.append([first, first], key, key, stream=rig.stream)
    with pytest.raises(ArgumentValueError, match="key: got 128 elements, needed are 256"):
        decoder.extend(first, key, key, 2, stream=rig.stream)
    with pytest.raises(ArgumentTypeError, match="key: got dtype float32"):
        decoder.append([first], rig.gpu.zeros((1, 2, 64), "float32"), key, stream=rig.stream)
    wide = rig.upload(context.keys[0][:4])
    with pytest.raises(ArgumentValueError, match=r"key: got strides .512, 128, 2. .* is C order without"):
        decoder.extend(first, wide[::2], wide[::2], 2, stream=rig.stream)
    with pytest.raises(ArgumentValueError, match=r"value: got shape \(1, 64, 2\)"):
        decoder.append([first], key, key.reshape(1, 64, 2), stream=rig.stream)
    with pytest.raises(ArgumentValueError, match="num_tokens: got -1"):
        decoder.extend(first, key, key, -1, stream=rig.stream)
    with pytest.raises(ArgumentTypeError, match=r"num_tokens: got 1\.0"):
        decoder.extend(first, key, key, 1.0, stream=rig.stream)  # type: ignore[arg-type]
    output = rig.full_bf16((1, 4, 64))
    with pytest.raises(ArgumentValueError, match=r"q: got shape \(1, 64, 4\)"):
        decoder.decode(rig.upload(context.q[:1]).reshape(1, 64, 4), [first], output, stream=rig.stream)
    with pytest.raises(ArgumentValueError, match="q: got 256 elements, needed are 512"):
        decoder.decode(rig.upload(context.q[:1]), [first, first], output, stream=rig.stream)
    with pytest.raises(ArgumentTypeError, match="q: got dtype float32"):
        decoder.decode(rig.gpu.zeros((1, 4, 64), "float32"), [first], output, stream=rig.stream)
    with pytest.raises(ArgumentValueError, match="output: got 256 elements, needed are 512"):
        decoder.decode(rig.upload(context.q), [first, first], output, stream=rig.stream)
    decoder.close(first)
    with pytest.raises(ArgumentValueError, match="sequence: not open in this decoder"):
        decoder.decode(rig.upload(context.q[:1]), [first], output, stream=rig.stream)
    decoder.decode(rig.upload(context.q[:0]), [], output, stream=rig.stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 0}, "max_seqs: got 0, allowed is 1 to"),
        ({"tiles_in_flight": 1}, "tiles_in_flight: got 1, allowed is 2 to"),
        ({"scratch_bytes": 100}, "scratch_bytes: got 100, allowed is 32256 or more: 4 blocks"),
        ({"resident_bytes": -1}, "resident_bytes: got -1, allowed is 0 to"),
        ({"k_scale": 1.0}, "streaming takes them for an fp8 cache alone, this one is nvfp4"),
    ],
)
def test_constructor_arguments(rig: Rig, options: dict[str, Any], message: str) -> None:
    layout = CacheLayout(NVFP4, 7, 64, 16)
    with pytest.raises(ArgumentValueError, match=message):
        StreamingDecoder(rig.gpu, layout, 7, **options)
    with pytest.raises(ArgumentValueError, match="an fp8 cache needs both"):
        StreamingDecoder(rig.gpu, CacheLayout(FP8, 2, 64, 16), 4, k_scale=1.0)


def test_encoding_refuses_what_does_not_match() -> None:
    layout = CacheLayout(BF16, 2, 64, 16)
    assert encode_records(layout, np.zeros((0, 2, 64)), np.zeros((0, 2, 64)))[0].shape == (0, 8192)
    with pytest.raises(ArgumentValueError, match="value: got shape"):
        encode_records(layout, np.zeros((3, 2, 64)), np.zeros((2, 2, 64)))
    assert scales_of(layout) == {}
