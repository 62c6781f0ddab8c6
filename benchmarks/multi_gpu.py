"""One sequence cut over several GPUs of a host, against one GPU.

    python -m benchmarks.multi_gpu [--ranks 2] [--tokens 1048576] [--json FILE]

Starts one process for each GPU. The context's content repeats every 8192 tokens, so that float64 attention
over one period is the right result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.commit import source_commit
from cupaged import CupyBackend
from cupaged.decode import Decoder
from cupaged.formats import BF16, CacheLayout, cache_format
from cupaged.streaming import (
    ContextParallelDecoder,
    NcclCommunicator,
    decode_records,
    encode_records,
    local_blocks,
)

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
PERIOD_TOKENS = 8192
CALLS = 20
TIMEOUT_S = 300
Row = dict[str, Any]


class Context:
    """A rank's part of the context on its GPU."""

    def __init__(self, gpu: CupyBackend, name: str, first: int, end: int) -> None:
        self.gpu = gpu
        self.layout = CacheLayout(cache_format(name), NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        self.scales = {"k_scale": 0.01, "v_scale": 0.01} if self.layout.format.needs_scale else {}
        rng = np.random.default_rng(0)
        shape = (PERIOD_TOKENS, NUM_KV_HEADS, HEAD_DIM)
        key, value = (rng.standard_normal(shape, np.float32) for _ in range(2))
        self.records = encode_records(self.layout, key, value, **self.scales)[0]
        self.q_bits = (
            rng.standard_normal((1, NUM_Q_HEADS, HEAD_DIM), np.float32).view(np.uint32) >> 16
        ).astype(np.uint16)
        self.num_blocks = end - first
        half = self.layout.block_stride_bytes
        self.pools = [self._pool(part, first) for part in (self.records[:, :half], self.records[:, half:])]
        self.table = gpu.asarray(np.random.default_rng(1).permutation(self.num_blocks).astype(np.int32)[None])
        self.q = gpu.asarray(self.q_bits)
        self.output = gpu.empty(self.q_bits.shape, "uint16")

    def _pool(self, period: np.ndarray, first: int) -> Any:
        """Block b of the part at the place that the table gives it: any, as all periods are alike."""
        import cupy

        dtype = np.uint16 if self.layout.format == BF16 else np.uint8
        blocks = cupy.asarray(np.ascontiguousarray(period).view(dtype))
        order = np.empty(self.num_blocks, np.int64)
        order[np.random.default_rng(1).permutation(self.num_blocks)] = np.arange(self.num_blocks)
        return blocks[cupy.asarray((order + first) % len(period))]

    def expected(self) -> np.ndarray:
        """Float64, of one period."""
        query = (self.q_bits.astype(np.uint32) << 16).view(np.float32)[0].astype(np.float64)
        keys, values = decode_records(self.layout, self.records, PERIOD_TOKENS, **self.scales)
        rows = []
        for head in range(NUM_Q_HEADS):
            kv = head // (NUM_Q_HEADS // NUM_KV_HEADS)
            scores = keys[:, kv].astype(np.float64) @ query[head] * HEAD_DIM**-0.5
            weights = np.exp(scores - scores.max())
            rows.append(weights @ values[:, kv].astype(np.float64) / weights.sum())
        return np.stack(rows)

    def result(self) -> np.ndarray:
        """The output as float64."""
        bits = self.gpu.to_host(self.output)[0]
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def microseconds(stream: Any, call: Callable[[], None], replays: int) -> list[float]:
    """Of a call, in runs of CALLS one after the other."""
    import cupy

    call()
    stream.synchronize()
    times = []
    for _ in range(replays):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        for _ in range(CALLS):
            call()
        end.record(stream)
        end.synchronize()
        times.append(1e3 * float(cupy.cuda.get_elapsed_time(begin, end)) / CALLS)
    return times


def one_gpu(gpu: CupyBackend, stream: Any, name: str, tokens: int, replays: int) -> tuple[float, Any, Any]:
    """Time, output and float64 of the whole context on one GPU, by `Decoder`."""
    context = Context(gpu, name, 0, tokens // BLOCK_SIZE)
    decoder = Decoder(gpu, context.layout, NUM_Q_HEADS, 1)
    lengths = gpu.asarray(np.array([tokens], np.int32))

    def call() -> None:
        decoder.decode(
            context.q, *context.pools, context.table, lengths, context.output, num_seqs=1,
            max_blocks_per_seq=context.num_blocks, stream=stream, num_blocks=context.num_blocks,
            **context.scales,
        )  # fmt: skip

    times = microseconds(stream, call, replays)
    return float(np.median(times)), context.result(), context.expected()


def measure_rank(rank: int, size: int, unique_id: Any, work: Any, meet: Any, results: Any) -> None:
    """One process: all formats and kinds of partial results, in the same order on all ranks."""
    import cupy

    tokens, formats, replays = work
    gpu = CupyBackend(rank)
    with cupy.cuda.Device(rank):
        stream = cupy.cuda.Stream(non_blocking=True)
        communicator = NcclCommunicator(gpu, size, rank, unique_id)
        for name in formats:
            alone = one_gpu(gpu, stream, name, tokens, replays) if rank == 0 else None
            cupy.get_default_memory_pool().free_all_blocks()
            context = Context(gpu, name, *local_blocks(tokens // BLOCK_SIZE, rank, size))
            for partials in ("states", "outputs"):
                decoder = ContextParallelDecoder(
                    gpu, context.layout, NUM_Q_HEADS, communicator, partials=partials, **context.scales
                )

                def call(decoder: Any = decoder, context: Any = context) -> None:
                    decoder.decode(
                        context.q, *context.pools, context.table, [context.num_blocks * BLOCK_SIZE],
                        context.output, max_blocks_per_seq=context.num_blocks,
                        num_blocks=context.num_blocks, stream=stream,
                    )  # fmt: skip

                meet.wait(TIMEOUT_S)
                times = microseconds(stream, call, replays)
                results.put(("time", rank, name, partials, float(np.median(times))))
                if alone is not None:
                    row = compare(name, partials, tokens, size, alone, context.result())
                    results.put(("row", rank, name, partials, row))
        meet.wait(TIMEOUT_S)
        communicator.close()


def compare(name: str, partials: str, tokens: int, size: int, alone: Any, got: np.ndarray) -> Row:
    """The result of all ranks against one GPU's and float64."""
    one_us, one_output, expected = alone
    _, exponent = np.frexp(np.abs(one_output).max(axis=-1, keepdims=True))
    ulps = np.abs(got - one_output) / np.ldexp(1.0, exponent - 8)
    return {
        "format": name,
        "partials": partials,
        "tokens": tokens,
        "ranks": size,
        "one_gpu_us": one_us,
        "ulps_from_one_gpu": float(ulps.max()),
        "relative_error": float(np.linalg.norm(got - expected) / np.linalg.norm(expected)),
    }


def process(rank: int, size: int, unique_id: Any, work: Any, meet: Any, results: Any) -> None:
    """`measure_rank`, telling of a failure."""
    try:
        measure_rank(rank, size, unique_id, work, meet, results)
    except BaseException:
        meet.abort()
        results.put(("error", rank, "", "", traceback.format_exc()))


def run(ranks: int, tokens: int, formats: Sequence[str], replays: int = 9) -> list[Row]:
    """Rows of all formats; starts the processes and ends them."""
    spawn = multiprocessing.get_context("spawn")
    meet, results = spawn.Barrier(ranks), spawn.Queue()
    tokens = max(1, tokens // PERIOD_TOKENS) * PERIOD_TOKENS
    unique_id = NcclCommunicator.unique_id()
    processes = [
        spawn.Process(
            target=process, args=(rank, ranks, unique_id, (tokens, tuple(formats), replays), meet, results)
        )
        for rank in range(ranks)
    ]
    for started in processes:
        started.start()
    try:
        return _collect(results, ranks, len(formats) * 2)
    finally:
        for started in processes:
            started.join(30)
            if started.is_alive():
                started.terminate()


def _collect(results: Any, ranks: int, count: int) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(count * (ranks + 1)):
        kind, rank, name, partials, value = results.get(timeout=TIMEOUT_S)
        if kind == "error":
            raise RuntimeError(f"rank {rank} failed:\n{value}")
        if kind == "row":
            rows[name, partials] = value
        else:
            times.setdefault((name, partials), []).append(value)
    for key, row in rows.items():
        row["us"] = max(times[key])
        row["share_of_one_gpu"] = row["us"] / row["one_gpu_us"]
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a result was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--formats", default="bf16,fp8,nvfp4")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args(arguments)
    rows = run(options.ranks, options.tokens, options.formats.split(","))
    for row in rows:
        print(
            f"{row['format']:6} {row['partials']:8} {row['ranks']} GPUs {row['us']:8.1f} us, one GPU "
            f"{row['one_gpu_us']:8.1f} us: {row['share_of_one_gpu']:.2f} x; {row['ulps_from_one_gpu']:.2f} "
            f"ulp from one GPU, error {row['relative_error']:.1e}"
        )
    if options.json:
        options.json.write_text(json.dumps({"commit": source_commit(), "rows": rows}, indent=1) + "\n")
    return 0 if all(row["relative_error"] < 5e-3 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
