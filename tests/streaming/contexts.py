"""Sequences in stores, and what float64 says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout
from cupaged.streaming import (
    BlockStore,
    FileStore,
    PinnedStore,
    StreamedSequence,
    StreamingDecoder,
    Tail,
    encode_records,
)
from cupaged.streaming.records import RecordLayout
from cupaged.streaming.store.format import Places
from tests import oracle
from tests.poison import decode_pool
from tests.rig import Rig

Array = npt.NDArray[Any]
SCALES = {"k_scale": 0.0171, "v_scale": 0.0123}
POISON = {BF16: 0xFF, FP8: 0x7F, NVFP4: 0x7F}  # bytes that read as NaN (NVFP4: in the scales)


def scales_of(layout: CacheLayout) -> dict[str, float]:
    """FP8 scales, or nothing."""
    return SCALES if layout.format == FP8 else {}


@dataclass
class Context:
    """A batch of sequences as bfloat16 ``[n, num_kv_heads, head_dim]`` keys and values, and queries."""

    layout: CacheLayout
    q: Array
    keys: list[Array]
    values: list[Array]

    @property
    def num_q_heads(self) -> int:
        return int(self.q.shape[1])

    def records(self, seq: int) -> tuple[npt.NDArray[np.uint8], Tail | None]:
        """Complete blocks, and the tail with NaN behind its last token."""
        records, last = encode_records(
            self.layout, self.keys[seq], self.values[seq], **scales_of(self.layout)
        )
        if not len(records) or last == self.layout.block_size:
            return records, None
        tail = records[-1].copy()
        poison_slots(self.layout, tail, last)
        return records[:-1], Tail(tail, last)

    def dense(self, seq: int) -> tuple[Array, Array]:
        """Dequantised float64, by the oracle's own decoders."""
        if not len(self.keys[seq]):
            return np.zeros(self.keys[seq].shape), np.zeros(self.keys[seq].shape)
        records, _ = encode_records(self.layout, self.keys[seq], self.values[seq], **scales_of(self.layout))
        half = self.layout.block_stride_bytes
        scales = [scales_of(self.layout).get(name, 1.0) for name in ("k_scale", "v_scale")]
        found = []
        for records_of, scale in zip((records[:, :half], records[:, half:]), scales, strict=True):
            pool = np.ascontiguousarray(records_of).view(self.layout.pool_dtype)
            dense = decode_pool(pool, self.layout, scale).reshape(-1, *self.keys[seq].shape[1:])
            found.append(dense[: len(self.keys[seq])])
        return found[0], found[1]

    def expected(self, scale: float | None = None) -> Array:
        """Float64 ``[num_seqs, num_q_heads, head_dim]``."""
        factor = float(np.float32(self.layout.head_dim**-0.5 if scale is None else scale))
        return np.stack(
            [oracle.attention_float64(self.q[s], *self.dense(s), factor)[0] for s in range(len(self.keys))]
        )


def poison_slots(layout: CacheLayout, record: npt.NDArray[np.uint8], first: int) -> None:
    """NaN into the slots from `first` on."""
    half = layout.block_stride_bytes
    for block in (record[:half], record[half:]):
        if layout.format == NVFP4:
            scales = block[layout.data_section_bytes : layout.block_bytes].reshape(layout.block_size, -1)
            scales[first:] = POISON[NVFP4]
        else:
            block.reshape(layout.block_size, -1)[first:] = POISON[layout.format]


def random_context(
    fmt: CacheFormat,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    magnitude: float = 1.0,
    seed: int = 0,
) -> Context:
    """Normal q, K and V; q times magnitude."""
    rng = np.random.default_rng(seed)
    layout = CacheLayout(fmt, heads[1], head_dim, block_size)

    def draw(*shape: int, factor: float = 1.0) -> Array:
        return (rng.standard_normal(shape) * factor).astype(ml_dtypes.bfloat16)

    return Context(
        layout,
        draw(len(lengths), heads[0], head_dim, factor=magnitude),
        [draw(n, heads[1], head_dim) for n in lengths],
        [draw(n, heads[1], head_dim) for n in lengths],
    )


MakeStore = Callable[[Rig, Context, int], BlockStore]


def cut(context: Context, lengths: list[int]) -> Context:
    """The first tokens of each sequence."""
    return Context(
        context.layout,
        context.q,
        [k[:n] for k, n in zip(context.keys, lengths, strict=True)],
        [v[:n] for v, n in zip(context.values, lengths, strict=True)],
    )


def pinned_store(rig: Rig, context: Context, seq: int) -> PinnedStore:
    """All of a sequence in pinned memory."""
    records, tail = context.records(seq)
    store = PinnedStore(rig.gpu, context.layout, len(records) + 4)
    return _filled(store, records, tail)


def file_store(folder: Path, context: Context, seq: int, **options: Any) -> FileStore:
    """All of a sequence in a file."""
    records, tail = context.records(seq)
    path = folder / f"{seq}.kv"
    store = FileStore.create(path, context.layout, **scales_of(context.layout), **options)
    return _filled(store, records, tail)


def _filled(store: Any, records: npt.NDArray[np.uint8], tail: Tail | None) -> Any:
    store.append(records)
    if tail is not None:
        store.keep_tail(tail)
    return store


def make_decoder(rig: Rig, context: Context, *, tile_blocks: int, slots: int = 2, resident_blocks: int = 0,
                 **options: Any) -> StreamingDecoder:  # fmt: skip
    """A decoder whose tiles and resident room are so many blocks."""
    record = 2 * context.layout.block_stride_bytes
    return StreamingDecoder(
        rig.gpu,
        context.layout,
        context.num_q_heads,
        max_seqs=len(context.keys),
        scratch_bytes=slots * tile_blocks * record,
        tiles_in_flight=slots,
        resident_bytes=resident_blocks * record,
        **scales_of(context.layout),
        **options,
    )


def open_all(decoder: StreamingDecoder, stores: Sequence[BlockStore]) -> list[StreamedSequence]:
    return [decoder.open(store) for store in stores]


def decode(
    rig: Rig, decoder: StreamingDecoder, context: Context, sequences: list[Any], **options: Any
) -> Array:
    """Output as bfloat16."""
    output = rig.full_bf16(context.q.shape)
    decoder.decode(rig.upload(context.q), sequences, output, stream=rig.stream, **options)
    return rig.download_bf16(output)


def assert_within_one_ulp(got: Array, other: Array) -> None:
    """Each element within 1 BF16 ulp of its row's largest."""
    a, b = (x.astype(np.float64) for x in (got, other))
    ulp = oracle.bf16_ulp(np.abs(b).max(axis=-1, keepdims=True))
    excess = np.abs(a - b) - ulp
    assert (excess <= 0).all(), f"off by {np.abs(a - b).max()} where an ulp is {ulp.max()}"


def truncate(path: Path, layout: CacheLayout, blocks: int) -> bytes:
    """Cut a file within a block; returns what it was."""
    whole = path.read_bytes()
    os.truncate(path, Places(RecordLayout(layout)).record(blocks) + 1)
    return whole
