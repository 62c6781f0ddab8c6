"""The decoder: one object that carries what the streaming decode kernels need beside their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from cupaged.checked import in_checked_mode
from cupaged.decode_arguments import cache_call, check_sizes, factor, result_array
from cupaged.decode_kernels import MAX_SEQS, ChunkedKernels, PlannedKernels
from cupaged.decode_layouts import (
    check_layouts,
    chunk_sizes,
    difference,
    in_range,
    is_joined_layout,
    pools_of,
    scale_rule,
)
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import FORMATS, CacheLayout
from cupaged.interop import PLAIN_TYPES, backend_array
from cupaged.kv import KVCache
from cupaged.launch import as_integer
from cupaged.ops._batch import decode_batch
from cupaged.ops._checks import check_num_blocks, check_scale
from cupaged.ops._pools import check_readable
from cupaged.ops.planned import Inputs
from cupaged.registry import DTYPES
from cupaged.registry.decode import planned_spec
from cupaged.registry.rules import MAX_QUERY_TOKENS, gqa_ratio

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_ARRAYS = (
    "q", "k_cache", "v_cache", "block_tables", "seq_lens", "output", "lse", "k_scales", "v_scales", "sinks",
)  # fmt: skip
_ADDRESSES = {int, type(None)}
_QUERY_DTYPES = {"bfloat16": ("bfloat16", "uint16"), "float16": ("float16",)}


class Decoder:
    """Decodes batches over one kind of cache.

    Work is dealt out on the device from ``seq_lens``: no host plan, no synchronisation, and a captured
    graph serves any lengths and tables up to ``max_seqs`` and the table's width. The workspace is allocated
    once, here (which waits for the device), and belongs to one stream at a time: two calls that may run at
    once need two decoders.

    Args:
        gpu: the backend.
        layout: format, KV heads, head_dim, block_size, order and block strides of the pools.
        num_q_heads: query heads, a multiple of the layout's num_kv_heads.
        max_seqs: the most sequences a call may have, up to 2^20.
        value_layout: of the V pool, where it differs from K's in format or strides.
        query_tokens: tokens of each sequence that a call decodes, 1 to 8 (speculative decoding).
        causal: of several query tokens the last is the sequence's newest token, and none sees those after it;
            False: all see the whole sequence.
        q_dtype: "bfloat16" or "float16", of q and the output.
        soft_cap: scores become cap * tanh(score / cap); None: they stay.
        split_tokens: cut sequences into chunks of so many tokens (a multiple of 16) and merge these in their
            order: a sequence's output is then the same bits in any batch. Needs max_blocks_per_seq, which
            sizes its workspace.
        max_blocks_per_seq: the widest table of a call, where split_tokens is given.
        checked: look at the inputs in device memory before each call (`cupaged.checked`), which waits for the
            stream; a bad one raises CheckedModeError.

    Attributes:
        workspace_bytes: device memory that the decoder holds.

    Raises:
        ArgumentValueError, ArgumentTypeError: a shape, a block stride or a combination that is not supported.
        CompileError: the kernel does not compile.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        layout: CacheLayout,
        num_q_heads: int,
        max_seqs: int,
        *,
        value_layout: CacheLayout | None = None,
        query_tokens: int = 1,
        causal: bool = True,
        q_dtype: str = "bfloat16",
        soft_cap: float | None = None,
        split_tokens: int | None = None,
        max_blocks_per_seq: int | None = None,
        checked: bool = False,
    ) -> None:
        value_layout = layout if value_layout is None else value_layout
        check_layouts(layout, value_layout)
        self._num_q_heads = as_integer("num_q_heads", num_q_heads)
        self._max_seqs = in_range("max_seqs", max_seqs, 1, MAX_SEQS)
        self._query_tokens = in_range("query_tokens", query_tokens, 1, MAX_QUERY_TOKENS)
        if q_dtype not in _QUERY_DTYPES:
            raise ArgumentValueError(f"q_dtype: got {q_dtype!r}, allowed are {', '.join(_QUERY_DTYPES)}")
        self._q_dtype = q_dtype
        self._soft_cap = 0.0 if soft_cap is None else check_scale("soft_cap", soft_cap)
        self._layout = layout
        self._pools = tuple(pools_of(x) for x in (layout, value_layout))
        self._strides = (
            layout.block_stride_bytes,
            value_layout.block_stride_bytes,
            layout.data_section_bytes if layout.format.name == "nvfp4" else 0,
            value_layout.data_section_bytes if value_layout.format.name == "nvfp4" else 0,
        )
        self._scaled = tuple(scale_rule(x) for x in (layout, value_layout))
        self._gpu: Any = gpu
        self._rows = (self._query_tokens, self._num_q_heads, layout.head_dim)
        self._value_layout = value_layout
        rows, pools = _QUERY_DTYPES[q_dtype], [DTYPES[name] for name, _, _ in self._scaled]
        self._dtypes = {"q": rows, "output": rows, "k_cache": pools[0], "v_cache": pools[1]}
        self._default_scale = layout.head_dim**-0.5
        spec = planned_spec(
            key_format=FORMATS.index(layout.format),
            value_format=FORMATS.index(value_layout.format),
            head_dim=layout.head_dim,
            gqa_ratio=gqa_ratio(self._num_q_heads, layout.num_kv_heads),
            num_kv_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            heads_first=int(layout.heads_first),
            joined=int(is_joined_layout(layout) and is_joined_layout(value_layout)),
            query_tokens=self._query_tokens,
            causal=int(causal and self._query_tokens > 1),
            soft_cap=int(soft_cap is not None),
            query_f16=int(q_dtype == "float16"),
        )
        self._kernels: PlannedKernels | ChunkedKernels
        if split_tokens is None:
            if max_blocks_per_seq is not None:
                raise ArgumentValueError(
                    f"max_blocks_per_seq: got {max_blocks_per_seq}, but only split_tokens needs one"
                )
            self._kernels = PlannedKernels(gpu, spec, self._max_seqs)
        else:
            self._kernels = ChunkedKernels(
                gpu, spec, self._max_seqs, *chunk_sizes(split_tokens, max_blocks_per_seq, layout)
            )

        self._launch = in_checked_mode(self._kernels.launch) if checked else self._kernels.launch

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the decoder holds."""
        return self._kernels.workspace_bytes

    @classmethod
    def for_cache(cls, cache: KVCache, num_q_heads: int, max_seqs: int, **features: Any) -> Decoder:
        """A decoder of a cache's backend and layouts; features as `Decoder` takes them by keyword."""
        if not isinstance(cache, KVCache):
            raise ArgumentTypeError(f"cache: got {type(cache).__name__}, allowed is a KVCache")
        layouts = {"value_layout": cache.value_layout, **features}
        return cls(cache.gpu, cache.layout, num_q_heads, max_seqs, **layouts)

    @overload
    def decode(
        self,
        q: Any,
        cache: KVCache,
        block_tables: Any,
        seq_lens: Any,
        out: Any = None,
        *,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        sinks: Any = None,
    ) -> Any: ...

    @overload
    def decode(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        output: Any,
        *,
        num_seqs: int,
        max_blocks_per_seq: int,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        q_stride: int | None = None,
        table_stride: int | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        k_scales: Any = None,
        v_scales: Any = None,
        sinks: Any = None,
        num_blocks: int | None = None,
    ) -> None: ...

    def decode(self, q: Any, *arrays: Any, **options: Any) -> Any:
        """Decode the query tokens of each sequence: over a `KVCache`, or over pools with every size given.

        ``decode(q, cache, block_tables, seq_lens, out=None, *, stream, ...)`` takes the sizes from the
        arrays, pools and scales from the cache. ``decode(q, k_cache, v_cache, block_tables, seq_lens,
        output, *, num_seqs, max_blocks_per_seq, stream, ...)`` takes addresses too and costs the host least.

        Arrays are the backend's own, or those of any library that `cupaged.interop.device_array` takes.
        Neither form waits for the device; both may be captured.

        Args:
            q: ``[num_seqs, num_q_heads, head_dim]`` or ``[num_seqs * num_q_heads, head_dim]``, of q_dtype;
                with query_tokens, ``[num_seqs, query_tokens, num_q_heads, head_dim]``. With a cache, of
                three or four axes, and any stride between query tokens (q sliced out of packed QKV).
            cache: of the decoder's backend and layouts.
            out: with a cache, like q, contiguous, written; allocated in the stream's memory where None,
                which a stream that is being captured does not allow.
            k_cache, v_cache: pools of the decoder's layout.
            block_tables: int32 ``[num_seqs, max_blocks_per_seq]``; with a cache, rows any stride apart.
            seq_lens: int32 ``[num_seqs]``, all query tokens included.
            output: like q, contiguous, written.
            num_seqs: sequences of this call, at most ``max_seqs``.
            max_blocks_per_seq: columns of block_tables.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            lse: F32, a number for each row of the output, written where given: the natural logarithm of the
                sum of exponentials of the scaled scores (and the sink); -inf for an empty sequence.
            softmax_scale: factor on q k, 1 / sqrt(head_dim) by default.
            sliding_window: newest tokens attended, counted from each query token; 0 attends to all.
            q_stride: elements between query tokens of q, num_q_heads * head_dim by default.
            table_stride: entries between rows of block_tables, max_blocks_per_seq by default; 0 where all
                sequences have the same row.
            k_scale, v_scale: dequantisation scales for all heads. An FP8 cache needs each, or the one below:
                those it was written with. For NVFP4 they are a second level, 1 by default.
            k_scales, v_scales: F32 ``[num_kv_heads]``, scales by head.
            sinks: F32 ``[num_q_heads]``: a score for each head that takes part in the softmax and has no
                value.
            num_blocks: size of the pools; an id outside makes its row NaN.

        Returns:
            With a cache, out; else None.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        if isinstance(arrays[0] if arrays else options.get("cache"), KVCache):
            return self._decode_cache(q, *arrays, **options)
        self.decode_pools(q, *arrays, **options)
        return None

    def _decode_cache(
        self,
        q: Any,
        cache: KVCache,
        block_tables: Any,
        seq_lens: Any,
        out: Any = None,
        *,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        sinks: Any = None,
    ) -> Any:
        self.check_cache(cache)
        call = cache_call(self._gpu, q, block_tables, seq_lens, self._rows, stream)
        result = result_array(self._gpu, "out", out, call, self._q_dtype, stream)
        self.decode_pools(
            call.q,
            cache.k_cache,
            cache.v_cache,
            call.block_tables,
            call.seq_lens,
            result,
            num_seqs=call.num_seqs,
            max_blocks_per_seq=call.max_blocks_per_seq,
            stream=stream,
            lse=lse,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            q_stride=call.q_stride,
            table_stride=call.table_stride,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
            sinks=sinks,
            num_blocks=cache.num_blocks,
        )
        return result if out is None else out

    def check_num_seqs(self, num_seqs: int) -> None:
        """Raise ArgumentValueError for more sequences than a call may have."""
        if not 0 <= as_integer("num_seqs", num_seqs) <= self._max_seqs:
            raise ArgumentValueError(f"num_seqs: got {num_seqs}, this decoder takes 0 to {self._max_seqs}")

    def check_cache(self, cache: KVCache) -> None:
        """Raise ArgumentValueError for a cache of another backend or of other layouts."""
        if cache.gpu is not self._gpu:
            raise ArgumentValueError(f"cache: got {cache!r}, allowed is one on the decoder's backend")
        for name, got, own in (
            ("layout", cache.layout, self._layout),
            ("value_layout", cache.value_layout, self._value_layout),
        ):
            if got is not own and got != own:
                raise ArgumentValueError(f"cache: its {name} has {difference(got, own)}")

    def decode_pools(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        output: Any,
        *,
        num_seqs: int,
        max_blocks_per_seq: int,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        q_stride: int | None = None,
        table_stride: int | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        k_scales: Any = None,
        v_scales: Any = None,
        sinks: Any = None,
        num_blocks: int | None = None,
    ) -> None:
        """The second form of `decode`, whose arguments are explained there; here it costs the host least."""
        layout = self._layout
        self.check_num_seqs(num_seqs)
        scale = self._default_scale if softmax_scale is None else check_scale("softmax_scale", softmax_scale)
        batch = decode_batch(
            max_blocks_per_seq,
            num_seqs,
            self._num_q_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            self._num_q_heads * layout.head_dim if q_stride is None else q_stride,
            self._query_tokens,
        )
        given = (q, k_cache, v_cache, block_tables, seq_lens, output, lse, k_scales, v_scales, sinks)
        if _ADDRESSES.issuperset(map(type, given)):
            blocks = check_num_blocks(None if num_blocks is None else as_integer("num_blocks", num_blocks))
        else:
            given = self._arrays(given, stream)
            q, k_cache, v_cache, block_tables, seq_lens, output, lse, k_scales, v_scales, sinks = given
            batch.check(q, block_tables, seq_lens, scale, table_stride)
            self._check_dtypes(q=q, k_cache=k_cache, v_cache=v_cache, output=output)
            check_sizes(self._rows, output, lse, sinks, batch.outputs)
            blocks = min(
                self._pools[0].blocks_of(num_blocks, "k_cache", k_cache),
                self._pools[1].blocks_of(num_blocks, "v_cache", v_cache),
            )
        k_factor, k_scales = factor("k_scale", self._scaled[0], k_scale, k_scales, layout.num_kv_heads)
        v_factor, v_scales = factor("v_scale", self._scaled[1], v_scale, v_scales, layout.num_kv_heads)
        if num_seqs == 0:
            return
        check_readable(blocks)
        inputs = Inputs(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            k_scales,
            v_scales,
            batch.q_stride,
            *self._strides,
            max_blocks_per_seq if table_stride is None else table_stride,
            max_blocks_per_seq,
            num_seqs,
            blocks,
            sliding_window,
            scale * k_factor,
            v_factor,
            self._soft_cap,
        )
        self._launch(inputs, output, 0 if lse is None else lse, 0 if sinks is None else sinks, stream)

    def _arrays(self, given: tuple[Any, ...], stream: Any) -> tuple[Any, ...]:
        """What was given, other libraries' arrays as the backend's."""
        if PLAIN_TYPES.issuperset(map(type, given)):
            return given
        return tuple(
            backend_array(self._gpu, name, value, stream, writable=name in ("output", "lse"))
            for name, value in zip(_ARRAYS, given, strict=True)
        )

    def _check_dtypes(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            dtype = getattr(array, "dtype", None)
            if dtype is None or isinstance(array, np.generic):
                continue  # an address
            if str(dtype) not in self._dtypes[name]:
                allowed = ", ".join(self._dtypes[name])
                raise ArgumentTypeError(f"{name}: got dtype {dtype}, this decoder takes {allowed}")
