"""Valid arguments for every launcher: each scalar has its own value, and rows and blocks have gaps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import ops
from cupaged.handle import KernelHandle
from tests.fake_backend import FakeBackend, aligned

NUM_BLOCKS = 6
_MODULES = {
    "attention_finalize": "paged_decode_attn_tiled",
    "bf16_absmax_rows": "bf16_absmax",
    "paged_decode_attn_reduce_fp8": "paged_decode_attn_reduce",
    "paged_decode_attn_reduce_nvfp4": "paged_decode_attn_reduce",
    "paged_decode_attn_splitk_bf16": "paged_decode_attn_bf16",
    "paged_decode_attn_splitk_fp8": "paged_decode_attn_fp8",
    "paged_decode_attn_splitk_nvfp4": "paged_decode_attn_nvfp4",
}
LAUNCHERS = tuple(ops.__all__)

SCALARS: dict[str, Any] = {
    "num_seqs": 3,
    "num_tokens": 10,
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "block_size": 16,
    "max_blocks_per_seq": 5,
    "num_splits": 7,
    "inv_sqrt_d": 0.375,
    "k_scale": 0.5,
    "v_scale": 0.25,
    "sliding_window": 9,
    "q_stride": 8 * 64 + 8,
    "key_stride": 2 * 64 + 16,
    "value_stride": 2 * 64 + 24,
    "cache_stride": 16 * 2 * 64 + 32,
    "data_section_bytes": 16 * 2 * 32 + 16,
    "block_stride_bytes": 16 * 2 * 32 + 16 + 16 * 2 * 4 + 32,
    "tile_capacity": 4,
    "gqa_ratio": 4,
    "blk_stride": 16 * 2 * 64,
    "tok_stride": 2 * 64,
    "kvh_stride": 64,
    "last_block_valid_slots": 11,
    "n_elems": 1000,
    "num_rows": 13,
    "row_elems": 100,
    "row_stride": 120,
}
INTEGERS = {name for name, value in SCALARS.items() if isinstance(value, int)}
FACTORS = {name for name, value in SCALARS.items() if isinstance(value, float)}

# What each array holds, in elements, beside its dtype.
_ARRAYS: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
    "output": ((3, 8, 64), ml_dtypes.bfloat16),
    "block_tables": ((3, 5), np.int32),
    "seq_lens": ((3,), np.int32),
    "workspace": ((3, 8, 7, 66), np.float32),
    "slot_mapping": ((10,), np.int64),
    "tile_blocks": ((3, 4), np.int32),
    "tile_block_counts": ((3,), np.int32),
    "m_state": ((3, 8), np.float32),
    "l_state": ((3, 8), np.float32),
    "o_state": ((3, 8, 64), np.float32),
    "out_max": ((1,), np.float32),
    "lse": ((3, 8), np.float32),
    "part_o": ((4 * 2 * 2, 8, 64), np.float32),
    "part_state": ((4 * 2 * 2, 8, 2), np.float32),
    "counters": ((3,), np.uint32),
    "k_pool": ((NUM_BLOCKS, 16, 2, 64), np.uint16),
    "v_pool": ((NUM_BLOCKS, 16, 2, 64), np.uint16),
}
_POOLS: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
    "bf16": ((NUM_BLOCKS, 16, 2, 64), ml_dtypes.bfloat16),
    "fp8": ((NUM_BLOCKS, SCALARS["cache_stride"]), np.uint8),
    "nvfp4": ((NUM_BLOCKS, SCALARS["block_stride_bytes"]), np.uint8),
}


def format_of(launcher: str) -> str:
    """Cache format of a launcher that has one."""
    return launcher.rpartition("_")[2]


def rows(count: int, stride: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """BF16 rows with gaps between them."""
    row = int(np.prod(shape))
    wide = aligned((count, stride), ml_dtypes.bfloat16)
    return np.lib.stride_tricks.as_strided(
        wide[:, :row], (count, *shape), (wide.strides[0], *np.empty(shape, np.uint16).strides)
    )


def _array(launcher: str, name: str) -> npt.NDArray[Any]:
    if name == "q":
        stride = 8 * 64 if launcher == "paged_decode_attn_tiled" else SCALARS["q_stride"]
        return rows(3, stride, (8, 64))
    if name in ("key", "value"):
        return rows(10, SCALARS[f"{name}_stride"], (2, 64))
    if name == "data":
        return rows(13, 120, (100,)) if launcher.endswith("rows") else aligned(1000, np.uint16)
    if name in ("k_cache", "v_cache"):
        return aligned(*_POOLS[format_of(launcher)])
    return aligned(*_ARRAYS[name])


def parameters(launcher: str) -> list[str]:
    """Positional parameters between ``gpu, kernel`` and ``stream``."""
    found = inspect.signature(getattr(ops, launcher)).parameters.values()
    return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD][2:-1]


def arguments(launcher: str) -> dict[str, Any]:
    """Valid arguments of a launcher, by name."""
    return {n: SCALARS[n] if n in SCALARS else _array(launcher, n) for n in parameters(launcher)}


def addresses(launcher: str) -> dict[str, Any]:
    """Valid arguments with bare addresses for pointers, so that nothing is known about their sizes."""
    return {n: SCALARS.get(n, (i + 1) << 20) for i, n in enumerate(parameters(launcher))}


def handle(gpu: FakeBackend, launcher: str) -> KernelHandle:
    """The kernel that a launcher launches."""
    return gpu.kernel(_MODULES.get(launcher, launcher), launcher)


def call(gpu: FakeBackend, launcher: str, given: dict[str, Any], /, stream: Any = 0, **changed: Any) -> None:
    """Call a launcher with some arguments changed, or keyword-only ones added."""
    function: Callable[..., None] = getattr(ops, launcher)
    positional = [changed.pop(name, value) for name, value in given.items()]
    function(gpu, handle(gpu, launcher), *positional, stream, **changed)


def pairs(names: set[str] | None = None) -> list[tuple[str, str]]:
    """(launcher, parameter) for all parameters, those named, or all pointers where the set is empty."""
    return [
        (launcher, name)
        for launcher in LAUNCHERS
        for name in parameters(launcher)
        if names is None or name in names or (not names and name not in SCALARS)
    ]
