"""How long a kernel takes to compile, and to load from the disk cache, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = {"head_dim": 128, "gqa_ratio": 4, "block_size": 16}
MODULES = ("paged_decode_attn_bf16", "paged_decode_attn_fp8", "paged_decode_attn_nvfp4")


def one_process(module: str) -> float:
    """Seconds from handle to loaded kernel, in this process, with whatever is in the cache."""
    from cupaged import CupyBackend

    gpu = CupyBackend()
    gpu.zeros(1, "float32")  # the context is not the kernel's business
    handle = gpu.kernel(module, module)
    begin = time.perf_counter()
    handle.warm(**SPEC)
    return time.perf_counter() - begin


def measure(module: str) -> dict[str, float | str]:
    """Cold and from disk, each in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "tools.jit_times", "--one", module]
        environment = {**os.environ, "CUPAGED_CACHE_DIR": cache}
        cold, disk = (
            float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
    return {"module": module, "cold_ms": round(1e3 * cold, 1), "from_disk_ms": round(1e3 * disk, 1)}


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one_process(options.one))
        return 0
    rows = [measure(module) for module in MODULES]
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
