"""The three cache formats behind one interface: which launchers write and read each."""

from __future__ import annotations

import abc
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from cupaged import ops
from cupaged.backends.base import GpuBackend
from cupaged.formats import NVFP4, CacheLayout
from cupaged.registry.decode import is_joined

NO_WINDOW = 0  # sliding_window: attend over the whole sequence

Paged = tuple[Any, Any, Any, Any, Any, Any, int]
Shape = tuple[int, int, int, int]  # num_tokens, num_kv_heads, head_dim, block_size of a write


@dataclass(frozen=True)
class Pools:
    """Keys and values of one layer on the device.

    Attributes:
        keys: pool of ``CacheLayout.pool_shape``.
        values: as ``keys``.
        num_blocks: blocks in each.
        k_scale: dequantisation scale of the keys, of a format that needs one; None until it is known.
        v_scale: of the values.
    """

    keys: Any
    values: Any
    num_blocks: int
    k_scale: float | None = None
    v_scale: float | None = None

    @property
    def scales(self) -> tuple[float, float]:
        """k_scale and v_scale, for the launchers of a format that needs them.

        Raises:
            ValueError: one is not known yet.
        """
        if self.k_scale is None or self.v_scale is None:
            raise ValueError(
                f"k_scale and v_scale: got {self.k_scale} and {self.v_scale}; this format needs both "
                "(`PagedCache.store_prompt` takes them from the prompt)"
            )
        return self.k_scale, self.v_scale


@dataclass(frozen=True)
class Lookup:
    """Where the tokens of the sequences are.

    Attributes:
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]`` on the device.
        seq_lens: int32 ``[num_seqs]`` on the device.
    """

    block_tables: Any
    seq_lens: Any

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return int(self.block_tables.shape[0])

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block tables."""
        return int(self.block_tables.shape[1])


class CacheKernels(abc.ABC):
    """Writes tokens into pools of one format and attends over them.

    The kernels are compiled when it is made, side by side, so that no step has to wait for a compiler.

    Args:
        gpu: the backend.
        layout: of the pools.
        num_q_heads: query heads, a multiple of the layout's KV heads.
        stream: stream of every launch.

    Attributes:
        headroom: of a format that needs scales: how many times the largest magnitude of the prompt must
            still fit, at least 1.

    Raises:
        TypeError: the format needs scales and the class says no headroom.
    """

    headroom: ClassVar[float | None] = None

    def __init__(self, gpu: GpuBackend, layout: CacheLayout, num_q_heads: int, stream: Any) -> None:
        name = layout.format.name
        if layout.format.needs_scale and self.headroom is None:
            raise TypeError(f"{type(self).__name__}.headroom: got None; {name} needs scales, and so a number")
        reduce = "paged_decode_attn_reduce_nvfp4" if name == "nvfp4" else "paged_decode_attn_reduce_fp8"
        decode = f"paged_decode_attn_{name}"
        self.gpu, self.layout, self.num_q_heads, self.stream = gpu, layout, num_q_heads, stream
        self.writer = gpu.kernel(f"reshape_and_cache_{name}", f"reshape_and_cache_{name}")
        self.single_pass = gpu.kernel(decode, decode)
        self.split_k = gpu.kernel(decode, f"paged_decode_attn_splitk_{name}")
        self.reducer = gpu.kernel("paged_decode_attn_reduce", reduce)
        self._compile()
        self._reduce = getattr(ops, reduce)
        self._workspaces: dict[tuple[int, int], Any] = {}

    def _compile(self) -> None:
        head_dim, block_size = self.layout.head_dim, self.layout.block_size
        num_kv_heads = self.layout.num_kv_heads
        ratio = self.num_q_heads // num_kv_heads
        decode = {
            "head_dim": head_dim,
            "gqa_ratio": ratio,
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
        }
        if self.layout.format == NVFP4:  # an NVFP4 block may come in one copy
            decode["joined"] = int(
                is_joined(block_size, num_kv_heads, head_dim, self.layout.data_section_bytes)
            )
        constants = [
            (self.writer, {"head_dim": head_dim, "block_size": block_size}),
            (self.single_pass, decode),
            (self.split_k, decode),
            (self.reducer, {"head_dim": head_dim}),
        ]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda pair: pair[0].warm(**pair[1]), constants))

    def write(self, key: Any, value: Any, pools: Pools, slots: Any) -> None:
        """Store tokens.

        Args:
            key: BF16 bits ``[num_tokens, num_kv_heads, head_dim]``.
            value: as ``key``.
            pools: written at the slots.
            slots: int64 ``[num_tokens]``.
        """
        layout = self.layout
        stride = layout.num_kv_heads * layout.head_dim
        shape = (len(slots), layout.num_kv_heads, layout.head_dim, layout.block_size)
        self._write(key, value, pools, slots, shape, stride)

    def attend(self, q: Any, pools: Pools, lookup: Lookup, num_splits: int) -> Any:
        """Attention of one query token a sequence over its cached tokens.

        Args:
            q: BF16 bits ``[num_seqs, num_q_heads, head_dim]``.
            pools: keys and values.
            lookup: block tables and lengths.
            num_splits: 1 for a single pass; more cuts every sequence into that many parts, attended in
                parallel and then merged.

        Returns:
            BF16 bits, the shape of ``q``.
        """
        out = self.gpu.empty(q.shape, q.dtype)
        if num_splits == 1:
            self._single_pass(q, pools, out, lookup)
            return out
        workspace = self._workspace(lookup.num_seqs, num_splits)
        self._split_k(q, pools, workspace, lookup, num_splits)
        self._reduce(
            self.gpu, self.reducer, workspace, out, lookup.seq_lens,
            self.num_q_heads, self.layout.head_dim, num_splits, lookup.num_seqs, self.stream,
        )  # fmt: skip
        return out

    def _workspace(self, num_seqs: int, num_splits: int) -> Any:
        # Kept: layers run one after another on one stream, so each may overwrite the last one's partials.
        key = (num_seqs, num_splits)
        if key not in self._workspaces:
            shape = (num_seqs, self.num_q_heads, num_splits, self.layout.head_dim + 2)
            self._workspaces[key] = self.gpu.empty(shape, "float32")
        return self._workspaces[key]

    def _paged(self, q: Any, pools: Pools, target: Any, lookup: Lookup) -> Paged:
        """The arguments that every decode launcher begins with, up to max_blocks_per_seq."""
        tables, lengths = lookup.block_tables, lookup.seq_lens
        return q, pools.keys, pools.values, target, tables, lengths, lookup.max_blocks_per_seq

    @property
    def _heads(self) -> tuple[int, int, int, int, float]:
        """num_q_heads, num_kv_heads, head_dim, block_size, inv_sqrt_d: a run of every decode launcher."""
        layout = self.layout
        sizes = (self.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.block_size)
        return *sizes, 1 / math.sqrt(layout.head_dim)

    @property
    def _q_stride(self) -> int:
        return self.num_q_heads * self.layout.head_dim

    @abc.abstractmethod
    def _write(self, key: Any, value: Any, pools: Pools, slots: Any, shape: Shape, stride: int) -> None: ...

    @abc.abstractmethod
    def _single_pass(self, q: Any, pools: Pools, out: Any, lookup: Lookup) -> None: ...

    @abc.abstractmethod
    def _split_k(self, q: Any, pools: Pools, out: Any, lookup: Lookup, num_splits: int) -> None: ...


class Bf16Kernels(CacheKernels):
    """BF16 cache: contiguous, no scales."""

    def _write(self, key: Any, value: Any, pools: Pools, slots: Any, shape: Shape, stride: int) -> None:
        ops.reshape_and_cache_bf16(
            self.gpu, self.writer, key, value, pools.keys, pools.values, slots,
            *shape, stride, stride, self.stream,
        )  # fmt: skip

    def _single_pass(self, q: Any, pools: Pools, out: Any, lookup: Lookup) -> None:
        ops.paged_decode_attn_bf16(
            self.gpu, self.single_pass, *self._paged(q, pools, out, lookup), lookup.num_seqs, *self._heads,
            self._q_stride, NO_WINDOW, self.stream, num_blocks=pools.num_blocks,
        )  # fmt: skip

    def _split_k(self, q: Any, pools: Pools, out: Any, lookup: Lookup, num_splits: int) -> None:
        ops.paged_decode_attn_splitk_bf16(
            self.gpu, self.split_k, *self._paged(q, pools, out, lookup), *self._heads, num_splits,
            self._q_stride, lookup.num_seqs, NO_WINDOW, self.stream, num_blocks=pools.num_blocks,
        )  # fmt: skip


class Fp8Kernels(CacheKernels):
    """FP8 cache: one dequantisation scale for all keys of a layer and one for all its values."""

    # Tokens to come may be larger than those seen, the more so the fewer there were, and what exceeds 448
    # times the scale is cut off. E4M3 is a floating-point format: three of its 15 normal binades kept free
    # above the largest value seen cost no precision, only the smallest values.
    headroom = 8.0

    def _write(self, key: Any, value: Any, pools: Pools, slots: Any, shape: Shape, stride: int) -> None:
        ops.reshape_and_cache_fp8(
            self.gpu, self.writer, key, value, pools.keys, pools.values, slots,
            *shape, *pools.scales, stride, stride, self.layout.cache_stride, self.stream,
        )  # fmt: skip

    def _single_pass(self, q: Any, pools: Pools, out: Any, lookup: Lookup) -> None:
        ops.paged_decode_attn_fp8(
            self.gpu, self.single_pass, *self._paged(q, pools, out, lookup), lookup.num_seqs, *self._heads,
            *pools.scales, self._q_stride, self.layout.cache_stride, NO_WINDOW, self.stream,
            num_blocks=pools.num_blocks,
        )  # fmt: skip

    def _split_k(self, q: Any, pools: Pools, out: Any, lookup: Lookup, num_splits: int) -> None:
        ops.paged_decode_attn_splitk_fp8(
            self.gpu, self.split_k, *self._paged(q, pools, out, lookup), *self._heads, num_splits,
            *pools.scales, self._q_stride, self.layout.cache_stride, lookup.num_seqs,
            NO_WINDOW, self.stream, num_blocks=pools.num_blocks,
        )  # fmt: skip


class Nvfp4Kernels(CacheKernels):
    """NVFP4 cache: every 16 values carry a scale of their own, in the block itself."""

    @property
    def _block(self) -> tuple[int, int]:
        return self.layout.block_stride_bytes, self.layout.data_section_bytes

    def _write(self, key: Any, value: Any, pools: Pools, slots: Any, shape: Shape, stride: int) -> None:
        ops.reshape_and_cache_nvfp4(
            self.gpu, self.writer, key, value, pools.keys, pools.values, slots,
            *shape, stride, stride, *self._block, self.stream,
        )  # fmt: skip

    def _single_pass(self, q: Any, pools: Pools, out: Any, lookup: Lookup) -> None:
        ops.paged_decode_attn_nvfp4(
            self.gpu, self.single_pass, *self._paged(q, pools, out, lookup), lookup.num_seqs, *self._heads,
            self._q_stride, *self._block, self.stream, num_blocks=pools.num_blocks,
        )  # fmt: skip

    def _split_k(self, q: Any, pools: Pools, out: Any, lookup: Lookup, num_splits: int) -> None:
        ops.paged_decode_attn_splitk_nvfp4(
            self.gpu, self.split_k, *self._paged(q, pools, out, lookup), *self._heads, num_splits,
            self._q_stride, *self._block, lookup.num_seqs, self.stream, num_blocks=pools.num_blocks,
        )  # fmt: skip


KERNELS: dict[str, type[CacheKernels]] = {"bf16": Bf16Kernels, "fp8": Fp8Kernels, "nvfp4": Nvfp4Kernels}
