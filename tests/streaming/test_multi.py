"""A sequence cut over ranks: the arithmetic on the emulator and on one GPU, NCCL where there are several."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, CacheFormat
from cupaged.streaming import (
    ContextParallelDecoder,
    PinnedStore,
    StreamingDecoder,
    encode_records,
    local_blocks,
)
from cupaged.streaming.multi import Exchange
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    Context,
    assert_within_one_ulp,
    decode,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
    scales_of,
)

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


@dataclass
class Table:
    """Where the ranks of a fake group meet."""

    size: int
    barrier: threading.Barrier = field(init=False)
    sent: list[Sequence[Exchange]] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.sent = [()] * self.size


class FakeCommunicator:
    """Ranks are threads that share one device's memory."""

    def __init__(self, rig: Rig, table: Table, rank: int) -> None:
        self.rank, self.size = rank, table.size
        self._rig, self._table = rig, table

    def all_gather(self, exchanges: Sequence[Exchange], stream: int) -> None:
        table = self._table
        self._rig.gpu.synchronize()
        table.sent[self.rank] = exchanges
        table.barrier.wait()
        for i, (_, target, count) in enumerate(exchanges):
            for rank in range(self.size):
                self._copy(target + 4 * count * rank, table.sent[rank][i][0], 4 * count)
        table.barrier.wait()

    def _copy(self, target: int, source: int, size: int) -> None:
        if self._rig.name == "emulator":
            ctypes.memmove(target, source, size)
        else:
            import cupy

            cupy.cuda.runtime.memcpy(target, source, size, cupy.cuda.runtime.memcpyDeviceToDevice)


def on_ranks(rig: Rig, size: int, work: Callable[[FakeCommunicator], Any]) -> list[Any]:
    """What each rank returns, all running at once."""
    table, results = Table(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(FakeCommunicator(rig, table, rank))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def part_of(context: Context, rank: int, size: int) -> Context:
    """A rank's tokens of each sequence."""
    block = context.layout.block_size
    cuts = [local_blocks(-(-len(k) // block), rank, size) for k in context.keys]
    return Context(
        context.layout,
        context.q,
        [k[a * block : b * block] for k, (a, b) in zip(context.keys, cuts, strict=True)],
        [v[a * block : b * block] for v, (a, b) in zip(context.values, cuts, strict=True)],
    )


@formats
@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_parts(rig: Rig, fmt: CacheFormat, size: int) -> None:
    """Five ranks: some have nothing of a short sequence."""
    context = random_context(fmt, [500, 0, 33, 17])
    alone = decode_alone(rig, context)

    def work(communicator: FakeCommunicator) -> Any:
        part = part_of(context, communicator.rank, size)
        decoder = make_decoder(rig, part, tile_blocks=2, communicator=communicator)
        stores = [pinned_store(rig, part, seq) for seq in range(4)]
        return decode(rig, decoder, part, open_all(decoder, stores))

    results = on_ranks(rig, size, work)
    for got in results:
        assert_matches(got, context.expected())
        assert_within_one_ulp(got, alone)
        np.testing.assert_array_equal(got.view(np.uint16), results[0].view(np.uint16))


def decode_alone(rig: Rig, context: Context) -> Any:
    decoder = make_decoder(rig, context, tile_blocks=4)
    stores = [pinned_store(rig, context, seq) for seq in range(len(context.keys))]
    return decode(rig, decoder, context, open_all(decoder, stores))


@formats
@pytest.mark.parametrize("partials", ["states", "outputs"])
@pytest.mark.parametrize("size", [1, 3])
def test_parts_in_memory(rig: Rig, fmt: CacheFormat, partials: str, size: int) -> None:
    context = random_context(fmt, [400, 1, 0, 90])
    layout = context.layout
    half = layout.block_stride_bytes

    def work(communicator: FakeCommunicator) -> Any:
        part = part_of(context, communicator.rank, size)
        records = [encode_records(layout, k, v, **scales_of(layout))[0]
                   for k, v in zip(part.keys, part.values, strict=True)]  # fmt: skip
        everything = np.concatenate([*records, np.full((1, 2 * half), 0xFF, np.uint8)])
        dtype = np.uint16 if fmt == BF16 else np.uint8
        k_pool, v_pool = (
            rig.gpu.asarray(np.ascontiguousarray(x).view(dtype))
            for x in (everything[:, :half], everything[:, half:])
        )
        table = np.full((4, 30), -1, np.int32)
        used = 0
        for row, own in zip(table, records, strict=True):
            row[: len(own)] = np.arange(used, used + len(own))
            used += len(own)
        decoder = ContextParallelDecoder(
            rig.gpu, layout, context.num_q_heads, communicator, max_seqs=5, partials=partials,
            **scales_of(layout),
        )  # fmt: skip
        output = rig.full_bf16(context.q.shape)
        for _ in range(2):
            decoder.decode(
                rig.upload(context.q), k_pool, v_pool, rig.upload(table), [len(k) for k in part.keys], output,
                max_blocks_per_seq=30, num_blocks=len(everything), stream=rig.stream,
            )  # fmt: skip
        return rig.download_bf16(output)

    results = on_ranks(rig, size, work)
    alone = decode_alone(rig, context)
    for got in results:
        assert_matches(got, context.expected())
        if partials == "states":
            assert_within_one_ulp(got, alone)
        np.testing.assert_array_equal(got.view(np.uint16), results[0].view(np.uint16))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_local_parts_cover_everything_once(size: int) -> None:
    for blocks in (0, 1, 7, 64, 65):
        parts = [local_blocks(blocks, rank, size) for rank in range(size)]
        assert [b for a, e in parts for b in range(a, e)] == list(range(blocks))
        assert max(e - a for a, e in parts) - min(e - a for a, e in parts) <= 1
    with pytest.raises(ArgumentValueError, match="rank: got"):
        local_blocks(4, size, size)


def test_what_is_refused(rig: Rig) -> None:
    context = random_context(BF16, [16])
    communicator = FakeCommunicator(rig, Table(1), 0)
    with pytest.raises(ArgumentValueError, match="partials: got 'x', allowed are 'states' and 'outputs'"):
        ContextParallelDecoder(rig.gpu, context.layout, 4, communicator, partials="x")
    decoder = ContextParallelDecoder(rig.gpu, context.layout, 4, communicator)
    q, output = rig.upload(context.q), rig.full_bf16(context.q.shape)
    pool = rig.gpu.zeros(context.layout.pool_shape(1), "uint16")
    table = rig.upload(np.zeros((1, 1), np.int32))
    for lengths, message in (([17], "allowed is 0 to 16"), ([-1], "allowed is 0"), ([1, 1], "takes 1")):
        with pytest.raises(ArgumentValueError, match=f"seq_lens: got .*{message}"):
            decoder.decode(q, pool, pool, table, lengths, output, max_blocks_per_seq=1, num_blocks=1,
                           stream=rig.stream)  # fmt: skip


@pytest.mark.gpu
def test_two_gpus_by_nccl() -> None:
    """The benchmark's own processes, at a small size."""
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count < 2:
        pytest.skip("needs two GPUs")
    from benchmarks.multi_gpu import run

    for row in run(ranks=2, tokens=100_000, formats=("bf16", "fp8", "nvfp4"), replays=3):
        assert row["ulps_from_one_gpu"] <= (1.0 if row["partials"] == "states" else 2.0)
        assert row["relative_error"] < 5e-3


def test_streaming_takes_a_store_of_nothing(rig: Rig) -> None:
    context = random_context(BF16, [0])
    decoder = StreamingDecoder(rig.gpu, context.layout, 4, scratch_bytes=1 << 20)
    got = decode(rig, decoder, context, [decoder.open(PinnedStore(rig.gpu, context.layout, 1))])
    assert not got.view(np.uint16).any()
