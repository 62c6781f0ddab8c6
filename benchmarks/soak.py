"""A million launches and a hundred thousand decoders: `python -m benchmarks.soak --json F`.

Memory is sampled all the time; after a warm-up nothing may grow. Exit status 1 where something does. Figures
are bytes; the device's are those of the whole GPU, so nothing else may run on it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.commit import source_commit
from benchmarks.launchers import format_arguments
from cupaged import ops
from cupaged.decode import Decoder
from cupaged.formats import FORMATS, CacheFormat, CacheLayout

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, SEQS, WIDTH, SPLITS = 8, 2, 64, 16, 2, 4, 2
SAMPLES = 40
WARM_SAMPLES = 4  # of SAMPLES: pools and caches fill
HOST_SLACK = 4 << 20  # of an allocator's whims


def host_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def device_bytes(gpu: Any) -> int:
    """Memory in use on the whole device; 0 on the emulator, whose memory is the host's."""
    if gpu.name != "cupy":
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


class Work:
    """Small arguments of everything that decodes one cache format."""

    def __init__(self, gpu: Any, fmt: CacheFormat) -> None:
        self.gpu, self.format = gpu, fmt.name
        self.layout = CacheLayout(fmt, KV_HEADS, HEAD_DIM, BLOCK)
        self.stream = gpu.null_stream()
        rng = np.random.default_rng(0)
        q = rng.standard_normal((SEQS, Q_HEADS, HEAD_DIM)).astype(ml_dtypes.bfloat16)
        self.q, self.output = gpu.asarray(q), gpu.empty(q.shape, ml_dtypes.bfloat16)
        self.pool = gpu.zeros(self.layout.pool_shape(SEQS * WIDTH), self.layout.pool_dtype)
        self.tables = gpu.asarray(np.arange(SEQS * WIDTH, dtype=np.int32).reshape(SEQS, WIDTH))
        self.lengths = gpu.asarray(np.array([37, WIDTH * BLOCK], np.int32))
        self.workspace = gpu.empty((SEQS, Q_HEADS, SPLITS, HEAD_DIM + 2), np.float32)
        decode, reduce = f"paged_decode_attn_{self.format}", "paged_decode_attn_reduce"
        self.kernels = {
            "single": gpu.kernel(decode, decode),
            "split": gpu.kernel(decode, f"paged_decode_attn_splitk_{self.format}"),
            "reduce": gpu.kernel(reduce, f"{reduce}_{self._reduction}"),
        }
        self.scales, self.strides = format_arguments(self.layout)
        self.decoder = self.make_decoder()

    @property
    def _reduction(self) -> str:
        return "nvfp4" if self.format == "nvfp4" else "fp8"

    def make_decoder(self) -> Decoder:
        """A decoder of its own workspace."""
        return Decoder(self.gpu, self.layout, Q_HEADS, SEQS)

    def single(self) -> None:
        """One launch."""
        window = () if self.format == "nvfp4" else (0,)
        getattr(ops, f"paged_decode_attn_{self.format}")(
            self.gpu, self.kernels["single"], self.q, self.pool, self.pool, self.output, self.tables,
            self.lengths, WIDTH, SEQS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, HEAD_DIM**-0.5, *self.scales,
            Q_HEADS * HEAD_DIM, *self.strides, *window, self.stream,
        )  # fmt: skip

    def split(self) -> None:
        """Two launches."""
        window = () if self.format == "nvfp4" else (0,)
        getattr(ops, f"paged_decode_attn_splitk_{self.format}")(
            self.gpu, self.kernels["split"], self.q, self.pool, self.pool, self.workspace, self.tables,
            self.lengths, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, HEAD_DIM**-0.5, SPLITS, *self.scales,
            Q_HEADS * HEAD_DIM, *self.strides, SEQS, *window, self.stream,
        )  # fmt: skip
        getattr(ops, f"paged_decode_attn_reduce_{self._reduction}")(
            self.gpu, self.kernels["reduce"], self.workspace, self.output, self.lengths, Q_HEADS, HEAD_DIM,
            SPLITS, SEQS, self.stream,
        )  # fmt: skip

    def planned(self, decoder: Decoder | None = None) -> None:
        """One launch, through a decoder."""
        scales = {"k_scale": 1.0, "v_scale": 1.0} if self.scales else {}
        (decoder or self.decoder).decode(
            self.q, self.pool, self.pool, self.tables, self.lengths, self.output, num_seqs=SEQS,
            max_blocks_per_seq=WIDTH, stream=self.stream, **scales,
        )  # fmt: skip

    def four_launches(self) -> None:
        """Each kernel once."""
        self.single()
        self.split()
        self.planned()

    def made_and_dropped(self) -> None:
        """A decoder, which decodes once."""
        self.planned(self.make_decoder())


def soak(gpu: Any, count: int, step: Callable[[int], None], per_step: int = 1) -> dict[str, Any]:
    """Run until `count` is reached, in samples; what grew after the warm-up.

    Args:
        gpu: the backend.
        count: launches or objects in all.
        step: does `per_step` of them; gets a running number.
        per_step: how many one step does.
    """
    host, device = [], []
    steps = max(SAMPLES, -(-count // per_step))
    begin = time.perf_counter()
    busy = 0.0
    for sample in range(SAMPLES):
        start = time.perf_counter()
        for i in range(steps * sample // SAMPLES, steps * (sample + 1) // SAMPLES):
            step(i)
        busy += time.perf_counter() - start
        gpu.synchronize()
        gc.collect()
        host.append(host_bytes())
        device.append(device_bytes(gpu))
    settled = slice(WARM_SAMPLES, None)
    return {
        "count": steps * per_step,
        "seconds": round(time.perf_counter() - begin, 1),
        "host_microseconds_each": round(busy / (steps * per_step) * 1e6, 2),
        "host_bytes": host,
        "device_bytes": device,
        "host_growth": max(host[settled]) - host[WARM_SAMPLES],
        "device_growth": max(device[settled]) - device[WARM_SAMPLES],
    }


def is_flat(found: dict[str, Any]) -> bool:
    """Nothing grew: the device by no byte, the host by less than an allocator's slack."""
    return bool(found["device_growth"] <= 0 and found["host_growth"] <= HOST_SLACK)


def run(gpu: Any, launches: int, decoders: int) -> dict[str, Any]:
    """Both soaks; ``flat`` says whether memory stayed where it was."""
    works = [Work(gpu, fmt) for fmt in FORMATS]
    for work in works:
        work.four_launches()
        work.made_and_dropped()
    found = {
        "launches": soak(gpu, launches, lambda i: works[i % 3].four_launches(), per_step=4),
        "decoders": soak(gpu, decoders, lambda i: works[i % 3].made_and_dropped()),
    }
    return {"backend": gpu.name, **found, "flat": all(is_flat(part) for part in found.values())}


def main() -> int:
    """Exit status 1 where memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--decoders", type=int, default=100_000)
    parser.add_argument("--backend", choices=["cupy", "emulator"], default="cupy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.backend == "cupy":
        from cupaged.backends.cupy import CupyBackend as Backend
    else:
        from cupaged.backends.emulator import EmulatorBackend as Backend
    found = run(Backend(), options.launches, options.decoders)
    for name in ("launches", "decoders"):
        part = found[name]
        print(
            f"{name}: {part['count']:,} in {part['seconds']} s, {part['host_microseconds_each']} us each; "
            f"host grew by {part['host_growth']:,} bytes, the device by {part['device_growth']:,}"
        )
    if options.json:
        options.json.write_text(json.dumps({"commit": source_commit(), **found}, indent=1))
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
