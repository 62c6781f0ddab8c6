"""The cache object."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.formats.layout import checked_size
from cupaged.interop import named_array, stream_memory
from cupaged.kv.layouts import checked_layouts
from cupaged.kv.moves import BlockPools, copy_blocks, host_pools
from cupaged.kv.pools import Pool, check_blocks_apart, pool_of
from cupaged.kv.scales import check_given, scale_of
from cupaged.kv.sources import block_ids_of, check_token_shape, num_tokens_of, token_stride
from cupaged.kv.spans import check_apart, span_of
from cupaged.kv.swap import HostBlocks
from cupaged.kv.tensors import GATHER, CacheTensor, NewTokens, write
from cupaged.launch import as_integer
from cupaged.pointers import DevicePtr

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


class KVCache:
    """Paged K and V pools in device memory.

    Every method queues its work on the stream given and returns; none waits for the device. Arrays may be the
    backend's own or those of any library that `cupaged.interop.device_array` takes.

    Args:
        gpu: the backend.
        layout: of both pools, or of K alone.
        num_blocks: blocks of each pool, which are allocated here and zeroed.
        value_layout: of V, where its format or block stride is another; the sizes must be the same.
        k_scale: dequantisation scale of K: a number, or one for each KV head (a host array or list of
            num_kv_heads, which is checked, or an F32 array on the device, which is not). An FP8 cache needs
            it (`cupaged.calibration` finds one); for NVFP4 it is a second level, 1 by default.
        v_scale: the same of V.

    Attributes:
        gpu: the backend.
        layout: of K.
        value_layout: of V.
        num_blocks: blocks of each pool.
        k_pool: the array of the K pool, or what was given for it.
        v_pool: the same of the V pool.

    Raises:
        ArgumentValueError, ArgumentTypeError: an argument that is not allowed; the message names it.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        layout: CacheLayout,
        num_blocks: int,
        *,
        value_layout: CacheLayout | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        layouts = _checked(layout, value_layout, k_scale, v_scale)
        count = as_integer("num_blocks", num_blocks)
        k, v = (
            pool_of(gpu, "pool", gpu.zeros(each.pool_shape(count), each.pool_dtype), each, None)
            for each in layouts
        )
        # The pools are zero, whatever stream the first write comes on.
        gpu.synchronize()
        self._take(gpu, layouts, k, v, k_scale, v_scale)

    @classmethod
    def wrap(
        cls,
        gpu: GpuBackend,
        layout: CacheLayout,
        k_pool: Any,
        v_pool: Any,
        *,
        value_layout: CacheLayout | None = None,
        num_blocks: int | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        stream: Any = None,
    ) -> KVCache:
        """A cache over pools that the caller owns and fills.

        Args:
            gpu: the backend.
            layout: of both pools, or of K alone. Where blocks do not follow each other tightly (K and V
                interleaved, one layer of a pool of many), its ``block_stride_override`` says how far apart
                they are.
            k_pool: array ``[num_blocks, ...]`` whose blocks are contiguous, with exactly the layout's stride
                between them; a flat array; or an address.
            v_pool: the same of V.
            value_layout: see `KVCache`.
            num_blocks: blocks, where pools are addresses or have more.
            k_scale: see `KVCache`.
            v_scale: see `KVCache`.
            stream: the one that comes after what another library has queued for the pools; the default
                stream where None.

        Raises:
            ArgumentValueError, ArgumentTypeError: a pool that is not what the layout says, or two whose
                blocks share memory.
        """
        layouts = _checked(layout, value_layout, k_scale, v_scale)
        stream = gpu.null_stream() if stream is None else stream
        k, v = (
            pool_of(gpu, name, named_array(gpu, name, pool, stream, writable=True), each, num_blocks)
            for name, pool, each in zip(("k_pool", "v_pool"), (k_pool, v_pool), layouts, strict=True)
        )
        if k.num_blocks != v.num_blocks:
            raise ArgumentValueError(
                f"k_pool, v_pool: got {k.num_blocks} and {v.num_blocks} blocks; give num_blocks"
            )
        check_blocks_apart(k, v, *layouts)
        cache = cls.__new__(cls)
        cache._take(gpu, layouts, k, v, k_scale, v_scale)
        return cache

    @classmethod
    def wrap_interleaved(
        cls,
        gpu: GpuBackend,
        layout: CacheLayout,
        pool: Any,
        *,
        k_scale: Any = None,
        v_scale: Any = None,
        stream: Any = None,
    ) -> KVCache:
        """A cache over one allocation ``[num_blocks, 2, ...]``: K and V of a block next to each other.

        Args:
            gpu: the backend.
            layout: of one pool, as if it were alone; the cache's own has twice its block stride.
            pool: array of the caller's.
            k_scale: see `KVCache`.
            v_scale: see `KVCache`.
            stream: see `wrap`.

        Raises:
            ArgumentValueError, ArgumentTypeError: a pool that is not what the layout says.
        """
        checked_layouts(layout, None)
        order = gpu.null_stream() if stream is None else stream
        pool = named_array(gpu, "pool", pool, order, writable=True)
        if len(getattr(pool, "shape", ())) < 3 or pool.shape[1] != 2:
            raise ArgumentValueError(
                f"pool: got shape {getattr(pool, 'shape', None)}, allowed is [num_blocks, 2, ...]"
            )
        both = dataclasses.replace(layout, block_stride_override=2 * layout.block_stride_bytes)
        return cls.wrap(gpu, both, pool[:, 0], pool[:, 1], k_scale=k_scale, v_scale=v_scale, stream=stream)

    def _take(
        self,
        gpu: GpuBackend,
        layouts: tuple[CacheLayout, CacheLayout],
        k: Pool,
        v: Pool,
        k_scale: Any,
        v_scale: Any,
    ) -> None:
        self.gpu: Any = gpu
        self.layout, self.value_layout = layouts
        self.num_blocks = k.num_blocks
        self.k_pool, self.v_pool = k.array, v.array
        self._k, self._v = CacheTensor("k", layouts[0], k), CacheTensor("v", layouts[1], v)
        if k_scale is not None or v_scale is not None:
            self.set_scales(k_scale, v_scale)

    def __repr__(self) -> str:
        layouts = (
            f"{self.layout}" if self.layout == self.value_layout else f"{self.layout}, {self.value_layout}"
        )
        return f"<KVCache: {self.num_blocks} blocks, {layouts}, on {self.gpu.name}>"

    @property
    def k_cache(self) -> DevicePtr:
        """The K pool as the launchers and `Decoder` take it: a pointer with its size."""
        return self._k.pool.pointer

    @property
    def v_cache(self) -> DevicePtr:
        """The V pool as the launchers and `Decoder` take it."""
        return self._v.pool.pointer

    @property
    def k_scale(self) -> float | None:
        """The one scale of K; None where there is none, or one for each head."""
        return _one_scale(self._k)

    @property
    def v_scale(self) -> float | None:
        """The one scale of V; None where there is none, or one for each head."""
        return _one_scale(self._v)

    @property
    def k_scales(self) -> Any:
        """F32 device array ``[num_kv_heads]`` of scales of K, or None."""
        return None if self._k.scale is None else self._k.scale.heads

    @property
    def v_scales(self) -> Any:
        """F32 device array ``[num_kv_heads]`` of scales of V, or None."""
        return None if self._v.scale is None else self._v.scale.heads

    def set_scales(self, k_scale: Any, v_scale: Any) -> None:
        """Give both scales, before anything is written: what is stored is read with the newest ones."""
        self._k, self._v = (
            self._scaled(tensor, scale) for tensor, scale in ((self._k, k_scale), (self._v, v_scale))
        )

    def _scaled(self, tensor: CacheTensor, scale: Any) -> CacheTensor:
        layout, name = tensor.layout, f"{tensor.name}_scale"
        check_given(layout, name, scale)
        if scale is None:
            return dataclasses.replace(tensor, scale=None)
        return dataclasses.replace(tensor, scale=scale_of(self.gpu, name, scale, layout.num_kv_heads))

    def write(
        self,
        key: Any,
        value: Any,
        slot_mapping: Any,
        *,
        stream: Any,
        num_tokens: int | None = None,
        key_stride: int | None = None,
        value_stride: int | None = None,
    ) -> None:
        """Write new tokens.

        Args:
            key: BF16 ``[num_tokens, num_kv_heads, head_dim]``, any stride between tokens.
            value: the same.
            slot_mapping: int64 ``[num_tokens]``: slot = block * block_size + offset. Negative slots are
                skipped, slots beyond the pools are dropped.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            num_tokens: tokens, where key is an address; the arrays' first axis by default.
            key_stride: elements between tokens of key; as its array has them, contiguous for an address.
            value_stride: the same of value.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        given = (("key", key), ("value", value), ("slot_mapping", slot_mapping))
        key, value, slots = (named_array(self.gpu, name, array, stream) for name, array in given)
        heads, head_dim = self.layout.num_kv_heads, self.layout.head_dim
        check_token_shape("key", key, heads, head_dim)
        check_token_shape("value", value, heads, head_dim)
        row = heads * head_dim
        new = NewTokens(
            key,
            value,
            slots,
            num_tokens_of(num_tokens, key=key, value=value, slot_mapping=slots),
            token_stride("key", key, row) if key_stride is None else key_stride,
            token_stride("value", value, row) if value_stride is None else value_stride,
        )
        write(self.gpu, self._k, self._v, new, stream)

    def gather(
        self,
        block_ids: Any,
        seq_len: int,
        out_k: Any = None,
        out_v: Any = None,
        *,
        stream: Any,
        dtype: npt.DTypeLike = np.float32,
    ) -> tuple[Any, Any]:
        """The dequantised tokens of one sequence, in order.

        Args:
            block_ids: int32 ``[ceil(seq_len / block_size)]`` or more on the device, or a list, which is
                copied there.
            seq_len: tokens.
            out_k: F32 or BF16 ``[seq_len, num_kv_heads, head_dim]``, written; allocated where None.
            out_v: the same of V.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            dtype: of what is allocated, float32 or bfloat16; what is given has its own.

        Returns:
            K and V. A token whose block is outside the pools is NaN.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        seq_len = as_integer("seq_len", seq_len)
        if seq_len < 0:
            raise ArgumentValueError(f"seq_len: got {seq_len}, allowed is 0 or more")
        shape = (seq_len, self.layout.num_kv_heads, self.layout.head_dim)
        ids = block_ids_of(self.gpu, block_ids, stream)
        out_k = self._output("out_k", out_k, shape, dtype, stream)
        out_v = self._output("out_v", out_v, shape, dtype, stream)
        for tensor, output in ((self._k, out_k), (self._v, out_v)):
            tensor.check_output(self.gpu, output)
        self._check_apart(out_k, out_v)
        self._k.gather(self.gpu, ids, out_k, seq_len, stream)
        self._v.gather(self.gpu, ids, out_v, seq_len, stream)
        return out_k, out_v

    def copy_blocks(self, pairs: Any, *, stream: Any) -> None:
        """Copy blocks, K and V, within the pools, in one launch (two where V has a layout of its own).

        Args:
            pairs: (source, target) block ids ``[num_pairs, 2]``: a list or NumPy array (as
                `BlockAllocator.append` gives it; checked, and on a GPU copied there), or another int32 array
                on the device, where pairs with ids outside the pools are left out. No target may be given
                twice or be a source: copies have no order among themselves.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        own = self._block_pools()
        copy_blocks(self.gpu, own, own, pairs, stream)

    def host_blocks(self, num_blocks: int) -> HostBlocks:
        """Pinned memory of the host for so many blocks of this cache, for `swap_out` and `swap_in`."""
        return HostBlocks.allocate(
            self.gpu, self.layout, self.value_layout, checked_size("num_blocks", num_blocks, minimum=0)
        )

    def swap_out(self, pairs: Any, host: HostBlocks, *, stream: Any) -> None:
        """Copy blocks to the host: pairs of (block of the cache, block of `host`), as in `copy_blocks`."""
        own = self._block_pools()
        copy_blocks(self.gpu, own, host_pools(host, own), pairs, stream)

    def swap_in(self, pairs: Any, host: HostBlocks, *, stream: Any) -> None:
        """Copy blocks back: pairs of (block of `host`, block of the cache), as in `copy_blocks`."""
        own = self._block_pools()
        copy_blocks(self.gpu, host_pools(host, own), own, pairs, stream)

    def _block_pools(self) -> BlockPools:
        return BlockPools(self.k_cache, self.v_cache, self.layout, self.value_layout, self.num_blocks)

    def _output(
        self, name: str, given: Any, shape: tuple[int, ...], dtype: npt.DTypeLike, stream: Any
    ) -> Any:
        if given is None:
            _check_output_dtype(dtype)
            with stream_memory(self.gpu, stream):
                return self.gpu.empty(shape, dtype)
        array = named_array(self.gpu, name, given, stream, writable=True)
        if str(getattr(array, "dtype", None)) not in GATHER:
            raise ArgumentTypeError(
                f"{name}: got {getattr(array, 'dtype', type(array).__name__)}, allowed is an array of "
                "float32 or bfloat16"
            )
        if tuple(array.shape) != shape:
            raise ArgumentValueError(f"{name}: got shape {tuple(array.shape)}, allowed is {shape}")
        return array

    def _check_apart(self, out_k: Any, out_v: Any) -> None:
        """What a gather writes is in nobody else's memory."""
        k, v = (span_of(self.gpu, out) for out in (out_k, out_v))
        check_apart("out_k", k, "out_v", v)
        for name, out in (("out_k", k), ("out_v", v)):
            for pool_name, pool in (("k_pool", self.k_cache), ("v_pool", self.v_cache)):
                check_apart(name, out, pool_name, span_of(self.gpu, pool))


def _check_output_dtype(dtype: npt.DTypeLike) -> None:
    try:
        found: Any = np.dtype(dtype)
    except TypeError:
        found = dtype
    if getattr(found, "name", None) not in ("float32", "bfloat16"):
        raise ArgumentTypeError(f"dtype: got {found}, allowed are float32 and bfloat16")


def _one_scale(tensor: CacheTensor) -> float | None:
    scale = tensor.scale
    return None if scale is None or scale.heads is not None else scale.tensor


def _checked(
    layout: CacheLayout, value_layout: CacheLayout | None, k_scale: Any, v_scale: Any
) -> tuple[CacheLayout, CacheLayout]:
    """Layouts of K and V that kernels take, with the scales that their formats need."""
    layouts = checked_layouts(layout, value_layout)
    for name, each, scale in zip(("k_scale", "v_scale"), layouts, (k_scale, v_scale), strict=True):
        check_given(each, name, scale)
    return layouts
