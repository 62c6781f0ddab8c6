"""Decode throughput and latency on a GPU: ours against the read ceiling of the same run.

One line a case: microseconds a launch inside a CUDA graph over rotating random block tables (cold L2), the
bytes of K and V that a launch must read, the bandwidth that makes, and its share of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ceiling
from benchmarks.timing import graph_time
from cupaged import CupyBackend
from cupaged.decode import Decoder
from cupaged.formats import FORMATS, CacheFormat, CacheLayout
from tests.oracle import attention_float64
from tests.poison import decode_pool

MAX_TABLES = 64
POOL_BYTES = 2_200_000_000  # K or V


@dataclass(frozen=True)
class Load:
    """A shape and a batch."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    seq_lens: tuple[int, ...]
    name: str = ""

    @property
    def label(self) -> str:
        sizes = f"{self.num_q_heads}/{self.num_kv_heads} d{self.head_dim} page {self.block_size}"
        return f"{sizes} {self.name or f'{len(self.seq_lens)} x {self.seq_lens[0]}'}"


def equal(
    num_seqs: int, length: int, num_q_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128,
    block_size: int = 16,
) -> Load:  # fmt: skip
    """A batch of equal lengths."""
    return Load(num_q_heads, num_kv_heads, head_dim, block_size, (length,) * num_seqs)


def unequal(seed: int = 0) -> Load:
    """64 sequences, log-uniform 128 .. 32768."""
    lengths = np.exp(np.random.default_rng(seed).uniform(math.log(128), math.log(32768), 64)).astype(int)
    return Load(32, 8, 128, 16, tuple(int(n) for n in lengths), "64 log-uniform")


TABLE = (
    equal(1, 4096), equal(1, 32768), equal(1, 131072), equal(8, 8192), equal(32, 4096), equal(64, 8192),
    equal(128, 2048), equal(64, 8192, 32, 4),
)  # fmt: skip
LONG = (equal(64, 32768), equal(64, 32768, 32, 4), unequal())


class Bench:
    """Pools of random values on the GPU, made once for each layout."""

    def __init__(self, gpu: CupyBackend, stream: Any) -> None:
        self.gpu, self.stream = gpu, stream
        self._pools: tuple[Any, Any, Any] | None = None

    def pools(self, layout: CacheLayout, num_blocks: int) -> tuple[Any, Any]:
        import cupy

        key = (layout, num_blocks)
        if self._pools is None or self._pools[0] != key:
            self._pools = None
            cupy.get_default_memory_pool().free_all_blocks()
            self._pools = (key, _random_pool(layout, num_blocks, 0), _random_pool(layout, num_blocks, 1))
        return self._pools[1], self._pools[2]

    def run(self, fmt: CacheFormat, load: Load) -> dict[str, Any]:
        import cupy

        layout = CacheLayout(fmt, load.num_kv_heads, load.head_dim, load.block_size)
        counts = [-(-n // load.block_size) for n in load.seq_lens]
        needed = sum(counts)
        num_blocks = max(POOL_BYTES // layout.block_stride_bytes, needed)
        k_pool, v_pool = self.pools(layout, num_blocks)
        rotations = max(1, min(MAX_TABLES, num_blocks // needed))
        tables = _tables(num_blocks, counts, rotations)
        lengths = cupy.asarray(np.array(load.seq_lens, np.int32))
        num_seqs = len(load.seq_lens)
        q = cupy.random.standard_normal((num_seqs, load.num_q_heads, load.head_dim), dtype=cupy.float32)
        q = (q.view(cupy.uint32) >> 16).astype(cupy.uint16)
        output = cupy.full(q.shape, 0x7FC0, cupy.uint16)
        decoder = Decoder(self.gpu, layout, load.num_q_heads, num_seqs)
        cupy.cuda.Device().synchronize()
        handle = self.stream.ptr
        scales = {"k_scale": 1.0, "v_scale": 1.0} if fmt.name == "fp8" else {}

        def launch(table: Any) -> None:
            decoder.decode(
                q, k_pool, v_pool, table, lengths, output,
                num_seqs=num_seqs, max_blocks_per_seq=max(counts), stream=handle, num_blocks=num_blocks,
                **scales,
            )  # fmt: skip

        launch(tables[0])
        self.stream.synchronize()
        error = _relative_error(layout, k_pool, v_pool, tables[0], load, q, output)
        time = graph_time(self.stream, [lambda t=t: launch(t) for t in tables])
        num_bytes = 2 * sum(load.seq_lens) * layout.bytes_per_token
        return {
            "load": load.label,
            "format": fmt.name,
            **asdict(time),
            "bytes": num_bytes,
            "bytes_per_us": num_bytes / time.median_us,
            "relative_error": error,
            "tables": rotations,
        }


def _random_pool(layout: CacheLayout, num_blocks: int, seed: int) -> Any:
    """A pool of finite values; bytes repeat with a period that is no multiple of a block."""
    import cupy

    cupy.random.seed(seed)
    size = num_blocks * layout.block_stride_bytes
    if layout.format.name == "bf16":
        values = cupy.random.standard_normal((1 << 25) + 1025, dtype=cupy.float32).view(cupy.uint32)
        return cupy.resize((values >> 16).astype(cupy.uint16), size // 2).reshape(
            layout.pool_shape(num_blocks)
        )
    codes = cupy.random.randint(0, 256, (1 << 27) + 4099, dtype=cupy.uint8)
    if layout.format.name == "fp8":  # exponents 5 to 8: magnitudes 0.25 to 3.75
        codes = (codes & 0x87) | ((((codes >> 4) & 3) + 5) << 3).astype(cupy.uint8)
        return cupy.resize(codes, size).reshape(layout.pool_shape(num_blocks))
    pool = cupy.resize(codes, size).reshape(num_blocks, layout.block_stride_bytes)
    scales = pool.shape[1] - layout.data_section_bytes
    pool[:, layout.data_section_bytes :] = cupy.random.randint(40, 64, (num_blocks, scales), dtype=cupy.uint8)
    return pool


def _tables(num_blocks: int, counts: Sequence[int], rotations: int) -> list[Any]:
    """Disjoint random block tables, one for each rotation."""
    import cupy

    order = cupy.random.permutation(num_blocks).astype(cupy.int32)
    tables, used = [], 0
    for _ in range(rotations):
        table = cupy.full((len(counts), max(counts)), -1, cupy.int32)
        for seq, count in enumerate(counts):
            table[seq, :count] = order[used : used + count]
            used += count
        tables.append(table)
    return tables


def _relative_error(
    layout: CacheLayout, k_pool: Any, v_pool: Any, table: Any, load: Load, q: Any, output: Any
) -> float:
    """Largest relative L2 error to float64 of the first, a middle and the last sequence."""
    worst = 0.0
    for seq in sorted({0, len(load.seq_lens) // 2, len(load.seq_lens) - 1}):
        length = load.seq_lens[seq]
        ids = table[seq, : -(-length // layout.block_size)]
        k, v = (
            decode_pool(pool[ids].get(), layout).reshape(-1, layout.num_kv_heads, layout.head_dim)[:length]
            for pool in (k_pool, v_pool)
        )
        query, got = (
            (x[seq].get().astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (q, output)
        )
        expected, _ = attention_float64(query, k, v, layout.head_dim**-0.5)
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        worst = max(worst, error) if error == error else math.inf
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a result was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--formats", default="bf16,fp8,nvfp4")
    parser.add_argument("--set", choices=("table", "long", "all"), default="table")
    options = parser.parse_args(arguments)
    import cupy

    gpu = CupyBackend()
    stream = cupy.cuda.Stream(non_blocking=True)
    limits = ceiling.measure(gpu, stream)
    read, copy = limits["read_bytes_per_us"] / 1e6, limits["copy_bytes_per_us"] / 1e6
    print(f"read {read:.3f} TB/s, copy {copy:.3f} TB/s")
    bench = Bench(gpu, stream)
    loads = {"table": TABLE, "long": LONG, "all": (*TABLE, *LONG)}[options.set]
    rows, wrong = [], 0
    for fmt in (f for f in FORMATS if f.name in options.formats.split(",")):
        for load in sorted(loads, key=lambda x: (x.num_kv_heads, x.head_dim, x.block_size)):
            row = bench.run(fmt, load)
            row["share_of_ceiling"] = row["bytes_per_us"] / limits["read_bytes_per_us"]
            rows.append(row)
            wrong += not row["relative_error"] < 5e-3
            print(
                f"{row['format']:6} {row['load']:34} {row['median_us']:8.1f} us ({row['min_us']:.1f} to "
                f"{row['max_us']:.1f})  {row['bytes_per_us'] / 1e6:.3f} TB/s  "
                f"{100 * row['share_of_ceiling']:.1f}%  error {row['relative_error']:.1e}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"ceiling": limits, "rows": rows}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
