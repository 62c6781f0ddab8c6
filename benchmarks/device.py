"""What the measurements run on: a GPU through CuPy, or the emulator for a dry run."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.timing import CupyEngine, Engine, HostEngine, Launch, Time, graph_time
from cupaged.backends.cupy.streams import stream_of

CHUNK = (1 << 25) + 1025  # random values; no multiple of a block, so that blocks differ


@dataclass
class Device:
    """A backend, its arrays and its clock.

    Attributes:
        gpu: the backend.
        xp: CuPy, or NumPy for the emulator.
        stream: raw handle of the stream that is timed.
        engine: events and graphs of that stream.
        is_gpu: whether times mean anything.
    """

    gpu: Any
    xp: Any
    stream: int
    engine: Engine
    is_gpu: bool
    chunk: int = CHUNK

    @staticmethod
    def on_gpu() -> Device:
        """The current CUDA device, on a stream of its own."""
        import cupy

        from cupaged import CupyBackend

        stream = cupy.cuda.Stream(non_blocking=True)
        return Device(CupyBackend(), cupy, stream.ptr, CupyEngine(stream), True)

    @staticmethod
    def emulated() -> Device:
        """The emulator."""
        from cupaged import EmulatorBackend

        gpu = EmulatorBackend()
        return Device(gpu, np, gpu.null_stream(), HostEngine(), False, chunk=(1 << 16) + 1025)

    def wait(self) -> None:
        self.gpu.synchronize()

    def time(self, launches: list[Launch]) -> Time:
        """Median time of a launch in a graph (see `graph_time`); one replay on the emulator."""
        self.wait()
        if self.is_gpu:
            return graph_time(self.engine, launches)
        return graph_time(self.engine, launches, replays=2, min_us=0.0)

    def current(self) -> AbstractContextManager[Any]:
        """Makes the stream CuPy's current one."""
        return stream_of(self.stream) if self.is_gpu else nullcontext()

    def upload(self, host: npt.NDArray[Any]) -> Any:
        return self.gpu.asarray(host)

    def download(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(self.gpu.to_host(array))

    def normal_bf16(self, shape: tuple[int, ...], seed: int) -> Any:
        """Normal values as BF16 patterns, uint16."""
        count = min(self.chunk, int(np.prod(shape)))
        values = np.random.default_rng(seed).standard_normal(count, np.float32).view(np.uint32)
        return self.xp.resize(self.upload((values >> 16).astype(np.uint16)), shape)

    def normal_float16(self, shape: tuple[int, ...], seed: int) -> Any:
        """Normal values as float16."""
        values = np.random.default_rng(seed).standard_normal(int(np.prod(shape)), np.float32)
        return self.upload(values.astype(np.float16).reshape(shape))

    def random_bytes(self, shape: tuple[int, ...], seed: int, period: int | None = None) -> Any:
        """Uniform bytes, repeated after `period` of them."""
        count = min(period or 4 * self.chunk + 3, int(np.prod(shape)))
        data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
        return self.xp.resize(self.upload(data), shape)

    def free(self) -> None:
        """Give memory that nothing uses back to the driver."""
        if self.is_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()


def facts() -> dict[str, Any]:
    """The GPU, driver and versions that figures belong to."""
    import subprocess

    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "multiprocessors": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "driver": driver,
        "driver_cuda": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }
