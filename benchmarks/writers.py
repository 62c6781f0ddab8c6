"""Writers and absmax against the copy and the read ceiling.

Byte models. Writers: key, value and slots read, cache bytes written. absmax: values read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.launchers import format_arguments
from benchmarks.session import Row, Session, timed
from cupaged import ops
from cupaged.formats import BF16, CacheFormat, CacheLayout, write_tokens

TOKENS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 65_536, 8, 128, 16
ABSMAX_ELEMENTS = 1 << 30  # 2 GiB of BF16
CHECKED_BLOCKS = 8


def measure(session: Session) -> None:
    """Rows "writers" and "absmax"."""
    for fmt in session.formats:
        session.attempt(
            "writers",
            {"load": f"{TOKENS // session.shrink} tokens x {KV_HEADS} x {HEAD_DIM}", "format": fmt.name},
            lambda f=fmt: _write(session, f),
        )
    session.attempt(
        "absmax", {"load": f"{2 * ABSMAX_ELEMENTS // session.shrink:,} bytes", "format": "bf16"},
        lambda: _absmax(session),
    )  # fmt: skip


def _write(session: Session, fmt: CacheFormat) -> Row:
    device = session.device
    tokens = TOKENS // session.shrink
    layout = CacheLayout(fmt, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    num_blocks = 2 * tokens // BLOCK_SIZE
    rng = np.random.default_rng(11)
    slots = rng.permutation(num_blocks)[: tokens // BLOCK_SIZE, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
    slots = slots.reshape(-1).astype(np.int64)
    key, value = (device.normal_bf16((tokens, KV_HEADS, HEAD_DIM), seed) for seed in (12, 13))
    dtype = np.uint16 if fmt == BF16 else np.uint8
    k_cache, v_cache = (device.xp.zeros(layout.pool_shape(num_blocks), dtype) for _ in range(2))
    call = write_call(device.gpu, layout, key, value, k_cache, v_cache, device.upload(slots), device.stream)
    device.wait()
    call()
    device.wait()
    wrong = sum(
        _wrong_bytes(session, layout, source, cache, slots)
        for source, cache in ((key, k_cache), (value, v_cache))
    )
    num_bytes = 2 * tokens * (KV_HEADS * HEAD_DIM * 2 + layout.bytes_per_token) + 8 * tokens
    time = device.time([call])
    return {**timed(time, num_bytes, session.ceiling.get("copy")), "wrong_bytes": wrong}


def write_call(
    gpu: Any, layout: CacheLayout, key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, stream: Any
) -> Callable[[], None]:
    """One call of the format's writer."""
    name = f"reshape_and_cache_{layout.format.name}"
    kernel, launch = gpu.kernel(name, name), getattr(ops, name)
    row = layout.num_kv_heads * layout.head_dim
    before, after = format_arguments(layout)

    def call() -> None:
        launch(
            gpu, kernel, key, value, k_cache, v_cache, slots, len(slots), layout.num_kv_heads,
            layout.head_dim, layout.block_size, *before, row, row, *after, stream,
        )  # fmt: skip

    return call


def _wrong_bytes(session: Session, layout: CacheLayout, source: Any, cache: Any, slots: Any) -> int:
    """Bytes of the first and the last blocks written that differ from the host packer's."""
    device, count = session.device, min(CHECKED_BLOCKS * layout.block_size, len(slots))
    wrong = 0
    for part in (slice(0, count), slice(len(slots) - count, len(slots))):
        values = device.download(source[part]).view(ml_dtypes.bfloat16)
        expected = np.zeros(layout.pool_shape(count // layout.block_size), layout.pool_dtype)
        write_tokens(expected, layout, values, np.arange(count))
        blocks = device.upload(slots[part][:: layout.block_size] // layout.block_size)
        got = device.download(cache[blocks])
        wrong += int((got.view(np.uint8).reshape(-1) != expected.view(np.uint8).reshape(-1)).sum())
    return wrong


def _absmax(session: Session) -> Row:
    device = session.device
    count = ABSMAX_ELEMENTS // session.shrink
    data = session.arenas.raw(BF16, 2 * count)[0].view(np.uint16)
    out = device.xp.zeros(1, np.float32)
    kernel = device.gpu.kernel("bf16_absmax", "bf16_absmax")

    def call() -> None:
        ops.bf16_absmax(device.gpu, kernel, data, out, count, device.stream)

    device.wait()
    call()
    device.wait()
    largest = int((data & np.uint16(0x7FFF)).max()) << 16
    wrong = int(device.download(out).view(np.uint32)[0] != largest)
    return {**timed(device.time([call]), 2 * count, session.ceiling.get("read")), "wrong_results": wrong}
