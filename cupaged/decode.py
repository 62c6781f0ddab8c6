"""The decoder: one object that carries what the streaming decode kernels need beside their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from cupaged.checked import in_checked_mode
from cupaged.decode_arguments import (
    CacheCall,
    cache_call,
    call_error,
    check_dtypes,
    check_lse,
    check_sizes,
    factor,
    names_misfits,
    result_array,
    score_factor,
    window_of,
)
from cupaged.decode_kernels import MAX_SEQS, kernels_of
from cupaged.decode_layouts import (
    chunk_sizes,
    difference,
    dtypes_of,
    layout_spec,
    pools_of,
    scale_rule,
    strides_of,
)
from cupaged.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, KernelFault
from cupaged.formats import CacheLayout
from cupaged.interop import backend_arrays, check_backend
from cupaged.kv import KVCache
from cupaged.kv.layouts import checked_layouts
from cupaged.launch import as_integer, flag, in_range
from cupaged.ops._batch import decode_batch
from cupaged.ops._checks import check_num_blocks, check_scale, check_score_scale
from cupaged.ops._pools import check_readable
from cupaged.ops._warm import WarmCalls
from cupaged.ops.planned import Inputs
from cupaged.registry.rules import MAX_GROUP_TOKENS, MAX_QUERY_TOKENS, gqa_ratio

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_ARRAYS = (
    "q", "k_cache", "v_cache", "block_tables", "seq_lens", "output", "lse", "k_scales", "v_scales", "sinks",
)  # fmt: skip
_WRITTEN = ("output", "lse")
_ADDRESSES = {int, type(None)}
_NO_OPTIONS: dict[str, Any] = {}


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
        query_tokens: tokens of each sequence that a call decodes, 1 to 8 (speculative decoding), or to 24
            where causal is False.
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

    @names_misfits()
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
        check_backend(gpu)
        layout, value_layout = checked_layouts(layout, value_layout)
        self._num_q_heads = as_integer("num_q_heads", num_q_heads)
        self._max_seqs = in_range("max_seqs", max_seqs, 1, MAX_SEQS)
        most = MAX_QUERY_TOKENS if flag("causal", causal) else MAX_GROUP_TOKENS
        self._query_tokens = in_range("query_tokens", query_tokens, 1, most)
        self._q_dtype = q_dtype
        self._soft_cap = 0.0 if soft_cap is None else check_scale("soft_cap", soft_cap)
        self._layout = layout
        self._pools = tuple(pools_of(x) for x in (layout, value_layout))
        self._strides = strides_of(layout, value_layout)
        self._scaled = tuple(scale_rule(x) for x in (layout, value_layout))
        self._gpu: Any = gpu
        self._rows = (self._query_tokens, self._num_q_heads, layout.head_dim)
        self._value_layout = value_layout
        self._dtypes = dtypes_of(q_dtype, layout, value_layout)
        self._default_scale = layout.head_dim**-0.5
        spec = layout_spec(
            layout,
            value_layout,
            gqa_ratio=gqa_ratio(self._num_q_heads, layout.num_kv_heads),
            query_tokens=self._query_tokens,
            causal=int(causal and self._query_tokens > 1),
            soft_cap=int(soft_cap is not None),
            query_f16=int(q_dtype == "float16"),
        )
        chunks = chunk_sizes(split_tokens, max_blocks_per_seq, layout)
        self._kernels = kernels_of(gpu, spec, self._max_seqs, chunks)
        launch = self._kernels.launch
        self._launch = in_checked_mode(launch) if flag("checked", checked) else launch
        self._calls, self._cache_calls = (WarmCalls(gpu, _ARRAYS) for _ in range(2))

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the decoder holds."""
        return self._kernels.workspace_bytes

    @classmethod
    @names_misfits()
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
        sliding_window: int | None = 0,
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
        sliding_window: int | None = 0,
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
            sliding_window: newest tokens attended, counted from each query token; 0 or None: all.
            q_stride: elements between query tokens of q, num_q_heads * head_dim by default.
            table_stride: entries between rows of block_tables, max_blocks_per_seq by default; 0 where all
                sequences have the same row.
            k_scale, v_scale: dequantisation scales for all heads. An FP8 cache needs each, or the one below:
                those it was written with. For NVFP4 they are a second level, 1 by default.
            k_scales, v_scales: F32 ``[num_kv_heads]``, scales by head.
            sinks: F32 ``[num_q_heads]``: a score for each head that takes part in the softmax and has no
                value; finite, or -inf for none (`cupaged.checked` looks).
            num_blocks: size of the pools; an id outside makes its row NaN.

        Returns:
            With a cache, out; else None.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        over_cache = isinstance(arrays[0] if arrays else options.get("cache"), KVCache)
        form = self._decode_cache if over_cache else self.decode_pools
        try:
            return form(q, *arrays, **options)
        except (TypeError, ValueError) as error:
            raise call_error(error, form, (q, *arrays), options) from error.__cause__

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
        sliding_window: int | None = 0,
        sinks: Any = None,
    ) -> Any:
        self.check_cache(cache)
        k_scale, v_scale, k_scales, v_scales = cache.k_scale, cache.v_scale, cache.k_scales, cache.v_scales
        call: CacheCall | None = None
        if out is None:
            call = cache_call(self._gpu, q, block_tables, seq_lens, self._rows, stream)
            out = result_array(self._gpu, "out", None, call, self._q_dtype, stream)

        def anew() -> None:
            found = call or cache_call(self._gpu, q, block_tables, seq_lens, self._rows, stream)
            result = result_array(self._gpu, "out", out, found, self._q_dtype, stream)
            scalars = (
                found.num_seqs, found.max_blocks_per_seq, softmax_scale, sliding_window, found.q_stride,
                found.table_stride, k_scale, v_scale, cache.num_blocks,
            )  # fmt: skip
            given = (found.q, cache.k_cache, cache.v_cache, found.block_tables, found.seq_lens, result)
            check_lse(lse, found.num_seqs, self._rows)
            self._decode_anew(scalars, (*given, lse, k_scales, v_scales, sinks), stream)

        given = (q, cache.k_cache, cache.v_cache, block_tables, seq_lens, out, lse, k_scales, v_scales, sinks)
        scalars = (softmax_scale, sliding_window, k_scale, v_scale, cache.num_blocks)
        self._run(self._cache_calls, scalars, given, stream, anew)
        return out

    def check_num_seqs(self, num_seqs: int) -> None:
        """Raise ArgumentValueError for more sequences than a call may have."""
        if not 0 <= as_integer("num_seqs", num_seqs) <= self._max_seqs:
            raise ArgumentValueError(f"num_seqs: got {num_seqs}, this decoder takes 0 to {self._max_seqs}")

    def check_cache(self, cache: KVCache) -> None:
        """Raise ArgumentValueError for a cache of another backend or of other layouts."""
        if cache.gpu is not self._gpu:
            raise ArgumentValueError("cache: got one on another backend, allowed is one on the decoder's")
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
        sliding_window: int | None = 0,
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
        scalars = (
            num_seqs, max_blocks_per_seq, softmax_scale, sliding_window, q_stride, table_stride, k_scale,
            v_scale, num_blocks,
        )  # fmt: skip
        given = (q, k_cache, v_cache, block_tables, seq_lens, output, lse, k_scales, v_scales, sinks)
        self._run(self._calls, scalars, given, stream, lambda: self._decode_anew(scalars, given, stream))

    def _run(
        self,
        calls: WarmCalls,
        scalars: tuple[Any, ...],
        given: tuple[Any, ...],
        stream: Any,
        anew: Callable[[], None],
    ) -> None:
        key = (*given, *scalars, stream)
        try:
            if type(given[0]) is not int or not calls.again(key, _NO_OPTIONS):
                calls.call(key, _NO_OPTIONS, scalars, given, stream, anew)
        except KernelFault:
            self._kernels.restore(stream)
            raise
        except ArgumentError as error:
            error.leave_out_kernel()
            raise

    def _decode_anew(self, scalars: tuple[Any, ...], given: tuple[Any, ...], stream: Any) -> None:
        """Check everything and launch."""
        (
            num_seqs, max_blocks_per_seq, softmax_scale, sliding_window, q_stride, table_stride, k_scale,
            v_scale, num_blocks,
        ) = scalars  # fmt: skip
        layout = self._layout
        self.check_num_seqs(num_seqs)
        scale = self._default_scale if softmax_scale is None else softmax_scale
        scale = check_score_scale("softmax_scale", scale)
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
        # As ints: products of NumPy's integers overflow.
        num_seqs, max_blocks_per_seq = batch.num_seqs, batch.max_blocks_per_seq
        stride = max_blocks_per_seq if table_stride is None else as_integer("table_stride", table_stride)
        window = window_of(sliding_window)
        is_bare = _ADDRESSES.issuperset(map(type, given))
        if not is_bare:
            named = dict(zip(_ARRAYS, given, strict=True))
            given = tuple(backend_arrays(self._gpu, named, stream, _WRITTEN).values())
        q, k_cache, v_cache, block_tables, seq_lens, output, lse, k_scales, v_scales, sinks = given
        if is_bare:
            blocks = check_num_blocks(None if num_blocks is None else as_integer("num_blocks", num_blocks))
        else:
            batch.check(q, block_tables, seq_lens, scale, stride)
            check_dtypes(self._dtypes, q=q, k_cache=k_cache, v_cache=v_cache, output=output)
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
            q, k_cache, v_cache, block_tables, seq_lens, k_scales, v_scales, batch.q_stride, *self._strides,
            stride, max_blocks_per_seq, num_seqs, blocks, window, score_factor(scale, k_factor),
            v_factor, self._soft_cap,
        )  # fmt: skip
        self._launch(inputs, output, 0 if lse is None else lse, 0 if sinks is None else sinks, stream)
