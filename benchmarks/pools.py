"""K and V pools of finite random values, and random block tables over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.device import Device
from benchmarks.loads import POOL_BYTES, Load, pool_blocks, rotations
from cupaged.formats import CacheFormat, CacheLayout

SCALE_PERIOD = (1 << 22) + 1025  # bytes; no multiple of a block's scale section


@dataclass
class Batch:
    """Everything that a decode of a load reads, on the device.

    Attributes:
        layout, value_layout: of the K and of the V pool.
        k_bytes, v_bytes: the pools as bytes ``[num_blocks, block_stride_bytes]``.
        k_pool, v_pool: the same in the layout's shape; BF16 as uint16.
        tables: disjoint block tables, int32 ``[num_seqs, max_blocks_per_seq]``, -1 where no token is.
        seq_lens: int32 ``[num_seqs]``.
        q: BF16 patterns ``[num_seqs, num_q_heads, head_dim]``, or float16; with several query tokens
            ``[num_seqs, query_tokens, num_q_heads, head_dim]``.
        output: likewise, NaN until written.
    """

    load: Load
    layout: CacheLayout
    value_layout: CacheLayout
    num_blocks: int
    k_bytes: Any
    v_bytes: Any
    k_pool: Any
    v_pool: Any
    tables: list[Any]
    seq_lens: Any
    q: Any
    output: Any

    @property
    def num_seqs(self) -> int:
        return len(self.load.seq_lens)

    @property
    def max_blocks_per_seq(self) -> int:
        return max(self.load.block_counts)

    @property
    def pools(self) -> tuple[Any, Any]:
        """K and V pool as the launchers take them."""
        return self.k_pool, self.v_pool


class Arenas:
    """Random bytes for K and V, one pair a format, made once and cut into pools of any layout.

    Every BF16 value is finite, every FP8 code has an exponent of 5 to 8 (magnitudes 0.25 to 3.75), and the
    scale sections of NVFP4 blocks, which lie elsewhere in each layout, are written for it.
    """

    def __init__(self, device: Device, pool_bytes: int = POOL_BYTES, reserved: Load | None = None) -> None:
        """Arenas for pools of at least so many bytes, and with room for the reserved load from the start."""
        self.device, self.pool_bytes, self._reserved = device, pool_bytes, reserved
        self._arenas: dict[str, tuple[Any, Any]] = {}
        self._scaled: tuple[CacheLayout, int] | None = None

    def batch(
        self, fmt: CacheFormat, load: Load, value_format: CacheFormat | None = None, float16: bool = False
    ) -> Batch:
        """Pools, tables and arrays of a load; the pools of an earlier batch may be rewritten."""
        device, layout, values = self.device, load.layout(fmt), load.layout(value_format or fmt)
        needed = sum(load.block_counts)
        num_blocks = min(pool_blocks(x, needed, self.pool_bytes) for x in (layout, values))
        k_bytes, v_bytes = self._pools(layout, num_blocks)[0], self._pools(values, num_blocks)[1]
        tokens = (load.query_tokens,) if load.query_tokens > 1 else ()
        shape = (len(load.seq_lens), *tokens, load.num_q_heads, load.head_dim)
        if float16:
            q, output = device.normal_float16(shape, 2), device.xp.full(shape, np.nan, np.float16)
        else:
            q, output = device.normal_bf16(shape, 2), device.xp.full(shape, 0x7FC0, np.uint16)
        return Batch(
            load=load,
            layout=layout,
            value_layout=values,
            num_blocks=num_blocks,
            k_bytes=k_bytes,
            v_bytes=v_bytes,
            k_pool=_shaped(k_bytes, layout),
            v_pool=_shaped(v_bytes, values),
            tables=block_tables(device, num_blocks, load.block_counts),
            seq_lens=device.upload(np.array(load.seq_lens, np.int32)),
            q=q,
            output=output,
        )

    def raw(self, fmt: CacheFormat, num_bytes: int) -> tuple[Any, Any]:
        """The first bytes of K's and V's arena."""
        held = self._arenas.get(fmt.name)
        if held is None or len(held[0]) < num_bytes:
            self._arenas.pop(fmt.name, None)
            del held
            self.device.free()
            size = num_bytes
            if self._reserved is not None:
                size = max(size, self._reserved.bytes_read(fmt) // 2)
            self._arenas[fmt.name] = (self._fill(fmt, size, 0), self._fill(fmt, size, 1))
            self._scaled = None
        k, v = self._arenas[fmt.name]
        return k[:num_bytes], v[:num_bytes]

    def release(self) -> None:
        """Forget all arenas."""
        self._arenas.clear()
        self._scaled = None
        self.device.free()

    def _pools(self, layout: CacheLayout, num_blocks: int) -> tuple[Any, Any]:
        raw = self.raw(layout.format, num_blocks * layout.block_stride_bytes)
        k, v = (x.reshape(num_blocks, layout.block_stride_bytes) for x in raw)
        if layout.format.name == "nvfp4" and self._scaled != (layout, num_blocks):
            for seed, pool in ((3, k), (4, v)):
                scales = pool[:, layout.data_section_bytes : layout.block_bytes]
                codes = self.device.random_bytes(scales.shape, seed, SCALE_PERIOD)
                scales[...] = codes % np.uint8(24) + np.uint8(40)  # E4M3: 0.25 to 1.875
            self._scaled = (layout, num_blocks)
        return k, v

    def _fill(self, fmt: CacheFormat, num_bytes: int, seed: int) -> Any:
        if fmt.name == "bf16":
            return self.device.normal_bf16((num_bytes // 2,), seed).view(np.uint8)
        codes = self.device.random_bytes((num_bytes,), seed)
        if fmt.name == "fp8":
            codes &= np.uint8(0x9F)  # of the exponent its two low bits stay ...
            codes += np.uint8(5 << 3)  # ... and become 5 to 8
        return codes


def _shaped(pool: Any, layout: CacheLayout) -> Any:
    """Bytes of a pool as launchers take it."""
    dtype = np.uint16 if layout.format.name == "bf16" else np.uint8
    return pool.reshape(-1).view(dtype).reshape(layout.pool_shape(len(pool)))


def block_tables(device: Device, num_blocks: int, counts: Sequence[int], seed: int = 5) -> list[Any]:
    """Disjoint random block tables, as many as the pool has room for."""
    needed = sum(counts)
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    owned = np.arange(max(counts)) < np.array(counts)[:, None]
    tables = []
    for i in range(rotations(needed, num_blocks)):
        table = np.full(owned.shape, -1, np.int32)
        table[owned] = order[i * needed : (i + 1) * needed]
        tables.append(device.upload(table))
    return tables
