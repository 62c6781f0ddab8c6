"""How far the emulator and a GPU are apart, kernel by kernel, on the same inputs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import CupyBackend, EmulatorBackend, ops
from cupaged.decode import Decoder
from cupaged.formats import BF16, FORMATS, CacheFormat, CacheLayout
from tests.kernels import test_absmax, test_tiled_formats
from tests.oracle import bf16_ulp
from tests.poison import Shape, random_case, with_gaps
from tests.rig import Rig, run_reduce, run_single, run_split, upload_case

Arrays = list[npt.NDArray[Any]]
SHAPE = Shape(8, 2, 128, 16)
LENGTHS = [1, 100, 37, 260, 1000]


def write(rig: Rig, fmt: CacheFormat) -> Arrays:
    """Both pools after the writer has taken every BF16 pattern."""
    tokens = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16))
    tokens = tokens.view(ml_dtypes.bfloat16).reshape(-1, 2, 128)
    layout = CacheLayout(fmt, 2, 128, 16)
    pools = [
        rig.gpu.zeros(layout.pool_shape(16), np.uint16 if fmt.name == "bf16" else np.uint8) for _ in "kv"
    ]
    strides: tuple[int, ...] = {"bf16": (), "fp8": (layout.cache_stride,)}.get(
        fmt.name, (layout.block_stride_bytes, layout.data_section_bytes)
    )
    name = f"reshape_and_cache_{fmt.name}"
    source = rig.upload(with_gaps(tokens, 256))
    slots = rig.upload(np.arange(256, dtype=np.int64))
    scales = (0.3, 0.84210527) if fmt.name == "fp8" else ()
    getattr(ops, name)(
        rig.gpu, rig.kernel(name), source, source, *pools, slots, 256, 2, 128, 16, *scales,
        256, 256, *strides, rig.stream,
    )  # fmt: skip
    return [rig.download(pool).view(np.uint8) for pool in pools]


def single(rig: Rig, fmt: CacheFormat) -> Arrays:
    """Single-pass decode."""
    return [run_single(upload_case(rig, random_case(fmt, LENGTHS, SHAPE)))]


def split(rig: Rig, fmt: CacheFormat) -> Arrays:
    """Split-K decode and its reduction."""
    up = upload_case(rig, random_case(fmt, LENGTHS, SHAPE))
    return [run_reduce(up, run_split(up, 4), 4)]


def _through_decoder(rig: Rig, fmt: CacheFormat, **options: Any) -> Arrays:
    case = random_case(fmt, LENGTHS, SHAPE)
    up, output = upload_case(rig, case), rig.full_bf16(case.q.shape)
    decoder = Decoder(rig.gpu, case.layout, case.num_q_heads, case.num_seqs, **options)
    decoder.decode(
        up.q, up.k.array, up.v.array, up.tables, up.lengths, output, num_seqs=case.num_seqs,
        max_blocks_per_seq=case.max_blocks_per_seq, stream=rig.stream, softmax_scale=case.inv_sqrt_d,
        **({"k_scale": case.k_scale, "v_scale": case.v_scale} if fmt.name == "fp8" else {}),
    )  # fmt: skip
    return [rig.download_bf16(output)]


def planned(rig: Rig, fmt: CacheFormat) -> Arrays:
    """The decoder."""
    return _through_decoder(rig, fmt)


def chunked(rig: Rig, fmt: CacheFormat) -> Arrays:
    """The decoder with chunks of fixed size."""
    blocks = -(-max(LENGTHS) // SHAPE.block_size)
    return _through_decoder(rig, fmt, split_tokens=256, max_blocks_per_seq=blocks)


def tiled(rig: Rig, fmt: CacheFormat) -> Arrays:
    """The streaming step over tiles of three blocks, and the finalisation."""
    states = test_tiled_formats.run(rig, random_case(fmt, LENGTHS, SHAPE), 3)
    return [test_tiled_formats.finalize(rig, states)]


def absmax(rig: Rig, fmt: CacheFormat) -> Arrays:
    """Largest magnitude of 100,003 values."""
    data = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    return [np.array([test_absmax._absmax(rig, data)], np.float32)]


# Function, and the formats that it knows.
KERNELS: dict[str, tuple[Callable[[Rig, CacheFormat], Arrays], tuple[CacheFormat, ...]]] = {
    "reshape_and_cache": (write, FORMATS),
    "paged_decode_attn": (single, FORMATS),
    "paged_decode_attn_splitk + reduce": (split, FORMATS),
    "paged_decode_attn_planned": (planned, FORMATS),
    "paged_decode_attn_chunked + merge_chunks": (chunked, FORMATS),
    "paged_decode_attn_tiled + attention_finalize": (tiled, FORMATS),
    "bf16_absmax": (absmax, (BF16,)),
}


def compare(name: str, mine: Arrays, theirs: Arrays) -> dict[str, Any]:
    """Differing elements, and for BF16 the largest difference in ulp of its row's largest value."""
    differing = sum(
        int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(mine, theirs, strict=True)
    )
    result: dict[str, Any] = {"differing_bytes": differing, "bytes": sum(a.nbytes for a in mine)}
    if name not in ("reshape_and_cache", "bf16_absmax"):
        a, b = (x[0].astype(np.float64) for x in (mine, theirs))
        ulp = bf16_ulp(np.abs(a).max(axis=-1, keepdims=True))
        result["largest_difference_in_row_ulp"] = float((np.abs(a - b) / ulp).max())
    return result


def main() -> int:
    """Exit status 1 where the writers differ at all or decode by more than 2 ulp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    emulator, gpu = Rig(EmulatorBackend()), Rig(CupyBackend())
    rows, wrong = [], False
    for name, (function, formats) in KERNELS.items():
        for fmt in formats:
            row = {
                "kernel": name,
                "format": fmt.name,
                **compare(name, function(emulator, fmt), function(gpu, fmt)),
            }
            print(row)
            rows.append(row)
            wrong |= row.get("largest_difference_in_row_ulp", row["differing_bytes"]) > 2
    options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
