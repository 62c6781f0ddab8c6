"""The kernels of a streaming decode, for pools of one layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged import ops
from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout, paged_strides
from cupaged.ops._checks import check_scale
from cupaged.pointers import DevicePtr
from cupaged.registry.rules import gqa_ratio
from cupaged.registry.tiled import resident_blocks
from cupaged.streaming.arguments import of_format

_MAX_SPLITS = 128
_STEPS = {
    "bf16": "paged_decode_attn_tiled",
    "fp8": "paged_decode_attn_tiled_fp8",
    "nvfp4": "paged_decode_attn_tiled_nvfp4",
}
_HAS_SCALES = {"bf16": False, "fp8": True, "nvfp4": False}  # as the step of the format takes them


def check_scales(name: str, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
    """Both scales for an FP8 cache, none for another.

    Raises:
        ArgumentValueError: otherwise, or a format that streaming does not know.
    """
    if not of_format(_HAS_SCALES, name):
        if k_scale is not None or v_scale is not None:
            raise ArgumentValueError(
                f"k_scale, v_scale: got {k_scale}, {v_scale}; streaming takes them for an fp8 cache alone, "
                f"this one is {name}"
            )
        return 1.0, 1.0
    if k_scale is None or v_scale is None:
        raise ArgumentValueError(
            f"k_scale, v_scale: got {k_scale}, {v_scale}; an fp8 cache needs both, as it was written"
        )
    return check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)


def same_scales(written: tuple[float, float], own: tuple[float, float]) -> bool:
    """Whether two pairs of scales are the same to a kernel, which takes them as float32."""
    return np.array_equal(np.array(written, np.float32), np.array(own, np.float32))


class States:
    """Running states on the device: of each row, num_splits of them.

    Attributes:
        m, l: F32 ``[num_rows, num_splits, num_q_heads]``.
        o: F32 ``[num_rows, num_splits, num_q_heads, head_dim]``.
    """

    def __init__(self, gpu: Any, num_rows: int, num_splits: int, num_q_heads: int, head_dim: int) -> None:
        self.num_splits = num_splits
        shape = (num_rows, num_splits, num_q_heads)
        self.m = gpu.empty(shape, "float32")
        self.l = gpu.empty(shape, "float32")
        self.o = gpu.empty((*shape, head_dim), "float32")
        self._gpu = gpu

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """m, l and o."""
        return self.m, self.l, self.o

    def clear(self, num_rows: int, stream: int) -> None:
        """Nothing seen yet, in the first rows: l and o are 0, m is -1.7e38, lower than any score.

        Its bytes are all 0xFE. Any score replaces it, and e^(m - score) is 0.
        """
        for array, byte in ((self.m, 0xFE), (self.l, 0), (self.o, 0)):
            size = array[:num_rows].nbytes
            self._gpu.memset(self._gpu.pointer(array), byte, size, stream)

    def rows(self, first: int, count: int) -> tuple[DevicePtr, DevicePtr, DevicePtr]:
        """m, l and o from a row on."""
        return (
            part(self._gpu, self.m, first, count),
            part(self._gpu, self.l, first, count),
            part(self._gpu, self.o, first, count),
        )


def part(gpu: Any, array: Any, first: int, count: int) -> DevicePtr:
    """Address and size of some rows of a contiguous array."""
    row = array.nbytes // max(1, array.shape[0])
    return DevicePtr(gpu.pointer(array) + first * row, count * row)


class Step:
    """Launches the step, the merge of splits and the finalisation.

    Args:
        gpu: the backend.
        layout: of the pools.
        num_q_heads: query heads.
        k_scale: FP8 dequantisation scale of K, 1 for other formats.
        v_scale: of V.
    """

    def __init__(
        self, gpu: Any, layout: CacheLayout, num_q_heads: int, k_scale: float, v_scale: float
    ) -> None:
        if layout.heads_first:
            raise ArgumentValueError(
                "layout: heads_first is True; the streaming step takes [block_size, num_kv_heads, ...] only"
            )
        self._gpu = gpu
        self._layout = layout
        self.num_q_heads = num_q_heads
        self._ratio = gqa_ratio(num_q_heads, layout.num_kv_heads)
        name = of_format(_STEPS, layout.format)
        self._launch = getattr(ops, name)
        self._kernel = gpu.kernel(name, name)
        self._merge = gpu.kernel("paged_decode_attn_tiled", "attention_merge_states")
        self._finalize = gpu.kernel("paged_decode_attn_tiled", "attention_finalize")
        chosen = self._kernel.warm(
            head_dim=layout.head_dim, gqa_ratio=self._ratio, block_size=layout.block_size
        )
        self._resident: int = gpu.num_sms * resident_blocks(chosen.constants)
        for kernel in (self._merge, self._finalize):
            kernel.warm(head_dim=layout.head_dim)
        self._strides = self._stride_arguments(k_scale, v_scale)

    def splits_for(self, num_seqs: int) -> int:
        """States of a sequence with which a step of `num_seqs` sequences fills the GPU once."""
        return max(1, min(_MAX_SPLITS, self._resident // (num_seqs * self._layout.num_kv_heads)))

    def _stride_arguments(self, k_scale: float, v_scale: float) -> tuple[int | float, ...]:
        layout = self._layout
        if layout.format.has_scale_section:
            strides: tuple[int, ...] = (layout.block_stride_bytes, layout.data_section_bytes)
        else:
            _, token, head = paged_strides(layout.num_kv_heads, layout.head_dim, layout.block_size)
            strides = (layout.cache_stride, token, head)
        return (*strides, k_scale, v_scale) if of_format(_HAS_SCALES, layout.format) else strides

    def fold(
        self,
        q: DevicePtr,
        k_pool: Any,
        v_pool: Any,
        num_blocks: int,
        table: int,
        counts: int,
        states: States,
        first_row: int,
        num_rows: int,
        capacity: int,
        scale: float | None,
        stream: int,
        valid_slots: int = 0,
    ) -> None:
        """Fold blocks of two pools into rows of the states.

        Args:
            q: BF16 ``[num_rows, num_q_heads, head_dim]``, of these rows.
            k_pool, v_pool: the pools.
            num_blocks: in each.
            table: address of int32 ``[num_rows, capacity]``, blocks of each row.
            counts: address of int32 ``[num_rows]``.
            states: updated.
            first_row: of the states.
            num_rows: of the step.
            capacity: columns of the table.
            scale: softmax scale, 1 / sqrt(head_dim) where None.
            stream: raw handle.
            valid_slots: address of int32 ``[num_rows]``, tokens of each row's last block; 0: all are full.
        """
        layout = self._layout
        running = states.rows(first_row, num_rows)
        table_bytes = 4 * num_rows * capacity
        self._launch(
            self._gpu,
            self._kernel,
            q,
            k_pool,
            v_pool,
            DevicePtr(table, table_bytes),
            DevicePtr(counts, 4 * num_rows),
            *running,
            num_rows,
            self.num_q_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            capacity,
            self._ratio,
            *self._strides,
            layout.block_size,
            stream,
            inv_sqrt_d=scale,
            last_block_valid_slots_per_seq=DevicePtr(valid_slots, 4 * num_rows) if valid_slots else None,
            num_blocks=num_blocks,
            num_splits=states.num_splits,
        )

    def merge(self, states: States, merged: States, num_rows: int, stream: int) -> None:
        """One state a row, of its splits."""
        self._merge_parts(states, merged, num_rows, states.num_splits, states.num_splits, 1, stream)

    def merge_ranks(self, gathered: States, merged: States, num_rows: int, ranks: int, stream: int) -> None:
        """One state a row, of those of all ranks, ``[ranks * num_rows]``."""
        self._merge_parts(gathered, merged, num_rows, ranks, 1, num_rows, stream)

    def _merge_parts(
        self, parts: States, merged: States, num_rows: int, count: int, seq: int, stride: int, stream: int
    ) -> None:
        ops.attention_merge_states(
            self._gpu, self._merge, parts.m, parts.l, parts.o, merged.m, merged.l, merged.o,
            num_rows, self.num_q_heads, self._layout.head_dim, count, seq, stride, stream,
        )  # fmt: skip

    def finalize(self, merged: States, output: Any, num_rows: int, stream: int) -> None:
        """Output BF16 ``[num_rows, num_q_heads, head_dim]`` of one state a row."""
        ops.attention_finalize(
            self._gpu, self._finalize, merged.l, merged.o, output,
            num_rows, self.num_q_heads, self._layout.head_dim, stream,
        )  # fmt: skip
