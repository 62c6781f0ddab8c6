"""How long a kernel takes to compile, to load from the disk cache, and from a folder of `cupaged.ahead`.

NVRTC keeps what it compiled in CUDA's own cache, which outlives the package's. It is off where compiling is
timed: that figure is of a machine that has never seen the kernel.

A name like "Decoder bf16" stands for the construction of a `Decoder`: its kernels, for batches large and
small, and its workspace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPEC = {"head_dim": 128, "gqa_ratio": 4, "num_kv_heads": 8, "block_size": 16}
FORMAT_NAMES = ("bf16", "fp8", "nvfp4")
DECODER = "Decoder "
NO_CUDA_CACHE = {"CUDA_CACHE_DISABLE": "1"}  # NVRTC and the driver obey it
MODULES = (
    *(f"paged_decode_attn_{name}" for name in FORMAT_NAMES),
    *(f"{DECODER}{name}" for name in FORMAT_NAMES),
)


def _layout(module: str) -> Any:
    from cupaged.formats import CacheLayout, cache_format

    return CacheLayout(cache_format(module.removeprefix(DECODER)), 8, 128, 16)


def _spec(module: str) -> dict[str, int]:
    return {**SPEC, **({"joined": 1} if module.endswith("nvfp4") else {})}


def save_ahead(module: str, folder: str) -> None:
    """Compile what `one_process` loads into a folder, for this GPU."""
    from cupaged import CupyBackend, ahead

    kernels = ahead.KernelSet()
    if module.startswith(DECODER):
        kernels.add_decoder(_layout(module), 32, max_seqs=64)
    else:
        kernels.add_kernel(module, module, **_spec(module))
    kernels.save(folder, [CupyBackend().arch])


def one_process(module: str, folder: str | None = None) -> float:
    """Seconds from handle to loaded kernel, in this process, with whatever is in the cache or the folder."""
    from cupaged import CupyBackend, ahead
    from cupaged.decode import Decoder

    if folder:
        ahead.load(folder)
    gpu = CupyBackend()
    gpu.zeros(1, "float32")  # the context is not the kernel's business
    if module.startswith(DECODER):
        layout = _layout(module)
        begin = time.perf_counter()
        Decoder(gpu, layout, 32, 64)
        return time.perf_counter() - begin
    handle = gpu.kernel(module, module)
    begin = time.perf_counter()
    handle.warm(**_spec(module))
    return time.perf_counter() - begin


def measure(module: str) -> dict[str, float | str]:
    """Cold, from disk, and from a folder compiled ahead with an empty cache: each in a process of its own."""

    def run(cache: Path, *options: str, **changes: str) -> str:
        command = [sys.executable, "-m", "tools.jit_times", "--one", module, *options]
        environment = {**os.environ, "CUPAGED_CACHE_DIR": str(cache), **changes}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        used, empty, kernels = (Path(folder) / name for name in ("used", "empty", "kernels"))
        cold = float(run(used, **NO_CUDA_CACHE))
        disk = float(run(used))
        run(used, "--save", str(kernels))
        ahead = float(run(empty, "--load", str(kernels)))
    times = {"cold_ms": cold, "from_disk_ms": disk, "ahead_ms": ahead}
    return {"module": module, **{name: round(1e3 * seconds, 1) for name, seconds in times.items()}}


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    for name in ("--one", "--save", "--load"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one and options.save:
        save_ahead(options.one, options.save)
        return 0
    if options.one:
        print(one_process(options.one, options.load))
        return 0
    rows = [measure(module) for module in MODULES]
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
