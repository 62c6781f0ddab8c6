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
    "attention_merge_states": "paged_decode_attn_tiled",
    "bf16_absmax_rows": "bf16_absmax",
    "copy_cache_blocks": "cache_blocks",
    "gather_tokens_bf16": "cache_blocks",
    "gather_tokens_f32": "cache_blocks",
    "merge_states_bf16": "merge_states",
    "merge_states_f16": "merge_states",
    "merge_states_f32": "merge_states",
    "merge_states_f32_to_bf16": "merge_states",
    "merge_states_f32_to_f16": "merge_states",
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
    "seq_len": 40,
    "cache_format": 2,
    "scale": 0.75,
    "token_stride_bytes": 64,
    "head_stride_bytes": 32,
    "scale_token_stride_bytes": 8,
    "scale_head_stride_bytes": 4,
    "num_pairs": 5,
    "data_bytes": 1024,
    "scale_bytes": 128,
    "source_stride_bytes": 1184,
    "source_section_bytes": 1040,
    "target_stride_bytes": 1200,
    "target_section_bytes": 1056,
    "num_source_blocks": 6,
    "num_target_blocks": 5,
    "num_parts": 4,
    "part_stride": 13 * 64 + 16,
    "lse_stride": 13 + 2,
    "seq_stride": 23,
}
# Launchers that mean something else by a scalar's name.
_OWN_SCALARS: dict[str, dict[str, Any]] = {"attention_merge_states": {"part_stride": 6}}
_STATE_ROWS = 2 * 23 + 3 * 6 + 1  # 3 sequences of 4 parts, as those strides place them
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
    "m_parts": ((_STATE_ROWS, 8), np.float32),
    "l_parts": ((_STATE_ROWS, 8), np.float32),
    "o_parts": ((_STATE_ROWS, 8, 64), np.float32),
    "m_out": ((3, 8), np.float32),
    "l_out": ((3, 8), np.float32),
    "o_out": ((3, 8, 64), np.float32),
    "pool": ((NUM_BLOCKS, SCALARS["block_stride_bytes"]), np.uint8),
    "block_ids": ((3,), np.int32),
    "scales": ((2,), np.float32),
    "pairs": ((5, 2), np.int32),
    "k_source": ((6, 1184), np.uint8),
    "v_source": ((6, 1184), np.uint8),
    "k_target": ((5, 1200), np.uint8),
    "v_target": ((5, 1200), np.uint8),
    "out_lse": ((13,), np.float32),
}
_POOLS: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
    "bf16": ((NUM_BLOCKS, 16, 2, 64), ml_dtypes.bfloat16),
    "fp8": ((NUM_BLOCKS, SCALARS["cache_stride"]), np.uint8),
    "nvfp4": ((NUM_BLOCKS, SCALARS["block_stride_bytes"]), np.uint8),
}


def format_of(launcher: str) -> str:
    """Cache format of a launcher that has one."""
    return "bf16" if launcher.endswith("tiled") else launcher.rpartition("_")[2]


def scalars_of(launcher: str) -> dict[str, Any]:
    """Scalars by name, as a launcher means them."""
    return SCALARS | _OWN_SCALARS.get(launcher, {})


def rows(
    count: int, stride: int, shape: tuple[int, ...], dtype: npt.DTypeLike = ml_dtypes.bfloat16
) -> npt.NDArray[Any]:
    """Rows with gaps between them, BF16 unless another dtype is given."""
    row = int(np.prod(shape))
    wide = aligned((count, stride), dtype)
    return np.lib.stride_tricks.as_strided(
        wide[:, :row], (count, *shape), (wide.strides[0], *np.empty(shape, dtype).strides)
    )


def _array(launcher: str, name: str) -> npt.NDArray[Any]:
    if name == "q":
        stride = 8 * 64 if "tiled" in launcher else SCALARS["q_stride"]
        return rows(3, stride, (8, 64))
    if name in ("key", "value"):
        return rows(10, SCALARS[f"{name}_stride"], (2, 64))
    if name == "data":
        return rows(13, 120, (100,)) if launcher.endswith("rows") else aligned(1000, np.uint16)
    if name == "outputs":
        dtype = {"merge_states_bf16": "bfloat16", "merge_states_f16": "float16"}.get(launcher, "float32")
        return rows(4, SCALARS["part_stride"], (13, 64), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    if name == "lses":
        return rows(4, SCALARS["lse_stride"], (13,), np.float32)
    if name == "out" or (name == "output" and launcher.startswith("gather")):
        shape = (13, 64) if name == "out" else (40, 2, 64)
        dtypes = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
        return aligned(shape, dtypes[launcher.rpartition("_")[2]])
    if name in ("k_cache", "v_cache", "k_pool", "v_pool"):
        return aligned(*_POOLS[format_of(launcher)])
    return aligned(*_ARRAYS[name])


def parameters(launcher: str) -> list[str]:
    """Positional parameters between ``gpu, kernel`` and ``stream``."""
    found = inspect.signature(getattr(ops, launcher)).parameters.values()
    return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD][2:-1]


def arguments(launcher: str) -> dict[str, Any]:
    """Valid arguments of a launcher, by name."""
    scalars = scalars_of(launcher)
    return {n: scalars[n] if n in scalars else _array(launcher, n) for n in parameters(launcher)}


def addresses(launcher: str) -> dict[str, Any]:
    """Valid arguments with bare addresses for pointers, so that nothing is known about their sizes."""
    scalars = scalars_of(launcher)
    return {n: scalars.get(n, (i + 1) << 20) for i, n in enumerate(parameters(launcher))}


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
