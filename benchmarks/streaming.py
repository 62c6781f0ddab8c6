"""Streaming decode against the link and the file: a context in pinned memory, then one in a file.

    python -m benchmarks.streaming [--context-gib 32] [--file-gib 4] [--json FILE]

The context is the same number of tokens in every format; --context-gib is its size in BF16, K and V. Its
content repeats every 16384 tokens, so that float64 attention over one period is the right result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.commit import source_commit
from cupaged import CupyBackend
from cupaged.formats import BF16, FORMATS, CacheFormat, CacheLayout
from cupaged.streaming import (
    FileStore,
    PinnedStore,
    StreamingDecoder,
    Trace,
    decode_records,
    encode_records,
)
from cupaged.streaming.device import device_of
from cupaged.streaming.records import RecordLayout

GIB = 1 << 30
MIB = 1 << 20
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
PERIOD_TOKENS = 16384
TILE_BYTES, SLOTS = 64 * MIB, 4
LINK_PIECES = (64 * MIB, 256 * MIB)
TRACED_TILES = 64
READ_THREADS = 4
Row = dict[str, Any]


def layout_of(fmt: CacheFormat) -> CacheLayout:
    """32 query and 8 KV heads of 128, blocks of 16."""
    return CacheLayout(fmt, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)


class Period:
    """The content of PERIOD_TOKENS tokens, a query, and the right result."""

    def __init__(self, gpu: CupyBackend, fmt: CacheFormat) -> None:
        rng = np.random.default_rng(0)
        self.scales = {"k_scale": 0.01, "v_scale": 0.01} if fmt.needs_scale else {}
        shape = (PERIOD_TOKENS, NUM_KV_HEADS, HEAD_DIM)
        key, value = (rng.standard_normal(shape, np.float32) for _ in range(2))
        self.layout = layout_of(fmt)
        self.records = encode_records(self.layout, key, value, **self.scales)[0]
        bits = rng.standard_normal((1, NUM_Q_HEADS, HEAD_DIM), np.float32).view(np.uint32) >> 16
        self.q = gpu.asarray(bits.astype(np.uint16))
        query = (bits.astype(np.uint32) << 16).view(np.float32)[0].astype(np.float64)
        self.expected = self._attention(query)

    def _attention(self, query: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        keys, values = decode_records(self.layout, self.records, PERIOD_TOKENS, **self.scales)
        rows = []
        for head in range(NUM_Q_HEADS):
            kv = head // (NUM_Q_HEADS // NUM_KV_HEADS)
            scores = keys[:, kv].astype(np.float64) @ query[head] * HEAD_DIM**-0.5
            weights = np.exp(scores - scores.max())
            rows.append(weights @ values[:, kv].astype(np.float64) / weights.sum())
        return np.stack(rows)

    def error(self, gpu: CupyBackend, output: Any) -> float:
        """Relative L2 error of an output."""
        got = (gpu.to_host(output)[0].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return float(np.linalg.norm(got - self.expected) / np.linalg.norm(self.expected))


def fill(gpu: CupyBackend, memory: npt.NDArray[np.uint8], period: Period) -> None:
    """Repeat the period over pinned memory, copied from the GPU."""
    device, stream = device_of(gpu), gpu.null_stream()
    source = gpu.asarray(period.records.reshape(-1))
    for begin in range(0, memory.size, source.size):
        device.to_host(memory[begin : begin + source.size], int(gpu.pointer(source)), stream)
    gpu.synchronize()


def link_bandwidth(gpu: CupyBackend, memory: npt.NDArray[np.uint8]) -> float:
    """Bytes a second of plain copies from pinned memory, the best of two piece sizes."""
    device = device_of(gpu)
    stream, begin, end = device.stream(), device.event(timing=True), device.event(timing=True)
    target = gpu.empty(max(LINK_PIECES), "uint8")
    best = 0.0
    for piece in LINK_PIECES:
        total = min(memory.size, 16 * GIB) // piece * piece
        for _ in range(2):
            begin.record(stream)
            for at in range(0, total, piece):
                device.to_device(int(gpu.pointer(target)), memory[at : at + piece], stream)
            end.record(stream)
            end.synchronize()
            best = max(best, total / (end.milliseconds_since(begin) / 1e3))
    return best


def seconds_of(gpu: CupyBackend, work: Callable[[], None]) -> float:
    """Wall-clock time of a step, until the device is done."""
    gpu.synchronize()
    begin = time.perf_counter()
    work()
    gpu.synchronize()
    return time.perf_counter() - begin


def hidden_share(rows: Sequence[dict[str, float]]) -> float:
    """Share of the computing time during which a copy was in progress."""
    computing = hidden = 0.0
    copies = [(row["copy_begin"], row["copy_end"]) for row in rows]
    for row in rows:
        begin, end = row["step_begin"], row["step_end"]
        computing += end - begin
        hidden += sum(max(0.0, min(end, b) - max(begin, a)) for a, b in copies)
    return hidden / computing if computing else 0.0


def from_pinned(
    gpu: CupyBackend, stream: Any, memory: npt.NDArray[np.uint8], period: Period, tokens: int, link: float,
    steps: int, tile_bytes: int = TILE_BYTES,
) -> Row:  # fmt: skip
    """One format: bandwidth, share of the link, time line, accuracy."""
    layout = period.layout
    fill(gpu, memory[: tokens // BLOCK_SIZE * RecordLayout(layout).record_bytes], period)
    store = PinnedStore(gpu, layout, tokens // BLOCK_SIZE, memory=memory)
    store.reserve(tokens // BLOCK_SIZE)
    decoder = StreamingDecoder(
        gpu, layout, NUM_Q_HEADS, scratch_bytes=SLOTS * tile_bytes, tiles_in_flight=SLOTS, **period.scales
    )
    sequence = decoder.open(store)
    output = gpu.empty((1, NUM_Q_HEADS, HEAD_DIM), "uint16")

    def step(trace: Trace | None = None) -> None:
        decoder.decode(period.q, [sequence], output, stream=stream, trace=trace)

    times = [seconds_of(gpu, step) for _ in range(steps + 1)][1:]
    trace = Trace()
    step(trace)
    rows = trace.rows()
    num_bytes = store.num_blocks * RecordLayout(layout).record_bytes
    median = float(np.median(times))
    return {
        "source": "pinned",
        "format": layout.format.name,
        "tokens": tokens,
        "tile_bytes": tile_bytes,
        "bytes": num_bytes,
        "seconds": median,
        "seconds_all": times,
        "bytes_per_s": num_bytes / median,
        "share_of_link": num_bytes / median / link,
        "kv_tokens_per_s": tokens / median,
        "device_bytes": decoder.device_bytes,
        "compute_ms": sum(row["step_end"] - row["step_begin"] for row in rows),
        "compute_hidden": hidden_share(rows),
        "relative_error": period.error(gpu, output),
        "timeline": rows[:TRACED_TILES],
    }


def drop_cached(path: Path) -> None:
    """Let the next read of a file come from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_rate(store: FileStore, targets: Sequence[npt.NDArray[np.uint8]]) -> float:
    """Bytes a second of reading a whole file in order, by as many threads as the decoder's."""
    size = RecordLayout(store.layout).record_bytes
    count = max(1, (4 * MIB) // size)
    free = list(targets)

    def read(first: int) -> None:
        target = free.pop()
        store.read(first, target[: min(count, store.num_blocks - first) * size])
        free.append(target)

    begin = time.perf_counter()
    with ThreadPoolExecutor(READ_THREADS) as threads:
        list(threads.map(read, range(0, store.num_blocks, count)))
    return store.num_blocks * size / (time.perf_counter() - begin)


def from_file(gpu: CupyBackend, stream: Any, folder: Path, period: Period, file_bytes: int) -> list[Row]:
    """One format, each way of reading: the decode's rate against the file's own."""
    layout = period.layout
    size = RecordLayout(layout).record_bytes
    repeats = max(1, file_bytes // period.records.nbytes)
    path = folder / f"{layout.format.name}.kv"
    with FileStore.create(path, layout, **period.scales) as made:
        for _ in range(repeats):
            made.append(period.records)
    count = max(1, (4 * MIB) // size)
    targets = [device_of(gpu).pinned(count * size) for _ in range(READ_THREADS)]
    rows = []
    for io in ("mmap", "read", "direct"):
        with FileStore.open(path, io=io) as store:
            decoder = StreamingDecoder(
                gpu, layout, NUM_Q_HEADS, scratch_bytes=SLOTS * TILE_BYTES, tiles_in_flight=SLOTS,
                read_threads=READ_THREADS, **period.scales,
            )  # fmt: skip
            sequence = decoder.open(store)
            output = gpu.empty((1, NUM_Q_HEADS, HEAD_DIM), "uint16")

            def step(decoder: Any = decoder, sequence: Any = sequence, output: Any = output) -> None:
                decoder.decode(period.q, [sequence], output, stream=stream)

            found: Row = {"source": "file", "io": io, "format": layout.format.name}
            for state in ("cold", "cached"):
                if state == "cached" and io == "direct":
                    continue
                rates, streamed = [], []
                for _ in range(2):
                    if state == "cold":
                        drop_cached(path)
                    rates.append(read_rate(store, targets))
                    if state == "cold":
                        drop_cached(path)
                    streamed.append(store.num_blocks * size / seconds_of(gpu, step))
                found[f"{state}_read_bytes_per_s"] = max(rates)
                found[f"{state}_bytes_per_s"] = max(streamed)
                found[f"{state}_share_of_file"] = max(streamed) / max(rates)
            found["bytes"] = store.num_blocks * size
            found["relative_error"] = period.error(gpu, output)
            decoder.shutdown()
            rows.append(found)
    path.unlink()
    return rows


def show(row: Row) -> str:
    """A line for the terminal."""
    if row["source"] == "pinned":
        return (
            f"pinned {row['format']:6} tiles of {row['tile_bytes'] / MIB:3.0f} MiB "
            f"{row['bytes'] / GIB:6.2f} GiB {row['seconds']:7.3f} s "
            f"{row['bytes_per_s'] / 1e9:6.2f} GB/s, {100 * row['share_of_link']:.1f}% of the link, "
            f"{row['kv_tokens_per_s'] / 1e6:.2f} M tokens/s, {100 * row['compute_hidden']:.0f}% of computing "
            f"hidden, error {row['relative_error']:.1e}"
        )
    parts = [
        f"{state} {row[f'{state}_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"{100 * row[f'{state}_share_of_file']:.1f}% of the file's "
        f"{row[f'{state}_read_bytes_per_s'] / 1e9:.2f}"
        for state in ("cold", "cached")
        if f"{state}_bytes_per_s" in row
    ]
    return f"file   {row['format']:6} {row['io']:6} {'; '.join(parts)}, error {row['relative_error']:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a result was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context-gib", type=float, default=32.0, help="of BF16 K and V")
    parser.add_argument("--file-gib", type=float, default=4.0, help="of a file; 0 leaves files out")
    parser.add_argument("--folder", type=Path, help="where files go; a temporary folder by default")
    parser.add_argument("--formats", default="bf16,fp8,nvfp4")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiles-mib", default="16,64", help="sizes of tiles, K and V")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args(arguments)
    import cupy

    gpu = CupyBackend()
    stream = cupy.cuda.Stream(non_blocking=True)
    bf16_record = RecordLayout(layout_of(BF16)).record_bytes
    period_bytes = PERIOD_TOKENS // BLOCK_SIZE * bf16_record
    tokens = max(1, int(options.context_gib * GIB) // period_bytes) * PERIOD_TOKENS
    begin = time.perf_counter()
    memory = device_of(gpu).pinned(tokens // BLOCK_SIZE * bf16_record)
    pinning = time.perf_counter() - begin
    link = link_bandwidth(gpu, memory)
    print(f"pinned {memory.size / GIB:.1f} GiB in {pinning:.1f} s; link {link / 1e9:.2f} GB/s", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for fmt in (f for f in FORMATS if f.name in options.formats.split(",")):
            period = Period(gpu, fmt)
            for tile in map(int, options.tiles_mib.split(",")):
                rows.append(from_pinned(gpu, stream, memory, period, tokens, link, options.steps, tile * MIB))
                print(show(rows[-1]), flush=True)
            if options.file_gib > 0:
                for row in from_file(gpu, stream, Path(folder), period, int(options.file_gib * GIB)):
                    rows.append(row)
                    print(show(row), flush=True)
    if options.json:
        result = {"commit": source_commit(), "link_bytes_per_s": link, "pinning_s": pinning, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["relative_error"] < 5e-3 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
