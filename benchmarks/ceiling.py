"""What the memory gives: read and copy bandwidth, the best of several kernels, grids and the driver's copy.

A copy counts bytes read plus bytes written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.session import Row, Session, timed
from cupaged import KernelLaunch

SOURCE = Path(__file__).parent / "ceiling.cu"
NUM_BYTES = 1 << 32  # read; a copy reads and writes half of it
BULK_STAGE_BYTES = 8192
# threads a block, 16-byte vectors a thread, streaming hints
SHAPES = ((256, 4, 1), (256, 8, 1), (512, 4, 1), (1024, 4, 1), (256, 16, 1), (512, 4, 0))
WAVES = (0, 4, 8)  # blocks for each multiprocessor; 0 = a block for each step of the data


def measure(session: Session) -> None:
    """Fills session.ceiling with the best of the rows "ceiling"."""
    device = session.device
    num_bytes = NUM_BYTES // session.shrink
    data = device.random_bytes((num_bytes,), 7)
    target = device.xp.empty(num_bytes // 2, np.uint8)
    sink = device.xp.zeros(1, np.uint32)
    for kind, name, launch in (
        *_reads(session, data, sink, num_bytes),
        *_copies(session, data, target, num_bytes // 2),
    ):
        row = session.attempt(
            "ceiling",
            {"kind": kind, "kernel": name},
            lambda launch=launch: timed(device.time([launch]), num_bytes, None),
        )
        if row:
            session.ceiling[kind] = max(session.ceiling.get(kind, 0.0), row["bytes_per_us"])
    if device.is_gpu and not bool((target == data[: num_bytes // 2]).all()):
        raise RuntimeError("a copy kernel of the ceiling copies wrongly")
    for kind, best in session.ceiling.items():
        session.say(f"{kind} ceiling {best / 1e6:.3f} TB/s")


Case = tuple[str, str, Callable[[], None]]


def _reads(session: Session, data: Any, sink: Any, num_bytes: int) -> Iterator[Case]:
    gpu, stream = session.device.gpu, session.device.stream
    for threads, vectors, streaming in SHAPES[: None if session.device.is_gpu else 1]:
        kernel = gpu.kernel(str(SOURCE), "read_all", THREADS=threads, VECTORS=vectors, STREAMING=streaming)
        for waves in WAVES:
            grid = _grid(gpu.num_sms, waves, num_bytes // (16 * threads * vectors))

            def read(kernel: Any = kernel, grid: int = grid, threads: int = threads) -> None:
                launch = KernelLaunch(gpu, kernel).grid([grid, 1, 1]).block([threads, 1, 1])
                launch.arg_ptr(data).arg_u64(num_bytes // 16).arg_ptr(sink).launch(stream)

            yield "read", _name("loads", threads, vectors, streaming, waves), read
    kernel = gpu.kernel(str(SOURCE), "read_bulk", STAGE_BYTES=BULK_STAGE_BYTES)
    for waves in (4, 6):

        def read_bulk(waves: int = waves) -> None:
            launch = KernelLaunch(gpu, kernel).grid([gpu.num_sms * waves, 1, 1]).block([32, 1, 1])
            launch.arg_ptr(data).arg_u64(num_bytes // 16).arg_ptr(sink).launch(stream)

        yield "read", f"bulk copies of {BULK_STAGE_BYTES}, {waves} blocks a multiprocessor", read_bulk


def _copies(session: Session, data: Any, target: Any, num_bytes: int) -> Iterator[Case]:
    gpu, stream = session.device.gpu, session.device.stream
    for threads, vectors, streaming in SHAPES[: None if session.device.is_gpu else 1]:
        kernel = gpu.kernel(str(SOURCE), "copy_all", THREADS=threads, VECTORS=vectors, STREAMING=streaming)
        for waves in WAVES:
            grid = _grid(gpu.num_sms, waves, num_bytes // (16 * threads * vectors))

            def copy(kernel: Any = kernel, grid: int = grid, threads: int = threads) -> None:
                launch = KernelLaunch(gpu, kernel).grid([grid, 1, 1]).block([threads, 1, 1])
                launch.arg_ptr(data).arg_ptr(target).arg_u64(num_bytes // 16).launch(stream)

            yield "copy", _name("loads and stores", threads, vectors, streaming, waves), copy
    if session.device.is_gpu:
        runtime = session.device.xp.cuda.runtime

        def driver_copy() -> None:
            runtime.memcpyAsync(
                target.data.ptr, data.data.ptr, num_bytes, runtime.memcpyDeviceToDevice, stream
            )

        yield "copy", "the driver's copy", driver_copy


def _grid(num_sms: int, waves: int, steps: int) -> int:
    return steps if waves == 0 else min(steps, num_sms * waves)


def _name(what: str, threads: int, vectors: int, streaming: int, waves: int) -> str:
    grid = f"{waves} blocks a multiprocessor" if waves else "a block a step"
    hint = "" if streaming else ", no hints"
    return f"{what}, {threads} threads x {vectors} vectors, {grid}{hint}"


def best(rows: list[Row], kind: str) -> Row | None:
    """The fastest row of a kind."""
    measured = [r for r in rows if r["kind"] == kind and "bytes_per_us" in r]
    return max(measured, key=lambda r: float(r["bytes_per_us"])) if measured else None
