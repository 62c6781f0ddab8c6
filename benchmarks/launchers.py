"""Calls of the package's single launchers (`cupaged.ops`) over a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pools import Batch
from cupaged import ops
from cupaged.formats import CacheLayout

Call = Callable[[], None]


def single_pass(gpu: Any, batch: Batch, table: Any, stream: Any) -> Call:
    """One single-pass decode."""
    name = f"paged_decode_attn_{batch.layout.format.name}"
    kernel, launch = gpu.kernel(name, name), getattr(ops, name)
    k_pool, v_pool = batch.pools
    before, after = format_arguments(batch.layout)
    load, num_blocks = batch.load, batch.num_blocks
    arguments = (
        gpu, kernel, batch.q, k_pool, v_pool, batch.output, table, batch.seq_lens, batch.max_blocks_per_seq,
        batch.num_seqs, load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size,
        load.head_dim**-0.5, *before, load.num_q_heads * load.head_dim, *after, *_window(batch), stream,
    )  # fmt: skip
    return lambda: launch(*arguments, num_blocks=num_blocks)


def split_and_reduce(
    gpu: Any, batch: Batch, table: Any, workspace: Any, num_splits: int, stream: Any
) -> Call:
    """One split-K decode and its reduction."""
    fmt = batch.layout.format.name
    module = f"paged_decode_attn_{fmt}"
    split_name = f"paged_decode_attn_splitk_{fmt}"
    reduce_name = f"paged_decode_attn_reduce_{'nvfp4' if fmt == 'nvfp4' else 'fp8'}"
    kernel, launch = gpu.kernel(module, split_name), getattr(ops, split_name)
    reduce_kernel = gpu.kernel("paged_decode_attn_reduce", reduce_name)
    reduce = getattr(ops, reduce_name)
    k_pool, v_pool = batch.pools
    before, after = format_arguments(batch.layout)
    load, num_blocks = batch.load, batch.num_blocks
    split_arguments = (
        gpu, kernel, batch.q, k_pool, v_pool, workspace, table, batch.seq_lens, batch.max_blocks_per_seq,
        load.num_q_heads, load.num_kv_heads, load.head_dim, load.block_size, load.head_dim**-0.5, num_splits,
        *before, load.num_q_heads * load.head_dim, *after, batch.num_seqs, *_window(batch), stream,
    )  # fmt: skip
    reduce_arguments = (
        gpu, reduce_kernel, workspace, batch.output, batch.seq_lens, load.num_q_heads, load.head_dim,
        num_splits, batch.num_seqs, stream,
    )  # fmt: skip

    def call() -> None:
        launch(*split_arguments, num_blocks=num_blocks)
        reduce(*reduce_arguments)

    return call


def format_arguments(layout: CacheLayout) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """What a format's launchers take before the row strides, scales of 1, and after: how its blocks lie."""
    scales = (1.0, 1.0) if layout.format.needs_scale else ()
    if layout.format.has_scale_section:
        return scales, (layout.block_stride_bytes, layout.data_section_bytes)
    return scales, () if layout.format.name == "bf16" else (layout.cache_stride,)


def _window(batch: Batch) -> tuple[int, ...]:
    """sliding_window where it is a positional argument."""
    return () if batch.layout.format.has_scale_section else (0,)
