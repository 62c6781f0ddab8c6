"""FlashInfer's paged decode over the same loads, timed as ours is: the peer that the tables compare with.

A process of its own (`python -m benchmarks.peer`), because it needs PyTorch. Paths: "fa2" is
`BatchDecodeWithPagedKVCacheWrapper` on tensor cores, "xqa" is `xqa_batch_decode_with_kv_cache`; the best of
a format's paths is what counts. Its modules are compiled by nvcc first, all at the same time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.loads import POOL_BYTES, TABLE, Load, pool_blocks, rotations
from benchmarks.timing import Launch, graph_time
from cupaged.formats import FORMATS, CacheFormat

PATHS = {"bf16": ("fa2", "xqa"), "fp8": ("fa2", "xqa"), "nvfp4": ("fa2",)}
WORKSPACE_BYTES = 256 << 20
BUILD_SECONDS = 280
BUILD_JOBS = "4"  # compilers of each module; all modules are built at once

Row = dict[str, Any]


def missing() -> str | None:
    """Why the peer cannot be measured here, or None."""
    for name in ("torch", "flashinfer"):
        if importlib.util.find_spec(name) is None:
            return f"not measured: no module {name}"
    return None


class TorchEngine:
    """Events and graphs of PyTorch, on its current stream."""

    def elapsed_us(self, work: Launch) -> float:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end))

    def capture(self, work: Launch) -> Launch:
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class Pools:
    """The pools of a format and a number of KV heads, made once."""

    def __init__(self) -> None:
        self._key: tuple[str, int, int] | None = None
        self._made: tuple[Any, Any] = (None, None)

    def get(self, fmt: CacheFormat, load: Load, num_blocks: int) -> tuple[Any, Any]:
        """(K, V), and for NVFP4 their scales or else None."""
        import torch

        key = (fmt.name, load.num_kv_heads, num_blocks)
        if key != self._key:
            self._key, self._made = None, (None, None)
            torch.cuda.empty_cache()
            self._made = _random_pools(fmt, (num_blocks, load.block_size, load.num_kv_heads), load.head_dim)
            self._key = key
        return self._made


def _random_pools(fmt: CacheFormat, rows: tuple[int, ...], head_dim: int) -> tuple[Any, Any]:
    import torch

    def codes(width: int) -> Any:
        return torch.randint(0, 256, (*rows, width), device="cuda", dtype=torch.uint8)

    if fmt.name == "bf16":
        shape = (*rows, head_dim)
        return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)), None
    if fmt.name == "fp8":  # exponents 5 to 8, as ours
        pair = tuple(((codes(head_dim) & 0x9F) + 40).view(torch.float8_e4m3fn) for _ in range(2))
        return pair, None
    scales = tuple((codes(head_dim // 16) % 24 + 40).view(torch.float8_e4m3fn) for _ in range(2))
    return (codes(head_dim // 2), codes(head_dim // 2)), scales


def _tables(load: Load, num_blocks: int) -> list[Any]:
    """Disjoint random block tables ``[num_seqs, blocks]`` of a batch of equal lengths."""
    import torch

    needed, shape = sum(load.block_counts), (len(load.seq_lens), max(load.block_counts))
    order = torch.randperm(num_blocks, device="cuda").to(torch.int32)
    count = rotations(needed, num_blocks)
    return [order[i * needed : (i + 1) * needed].reshape(shape).contiguous() for i in range(count)]


def _fa2_calls(
    fmt: CacheFormat, load: Load, q: Any, out: Any, pools: tuple[Any, Any], tables: Sequence[Any]
) -> tuple[list[Launch], float]:
    """Calls, and milliseconds of host time that a plan takes."""
    import flashinfer
    import torch

    num_seqs, blocks = tables[0].shape
    kinds = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")  # calls follow one another
    indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((num_seqs,), load.block_size, dtype=torch.int32, device="cuda")
    extras = {} if pools[1] is None else {"kv_cache_sf": pools[1]}
    calls: list[Launch] = []
    plans = []
    for table in tables:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=torch.zeros_like(indptr),
            paged_kv_indices_buffer=torch.zeros(table.numel(), dtype=torch.int32, device="cuda"),
            paged_kv_last_page_len_buffer=torch.zeros_like(last),
        )  # fmt: skip
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrapper.plan(
            indptr, table.reshape(-1), last, load.num_q_heads, load.num_kv_heads, load.head_dim,
            load.block_size, q_data_type=torch.bfloat16, kv_data_type=kinds[fmt.name],
        )  # fmt: skip
        torch.cuda.synchronize()
        plans.append(1e3 * (time.perf_counter() - begin))
        calls.append(lambda w=wrapper: w.run(q, pools[0], out=out, **extras))
    return calls, float(np.median(plans))


def _xqa_calls(
    load: Load, q: Any, out: Any, pools: tuple[Any, Any], tables: Sequence[Any]
) -> tuple[list[Launch], float]:
    import torch
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    lengths = torch.tensor(load.seq_lens, dtype=torch.int32, device="cuda").view(torch.uint32)
    scale = 1 / math.sqrt(load.head_dim)

    def call(table: Any) -> None:
        xqa_batch_decode_with_kv_cache(
            q, pools[0], workspace, table, lengths, max(load.seq_lens), bmm1_scale=scale, bmm2_scale=1.0,
            out=out,
        )  # fmt: skip

    return [lambda t=t: call(t) for t in tables], 0.0


def measure(pools: Pools, fmt: CacheFormat, load: Load, path: str) -> Row:
    """A row: time in a graph, error to float64 of the first sequence (None for NVFP4, whose scales it may
    order otherwise)."""
    import torch

    torch.manual_seed(0)
    layout = load.layout(fmt)
    num_blocks = pool_blocks(layout, sum(load.block_counts), POOL_BYTES)
    made = pools.get(fmt, load, num_blocks)
    tables = _tables(load, num_blocks)
    q = torch.randn(len(load.seq_lens), load.num_q_heads, load.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, math.nan)
    if path == "fa2":
        calls, plan_ms = _fa2_calls(fmt, load, q, out, made, tables)
    else:
        calls, plan_ms = _xqa_calls(load, q, out, made, tables)
    calls[0]()
    torch.cuda.synchronize()
    error = None if fmt.name == "nvfp4" else _relative_error(load, q[0], made[0], tables[0][0], out[0])
    result = graph_time(TorchEngine(), calls)
    num_bytes = load.bytes_read(fmt)
    return {
        **asdict(result),
        "bytes": num_bytes,
        "bytes_per_us": num_bytes / result.median_us,
        "plan_ms": plan_ms,
        "relative_error": error,
        "tables": len(calls),
    }


def _relative_error(load: Load, q: Any, pools: Any, table: Any, out: Any) -> float:
    """Relative L2 error to float64 of one sequence, a KV head at a time."""
    import torch

    ratio = load.num_q_heads // load.num_kv_heads
    ids = table.long()
    expected = []
    for head in range(load.num_kv_heads):
        k, v = (
            _bytes(pool)[ids, :, head]
            .contiguous()
            .view(pool.dtype)
            .reshape(-1, load.head_dim)
            .float()
            .double()[: load.seq_lens[0]]
            for pool in pools
        )
        rows = q[head * ratio : (head + 1) * ratio].double()
        expected.append(torch.softmax(rows @ k.T / math.sqrt(load.head_dim), dim=-1) @ v)
    right = torch.cat(expected)
    return float(torch.linalg.norm(out.double() - right) / torch.linalg.norm(right))


def _bytes(pool: Any) -> Any:
    """One-byte types as uint8, which everything can index."""
    import torch

    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


def cases() -> list[tuple[CacheFormat, Load, str]]:
    """The table's loads, those that share pools one after the other."""
    return [
        (fmt, load, path)
        for fmt in FORMATS
        for load in sorted(TABLE, key=lambda x: x.num_kv_heads)
        for path in PATHS[fmt.name]
    ]


def modules() -> list[tuple[str, str, int]]:
    """Format, path and KV heads of one case of each module that is compiled: an xqa module serves one GQA
    ratio, an fa2 module all."""
    found: dict[tuple[str, str, int], tuple[str, str, int]] = {}
    for fmt, load, path in cases():
        ratio = load.num_q_heads // load.num_kv_heads if path == "xqa" else 0
        found.setdefault((fmt.name, path, ratio), (fmt.name, path, load.num_kv_heads))
    return list(found.values())


class Build:
    """Every module being compiled, each by a process that calls it once, behind whatever else runs.

    What a process prints goes to a file, as nobody reads a pipe meanwhile.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._running = [(" ".join(map(str, module)), *self._start(module)) for module in modules()]

    @staticmethod
    def _start(module: tuple[str, str, int]) -> tuple[subprocess.Popen[bytes], Any]:
        log = tempfile.TemporaryFile()  # noqa: SIM115
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        command = [*nice, sys.executable, "-m", "benchmarks.peer", "--build-one", *map(str, module)]
        environment = {"MAX_JOBS": BUILD_JOBS, **os.environ}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment), log

    def stop(self) -> None:
        """End what still runs; its modules will not be used."""
        for _, process, log in self._running:
            process.kill()
            process.wait()
            log.close()

    def finish(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait for them. Returns seconds and what failed; a module that takes too long is ended."""
        failed = {}
        for name, process, log in self._running:
            message = ""
            try:
                process.wait(timeout=max(1.0, BUILD_SECONDS - (time.monotonic() - self._begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                message = "\ntook too long"
            log.seek(0)
            if process.returncode:
                failed[name] = log.read().decode(errors="replace")[-1500:] + message
            log.close()
            say(f"peer module {name}: {'failed' if process.returncode else 'compiled'}")
        return {"seconds": round(time.monotonic() - self._begin, 1), "failed": failed}


def _build_one(fmt_name: str, path: str, num_kv_heads: int) -> None:
    """Compile a module by using it, on a load of a few blocks."""
    import torch

    fmt = next(f for f in FORMATS if f.name == fmt_name)
    load = Load(32, num_kv_heads, 128, 16, (256,))
    made = _random_pools(fmt, (16, 16, num_kv_heads), 128)
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    tables = [torch.arange(16, dtype=torch.int32, device="cuda").reshape(1, 16)]
    if path == "fa2":
        calls, _ = _fa2_calls(fmt, load, q, out, made, tables)
    else:
        calls, _ = _xqa_calls(load, q, out, made, tables)
    calls[0]()
    torch.cuda.synchronize()


def run(json_path: Path) -> int:
    """Measure every case; failures become rows with a message."""
    import flashinfer
    import torch

    rows: list[Row] = []
    output = {"versions": {"flashinfer": flashinfer.__version__, "torch": torch.__version__}, "rows": rows}
    pools = Pools()
    with torch.cuda.stream(torch.cuda.Stream()):
        for fmt, load, path in cases():
            labels = {"load": load.label, "format": fmt.name, "path": path}
            try:
                row = {**labels, **measure(pools, fmt, load, path)}
            except Exception as error:  # a path that fails is a result, and others must still be measured
                row = {**labels, "message": f"{type(error).__name__}: {error}"[:400]}
            rows.append(row)
            print(f"flashinfer {report.line(row)}", flush=True)
            json_path.write_text(json.dumps(output, indent=1) + "\n")
    return 0


def main() -> int:
    """Exit status 1 where the peer is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--build", action="store_true", help="compile all modules and measure nothing")
    parser.add_argument(
        "--build-one", nargs=3, metavar=("FORMAT", "PATH", "KV_HEADS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    reason = missing()
    if reason:
        print(reason)
        return 1
    if options.build_one:
        fmt, path, heads = options.build_one
        _build_one(fmt, path, int(heads))
        return 0
    if options.build:
        return int(bool(Build().finish(print)["failed"]))
    return run(options.json or Path("peer.json"))


if __name__ == "__main__":
    sys.exit(main())
