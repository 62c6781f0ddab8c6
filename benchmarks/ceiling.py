"""What the memory gives: read-only and copy bandwidth, measured the same way as everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.timing import graph_time
from cupaged import CupyBackend, KernelLaunch

SOURCE = Path(__file__).parent / "ceiling.cu"
THREADS = 256
VECTORS = 4


def measure(gpu: CupyBackend, stream: Any, num_bytes: int = 1 << 32) -> dict[str, float]:
    """Bytes a microsecond read, and read plus written by a copy, over a buffer of random bytes."""
    import cupy

    chunk = cupy.random.randint(0, 256, (1 << 27) + 77, dtype=cupy.uint8)
    data = cupy.resize(chunk, num_bytes)
    target = cupy.empty(num_bytes // 2, cupy.uint8)
    sink = cupy.zeros(1, cupy.uint32)
    handle = stream.ptr
    grid = [gpu.num_sms * 4, 1, 1]
    read_kernel, copy_kernel = gpu.kernel(SOURCE, "read_all"), gpu.kernel(SOURCE, "copy_all")

    def read() -> None:
        launch = KernelLaunch(gpu, read_kernel).grid(grid).block([THREADS, 1, 1])
        launch.arg_ptr(data).arg_u64(num_bytes // 16).arg_ptr(sink).launch(handle)

    def copy() -> None:
        launch = KernelLaunch(gpu, copy_kernel).grid(grid).block([THREADS, 1, 1])
        launch.arg_ptr(data).arg_ptr(target).arg_u64(num_bytes // 32).launch(handle)

    cupy.cuda.Device().synchronize()
    return {
        "read_bytes_per_us": num_bytes / graph_time(stream, [read]).median_us,
        "copy_bytes_per_us": num_bytes / graph_time(stream, [copy]).median_us,
    }
