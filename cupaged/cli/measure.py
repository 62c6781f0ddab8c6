"""Times `Decoder` for one shape: pools of random finite values, disjoint block tables, CUDA graphs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout

Launch = Callable[[], object]

_TILE_BYTES = 1 << 24  # of random bytes, repeated over a pool
_GRAPH_US = 1500.0  # least length of a graph: what launching it costs is then below 1 %
_MAX_LAUNCHES = 2048
_CACHE_MULTIPLE = 8  # K and V of all tables together, in sizes of the GPU's L2 cache
# Bits to keep and to set in each byte or pair of them, so that every value is finite: BF16 of magnitude 0.5
# to 2, E4M3 of 1 to 2, and both nibbles and scales of NVFP4 positive.
_BITS = {"bf16": (0x80FF, 0x3F00), "fp8": (0x87, 0x38), "nvfp4": (0x77, 0)}


@dataclass(frozen=True)
class Shape:
    """What is decoded.

    Attributes:
        format: of the cache.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: values of a head.
        block_size: tokens of a block.
        num_seqs: sequences of a batch.
        length: tokens of each.
        query_tokens: tokens decoded of each.
        heads_first: HND blocks.
    """

    format: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_seqs: int
    length: int
    query_tokens: int = 1
    heads_first: bool = False

    def label(self) -> str:
        """A short name, for progress."""
        return f"{self.format} {self.num_seqs} x {self.length:,}"


@dataclass(frozen=True)
class Row:
    """One measurement: microseconds of a decode, over the replays of a graph.

    Attributes:
        shape: what was decoded.
        kv_bytes: K and V that a decode reads.
        median_us, min_us, max_us: over the replays.
        launches: decodes in the graph.
        tables: disjoint sets of blocks that they take in turn, so that no cache stays warm.
    """

    shape: Shape
    kv_bytes: int
    median_us: float
    min_us: float
    max_us: float
    launches: int
    tables: int

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of K and V a second."""
        return self.kv_bytes / self.median_us / 1e3

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        content = asdict(self)
        return {**content.pop("shape"), **content, "gb_per_s": self.gb_per_s}


class Clock:
    """Runs work on a backend and says how long it took.

    On a GPU, work is captured into a graph of a stream of its own and timed between events; the emulator runs
    launches one by one, and its times say nothing about a GPU.
    """

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.is_real = gpu.name == "cupy"
        self.l2_bytes = 0
        self._cupy: Any = None
        self.stream: Any = gpu.null_stream()
        if self.is_real:
            import cupy

            self._cupy = cupy
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.l2_bytes = int(cupy.cuda.runtime.getDeviceProperties(gpu.device)["l2CacheSize"])

    def free_bytes(self) -> int:
        """Free memory of the device, what CuPy keeps for later included; on the emulator a GiB."""
        if not self.is_real:
            return 1 << 30
        self._cupy.get_default_memory_pool().free_all_blocks()
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def samples_us(self, calls: list[Launch], replays: int) -> tuple[list[float], int]:
        """Microseconds a call in each replay, the first left out, and how many calls a replay has."""
        for call in calls:
            call()
        count = len(calls)
        while True:
            replay = self._recorded(calls, count)
            replay()
            length = self._elapsed_us(replay)
            if not self.is_real or length >= _GRAPH_US or count >= _MAX_LAUNCHES:
                break
            growth = math.ceil(1.1 * _GRAPH_US / max(length, 1.0))
            count = min(count * max(2, growth), max(_MAX_LAUNCHES, len(calls)))
        return [self._elapsed_us(replay) / count for _ in range(replays + 1)][1:], count

    def _recorded(self, calls: list[Launch], count: int) -> Launch:
        def work() -> None:
            for i in range(count):
                calls[i % len(calls)]()

        if not self.is_real:
            return work
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def _elapsed_us(self, work: Launch) -> float:
        if not self.is_real:
            begin = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begin)
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return 1e3 * float(self._cupy.cuda.get_elapsed_time(start, end))


def measure(clock: Clock, layout: CacheLayout, shape: Shape, replays: int) -> Row:
    """Time one shape.

    Args:
        clock: of the backend.
        layout: of both pools, as the shape says.
        shape: what to decode.
        replays: of the graph.

    Raises:
        CupagedError: a shape that is not supported.
    """
    gpu = clock.gpu
    decoder = Decoder(gpu, layout, shape.num_q_heads, shape.num_seqs, query_tokens=shape.query_tokens)
    columns = -(-shape.length // shape.block_size)
    blocks = shape.num_seqs * columns
    num_tables = _num_tables(clock, 2 * blocks * layout.block_stride_bytes)
    rng = np.random.default_rng(0)
    ids = rng.permutation(num_tables * blocks).astype(np.int32).reshape(num_tables, shape.num_seqs, columns)
    k_pool, v_pool = (_pool(gpu, layout, num_tables * blocks, rng) for _ in range(2))
    per_seq = () if shape.query_tokens == 1 else (shape.query_tokens,)
    rows = (shape.num_seqs, *per_seq, shape.num_q_heads, shape.head_dim)
    q = gpu.asarray(_finite(rng, "bf16", math.prod(rows)).reshape(rows))
    output = gpu.empty(rows, np.uint16)
    lengths = gpu.asarray(np.full(shape.num_seqs, shape.length, np.int32))
    scales: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0} if shape.format == "fp8" else {}

    def call_of(table: Any) -> Launch:
        return lambda: decoder.decode(
            q, k_pool, v_pool, table, lengths, output,
            num_seqs=shape.num_seqs, max_blocks_per_seq=columns, stream=clock.stream, **scales,
        )  # fmt: skip

    calls = [call_of(gpu.asarray(table)) for table in ids]
    gpu.synchronize()
    samples, launches = clock.samples_us(calls, replays)
    kv_bytes = 2 * shape.num_seqs * shape.length * layout.bytes_per_token
    return Row(
        shape, kv_bytes, statistics.median(samples), min(samples), max(samples), launches, num_tables
    )  # fmt: skip


def _num_tables(clock: Clock, load_bytes: int) -> int:
    """Tables whose blocks are much larger than the GPU's L2 cache together, and fit into its memory."""
    room = int(0.9 * clock.free_bytes())
    if load_bytes > room:
        raise ArgumentValueError(
            f"seqs, length: K and V take {load_bytes:,} bytes, there is room for {room:,}"
        )
    wanted = math.ceil(_CACHE_MULTIPLE * clock.l2_bytes / load_bytes)
    return max(1, min(wanted, room // load_bytes))


def _finite(rng: np.random.Generator, name: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
    keep, put = _BITS[name]
    dtype = np.uint16 if name == "bf16" else np.uint8
    found: np.ndarray[Any, np.dtype[Any]] = (
        rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, count, dtype) & dtype(keep)
    ) | dtype(put)
    return found


def _pool(gpu: Any, layout: CacheLayout, num_blocks: int, rng: np.random.Generator) -> Any:
    """A pool of random finite values, in the dtype of the bit patterns."""
    dtype = np.uint16 if layout.format.name == "bf16" else np.uint8
    pool = gpu.empty(layout.pool_shape(num_blocks), dtype)
    flat = pool.reshape(-1)
    size = min(flat.size, _TILE_BYTES // np.dtype(dtype).itemsize)
    tile = gpu.asarray(_finite(rng, layout.format.name, size))
    for begin in range(0, flat.size, size):
        part = flat[begin : begin + size]
        part[...] = tile[: part.size]
    return pool
