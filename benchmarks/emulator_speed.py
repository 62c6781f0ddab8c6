"""How fast the emulator is on this machine, and how much slower its check mode is."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from cupaged.backends.emulator import EmulatorBackend
from cupaged.decode import Decoder
from cupaged.formats import FORMATS, NVFP4, CacheFormat, CacheLayout
from cupaged.launch import KernelLaunch
from cupaged.ops import reshape_and_cache_nvfp4

# Kernels of its own, so that the figures say nothing of the package's.
_SOURCE = """
#include "ptx.cuh"
extern "C" __global__ void empty_kernel() {}
extern "C" __global__ void multiply(float* out, u32 count) {
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const u32 one = 0x3c003c00u;
  for (u32 i = 0; i < count; i++) ptx::mma_m16n8k16_f16(c, one, one, one, one, one, one);
  out[threadIdx.x] = c[0];
}
extern "C" __global__ void shuffle(u32* out, u32 count) {
  u32 value = threadIdx.x;
  for (u32 i = 0; i < count; i++) value += __shfl_xor_sync(FULL_WARP, value, 1);
  out[threadIdx.x] = value;
}
extern "C" __global__ void barrier(u32* out, u32 count) {
  for (u32 i = 0; i < count; i++) __syncthreads();
  out[threadIdx.x] = count;
}
"""


def best_seconds(work: Callable[[], None], repeats: int) -> float:
    """The shortest of several runs, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_per_operation(gpu: EmulatorBackend, path: Path, entry: str, threads: int, repeats: int) -> float:
    """Seconds of one operation that all threads of a block take part in."""
    count = 5000
    kernel = gpu.kernel(path, entry)
    out = gpu.zeros(threads, np.uint32)

    def work() -> None:
        launch = KernelLaunch(gpu, kernel).grid([1, 1, 1]).block([threads, 1, 1])
        launch.arg_ptr(out).arg_u32(count).launch(0)

    return best_seconds(work, repeats) / count


def launch_seconds(gpu: EmulatorBackend, path: Path, blocks: int, threads: int, repeats: int) -> float:
    """Seconds of a launch that does nothing."""
    kernel = gpu.kernel(path, "empty_kernel")
    return best_seconds(
        lambda: KernelLaunch(gpu, kernel).grid([blocks, 1, 1]).block([threads, 1, 1]).launch(0), repeats
    )


def decode_seconds(gpu: EmulatorBackend, seq_len: int, repeats: int) -> float:
    """Seconds of BF16 decode attention: 1 sequence, 8 query and 2 KV heads of 128, blocks of 16 tokens."""
    rng = np.random.default_rng(0)
    num_blocks, block_size, head_dim = -(-seq_len // 16), 16, 128
    q, k_cache, v_cache = (
        gpu.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
        for shape in ((1, 8, head_dim), *2 * ((num_blocks, block_size, 2, head_dim),))
    )
    tables = gpu.asarray(rng.permutation(num_blocks).astype(np.int32)[None])
    lengths = gpu.asarray(np.array([seq_len], np.int32))
    output = gpu.empty((1, 8, head_dim), ml_dtypes.bfloat16)
    kernel = gpu.kernel("paged_decode_attn_bf16", "paged_decode_attn_bf16")

    def work() -> None:
        launch = KernelLaunch(gpu, kernel)
        for array in (q, k_cache, v_cache, output, tables, lengths):
            launch.arg_ptr(array)
        for number in (num_blocks, 1, 8, 2, head_dim, block_size):
            launch.arg_u32(number)
        launch.arg_f32(1 / math.sqrt(head_dim)).arg_u32(8 * head_dim).arg_u32(0).arg_u32(num_blocks)
        launch.launch(0)

    return best_seconds(work, repeats)


def write_seconds(gpu: EmulatorBackend, repeats: int) -> float:
    """Seconds of writing 65,536 groups to an NVFP4 cache: K and V of 512 tokens, 8 KV heads of 128."""
    tokens = np.random.default_rng(0).standard_normal((512, 8, 128)).astype(ml_dtypes.bfloat16)
    layout = CacheLayout(NVFP4, num_kv_heads=8, head_dim=128, block_size=16)
    pools = [gpu.zeros(layout.pool_shape(32), layout.pool_dtype) for _ in range(2)]
    key, value, slots = gpu.asarray(tokens), gpu.asarray(tokens), gpu.asarray(np.arange(512))
    kernel = gpu.kernel("reshape_and_cache_nvfp4", "reshape_and_cache_nvfp4")
    sizes = (512, 8, 128, 16, 8 * 128, 8 * 128, layout.block_stride_bytes, layout.data_section_bytes)
    return best_seconds(
        lambda: reshape_and_cache_nvfp4(gpu, kernel, key, value, *pools, slots, *sizes, 0), repeats
    )


def planned_seconds(gpu: EmulatorBackend, fmt: CacheFormat, repeats: int) -> float:
    """Seconds of one `Decoder` launch: 4 sequences, 8 query and 2 KV heads of 128, blocks of 16 tokens."""
    seq_lens = [1000, 1, 300, 17]
    layout = CacheLayout(fmt, num_kv_heads=2, head_dim=128, block_size=16)
    width = -(-max(seq_lens) // 16)
    q = gpu.asarray(np.random.default_rng(0).standard_normal((4, 8, 128)).astype(ml_dtypes.bfloat16))
    k_cache, v_cache = (gpu.zeros(layout.pool_shape(4 * width), layout.pool_dtype) for _ in range(2))
    tables = gpu.asarray(np.arange(4 * width, dtype=np.int32).reshape(4, width))
    lengths = gpu.asarray(np.array(seq_lens, np.int32))
    output = gpu.empty(q.shape, ml_dtypes.bfloat16)
    decoder = Decoder(gpu, layout, 8, 4)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if fmt.needs_scale else {}
    return best_seconds(
        lambda: decoder.decode(
            q,
            k_cache,
            v_cache,
            tables,
            lengths,
            output,
            num_seqs=4,
            max_blocks_per_seq=width,
            stream=0,
            **scales,
        ),
        repeats,
    )


def check_ratios(seq_len: int, repeats: int) -> dict[str, float]:
    """How many times as long launches take in check mode; fast mode on one OS thread too."""
    fast, checking = EmulatorBackend(), EmulatorBackend(check="full")
    cases: dict[str, Callable[[EmulatorBackend], float]] = {
        "write_nvfp4_65536_groups": lambda gpu: write_seconds(gpu, repeats),
        f"decode_bf16_{seq_len}_tokens": lambda gpu: decode_seconds(gpu, seq_len, repeats),
    }
    for fmt in FORMATS:
        cases[f"planned_decode_{fmt.name}"] = lambda gpu, fmt=fmt: planned_seconds(gpu, fmt, repeats)
    return {f"check_ratio_{name}": case(checking) / case(fast) for name, case in cases.items()}


def compile_seconds() -> dict[str, float]:
    """Seconds to compile the runtime with a first small kernel, then the decode kernel, in an empty cache."""
    previous = os.environ.get("CUPAGED_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUPAGED_CACHE_DIR"] = folder
        try:
            gpu = EmulatorBackend()
            start = time.perf_counter()
            gpu.kernel("bf16_absmax", "bf16_absmax").warm()
            middle = time.perf_counter()
            gpu.kernel("paged_decode_attn_bf16", "paged_decode_attn_bf16").warm(
                head_dim=128, gqa_ratio=4, num_kv_heads=2, block_size=16
            )
            return {
                "compile_runtime_and_first_kernel_s": middle - start,
                "compile_decode_kernel_s": time.perf_counter() - middle,
            }
        finally:
            if previous is None:
                del os.environ["CUPAGED_CACHE_DIR"]
            else:
                os.environ["CUPAGED_CACHE_DIR"] = previous


def measure(gpu: EmulatorBackend, seq_len: int, repeats: int) -> dict[str, float]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.cu"
        path.write_text(_SOURCE)
        return {
            "launch_256_threads_us": 1e6 * launch_seconds(gpu, path, 1, 256, repeats),
            "launch_100000_blocks_of_32_s": launch_seconds(gpu, path, 100_000, 32, repeats),
            "mma_m16n8k16_us": 1e6 * seconds_per_operation(gpu, path, "multiply", 32, repeats),
            "warp_shuffle_us": 1e6 * seconds_per_operation(gpu, path, "shuffle", 32, repeats),
            "barrier_256_threads_us": 1e6 * seconds_per_operation(gpu, path, "barrier", 256, repeats),
            f"decode_bf16_{seq_len}_tokens_ms": 1e3 * decode_seconds(gpu, seq_len, repeats),
            **check_ratios(seq_len, repeats),
            **compile_seconds(),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of the decode case")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each case, of which the best counts")
    parser.add_argument("--workers", type=int, default=1, help="OS threads over blocks")
    parser.add_argument("--schedule", choices=("fifo", "reverse", "random"), default="fifo")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    gpu = EmulatorBackend(schedule=options.schedule, workers=options.workers)
    figures = measure(gpu, options.seq_len, options.repeats)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:40} {value:10.3f}")


if __name__ == "__main__":
    main()
