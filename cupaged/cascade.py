"""Decode of sequences that share a prefix: its K and V are read once for many rows, then merged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupaged.decode import Decoder
from cupaged.decode_arguments import (
    CacheCall,
    cache_call,
    check_dtype,
    check_lse,
    contiguous,
    names_misfits,
    result_array,
    sized,
)
from cupaged.decode_layouts import layout_spec
from cupaged.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, CheckedModeError
from cupaged.formats import CacheLayout
from cupaged.interop import backend_array, is_capturing, stream_memory, to_device
from cupaged.kv import KVCache
from cupaged.kv.layouts import checked_layouts
from cupaged.kv.spans import check_apart, span_of
from cupaged.launch import as_integer, before_launch
from cupaged.merge import merge_states
from cupaged.pointers import DevicePtr
from cupaged.registry import div_ceil
from cupaged.registry.decode import group_tokens
from cupaged.registry.rules import gqa_ratio

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_BF16 = ("bfloat16", "uint16")
# What the decoder of the prefix is given under these names, as the caller knows it.
_PREFIX_NAMES = {"block_tables": "prefix_table", "seq_lens": "prefix_len"}
_NO_WINDOW = "a window would have to know each suffix's length"


class _Prefix(NamedTuple):
    """The table's one row, and a length for each group."""

    cache: KVCache
    table: Any
    lens: Any


class CascadeDecoder:
    """Decodes batches whose sequences all begin with the same tokens.

    The prefix is decoded for groups of rows of q (a row is a query token of a sequence), the rest of each
    sequence (its suffix) by itself, and both are merged by their LSE. That pays where a prefix is long
    against the suffixes and has several readers; two decoders, two partial results and a merge cost three
    launches. Workspace as of `Decoder`, and two partial results: it belongs to one stream at a time.

    Args:
        gpu: the backend.
        layout: see `Decoder`.
        num_q_heads: query heads, a multiple of the layout's num_kv_heads.
        max_seqs: the most sequences a call may have.
        value_layout: see `Decoder`.
        query_tokens: tokens of each sequence that a call decodes, 1 to 8, causal among themselves.
        soft_cap: see `Decoder`.

    Attributes:
        workspace_bytes: device memory that it holds.
        group_rows: rows of q that read the prefix together: as many as one warp has query heads for.

    Raises:
        ArgumentValueError, ArgumentTypeError: see `Decoder`.
    """

    @names_misfits(
        q_dtype="queries are BF16, as partial results are",
        causal="it always is",
        sliding_window=_NO_WINDOW,
        split_tokens="a result depends on the batch's groups",
        checked="cupaged.checked_mode() is for all calls",
    )
    def __init__(
        self,
        gpu: GpuBackend,
        layout: CacheLayout,
        num_q_heads: int,
        max_seqs: int,
        *,
        value_layout: CacheLayout | None = None,
        query_tokens: int = 1,
        soft_cap: float | None = None,
    ) -> None:
        features: dict[str, Any] = {"value_layout": value_layout, "soft_cap": soft_cap}
        self._gpu: Any = gpu
        self._suffix = Decoder(gpu, layout, num_q_heads, max_seqs, query_tokens=query_tokens, **features)
        num_q_heads = as_integer("num_q_heads", num_q_heads)
        self._rows = (as_integer("query_tokens", query_tokens), num_q_heads, layout.head_dim)
        self._block_size = layout.block_size
        # A decoder takes a group for the query tokens of one sequence, all of which see all of it.
        ratio = gqa_ratio(num_q_heads, layout.num_kv_heads)
        self.group_rows = group_tokens(
            layout_spec(*checked_layouts(layout, value_layout), gqa_ratio=ratio, query_tokens=2)
        )
        groups = self._groups(as_integer("max_seqs", max_seqs))
        self._prefix = Decoder(
            gpu, layout, num_q_heads, groups, query_tokens=self.group_rows, causal=False, **features
        )
        rows = groups * self.group_rows
        self._outputs = gpu.empty((2, rows, *self._rows[1:]), "bfloat16")
        self._lses = gpu.empty((2, rows, num_q_heads), "float32")
        self._padded = gpu.zeros((rows, *self._rows[1:]), "bfloat16")
        self._lens: tuple[int, Any] = (-1, None)
        gpu.synchronize()  # the padding is zero, whatever stream the first call comes on

    @classmethod
    @names_misfits()
    def for_cache(
        cls, cache: KVCache, num_q_heads: int, max_seqs: int, *, query_tokens: int = 1, **features: Any
    ) -> CascadeDecoder:
        """One of a cache's backend and layouts."""
        if not isinstance(cache, KVCache):
            raise ArgumentTypeError(f"cache: got {type(cache).__name__}, allowed is a KVCache")
        layouts = {"value_layout": cache.value_layout, **features}
        return cls(cache.gpu, cache.layout, num_q_heads, max_seqs, query_tokens=query_tokens, **layouts)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that it holds."""
        own = sum(int(array.nbytes) for array in (self._outputs, self._lses, self._padded))
        return self._suffix.workspace_bytes + self._prefix.workspace_bytes + own

    @names_misfits(sliding_window=_NO_WINDOW)
    def decode(
        self,
        q: Any,
        cache: KVCache,
        prefix_table: Any,
        prefix_len: Any,
        block_tables: Any,
        seq_lens: Any,
        out: Any = None,
        *,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sinks: Any = None,
    ) -> Any:
        """Decode the query tokens of each sequence.

        Args:
            q: BF16 ``[num_seqs, num_q_heads, head_dim]``, or with query_tokens
                ``[num_seqs, query_tokens, num_q_heads, head_dim]``; any stride between query tokens.
            cache: of the layouts given.
            prefix_table: int32 ``[max_prefix_blocks]``: blocks of the prefix, which begins each sequence.
            prefix_len: tokens of the prefix: an int, whose copy to the device is queued where it is another
                than the last call's (before a capture, call once); or int32
                ``[ceil(num_seqs * query_tokens / group_rows)]`` on the device, all of the same value, which a
                captured graph reads anew.
            block_tables: int32 ``[num_seqs, max_blocks_per_seq]``: blocks of the suffixes.
            seq_lens: int32 ``[num_seqs]``: tokens of the suffixes, query tokens included.
            out: like q, contiguous, written; allocated in the stream's memory where None.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            lse: F32, a number for each row of the output, as of `Decoder.decode` over the whole sequences.
            softmax_scale: factor on q k, 1 / sqrt(head_dim) by default.
            sinks: F32 ``[num_q_heads]``, see `Decoder.decode`.

        Returns:
            out.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        if not isinstance(cache, KVCache):
            raise ArgumentTypeError(f"cache: got {type(cache).__name__}, allowed is a KVCache")
        self._suffix.check_cache(cache)
        call = cache_call(self._gpu, q, block_tables, seq_lens, self._rows, stream)
        check_dtype("q", call.q, _BF16)
        groups = self._groups(call.num_seqs)
        self._suffix.check_num_seqs(call.num_seqs)
        table = self._table(prefix_table, stream)
        lens = self._prefix_lens(prefix_len, groups, int(table.shape[0]), stream)
        target = result_array(self._gpu, "out", out, call, "bfloat16", stream)
        check_dtype("out", target, _BF16)
        rows = call.num_seqs * self._rows[0]
        lse = None if lse is None else self._lse(lse, call.num_seqs, stream)
        merged = contiguous(target, "out", (rows, *self._rows[1:]))
        if rows:
            sinks = backend_array(self._gpu, "sinks", sinks, stream)
            read = {
                "prefix_table": table,
                "prefix_len": lens,
                "block_tables": call.block_tables,
                "seq_lens": call.seq_lens,
                "sinks": sinks,
                "cache.k_cache": cache.k_cache,
                "cache.v_cache": cache.v_cache,
            }
            self._check_memory({"out": merged, "lse": lse}, read)
            options = {"softmax_scale": softmax_scale, "stream": stream, **_cache_options(cache)}
            self._decode_suffix(call, cache, options | {"sinks": sinks})
            self._decode_prefix(call, _Prefix(cache, table, lens), options)
            parts = (self._outputs[:, :rows], self._lses[:, :rows])
            merge_states(self._gpu, *parts, merged, lse, stream=stream)
        return target if out is None else out

    def _lse(self, given: Any, num_seqs: int, stream: Any) -> Any:
        """Where the LSE goes, a row for each query token."""
        lse = sized(self._gpu, "lse", given, stream, writable=True)
        check_dtype("lse", lse, ("float32",))
        check_lse(lse, num_seqs, self._rows)
        tokens, heads, _ = self._rows
        return contiguous(lse, "lse", (num_seqs * tokens, heads))

    def _check_memory(self, written: dict[str, Any], read: dict[str, Any]) -> None:
        """Raise where results share memory with each other or, in checked mode, with what is read.

        The launches write the workspace before the merge writes these, so what it finds comes too late.
        """
        spans = {name: span_of(self._gpu, x) for name, x in written.items() if x is not None}
        if len(spans) == 2:
            check_apart("out", spans["out"], "lse", spans["lse"])
        if before_launch.get() is None:
            return
        known = {name: x for name, x in read.items() if hasattr(x, "shape") or isinstance(x, DevicePtr)}
        for other, array in known.items():
            for name, span in spans.items():
                try:
                    check_apart(name, span, other, span_of(self._gpu, array))
                except ArgumentValueError as error:
                    raise CheckedModeError(str(error), array=name) from None

    def _table(self, prefix_table: Any, stream: Any) -> Any:
        table = sized(self._gpu, "prefix_table", prefix_table, stream)
        if len(table.shape) != 1:
            raise ArgumentValueError(
                f"prefix_table: got shape {tuple(table.shape)}, allowed is [max_prefix_blocks]"
            )
        check_dtype("prefix_table", table, ("int32",))
        return contiguous(table, "prefix_table", tuple(table.shape))

    def _prefix_lens(self, prefix_len: Any, groups: int, table_blocks: int, stream: Any) -> Any:
        """int32 ``[groups]``, a length for each group of rows."""
        array = backend_array(self._gpu, "prefix_len", prefix_len, stream)
        if hasattr(array, "shape") and not isinstance(array, np.generic):
            if tuple(array.shape) != (groups,):
                raise ArgumentValueError(
                    f"prefix_len: got shape {tuple(array.shape)}, allowed is ({groups},), one for each "
                    f"{self.group_rows} rows of q"
                )
            check_dtype("prefix_len", array, ("int32",))
            return contiguous(array, "prefix_len", (groups,))
        length, room = as_integer("prefix_len", prefix_len), table_blocks * self._block_size
        if not 0 <= length < 2**31:
            raise ArgumentValueError(f"prefix_len: got {length}, allowed is 0 to {2**31 - 1}")
        if length > room:
            raise ArgumentValueError(
                f"prefix_len: got {length}, but the {table_blocks} blocks of prefix_table, of "
                f"{self._block_size} tokens each, have room for {room}"
            )
        if self._lens[0] != length:
            if is_capturing(self._gpu, stream):
                raise ArgumentValueError(
                    f"prefix_len: got {length} while the stream is being captured; call once before the "
                    "capture, or give an array on the device"
                )
            most = self._outputs.shape[1] // self.group_rows
            self._lens = (length, to_device(self._gpu, np.full(most, length, np.int32), stream))
        return self._lens[1][:groups]

    def _decode_suffix(self, call: CacheCall, cache: KVCache, options: dict[str, Any]) -> None:
        rows = call.num_seqs * self._rows[0]
        self._suffix.decode_pools(
            call.q,
            cache.k_cache,
            cache.v_cache,
            call.block_tables,
            call.seq_lens,
            self._outputs[1, :rows],
            num_seqs=call.num_seqs,
            max_blocks_per_seq=call.max_blocks_per_seq,
            lse=self._lses[1, :rows],
            q_stride=call.q_stride,
            table_stride=call.table_stride,
            **options,
        )

    def _groups(self, num_seqs: int) -> int:
        """Groups of the rows of so many sequences."""
        return div_ceil(num_seqs * self._rows[0], self.group_rows)

    def _whole_groups(self, call: CacheCall, stream: Any) -> tuple[Any, int]:
        """q with as many rows as its groups have, and its stride: where it lies, or a longer copy.

        What is spare is zero: a warp's rows round alike, so an earlier call's would show in the last bits.
        """
        rows = call.num_seqs * self._rows[0]
        if rows % self.group_rows == 0:
            return call.q, call.q_stride
        with stream_memory(self._gpu, stream):
            self._padded[:rows] = call.q.view(self._padded.dtype)
            self._padded[rows : self._groups(call.num_seqs) * self.group_rows] = 0
        return self._padded, self._rows[1] * self._rows[2]

    def _decode_prefix(self, call: CacheCall, prefix: _Prefix, options: dict[str, Any]) -> None:
        groups = self._groups(call.num_seqs)
        rows = groups * self.group_rows
        q, q_stride = self._whole_groups(call, options["stream"])
        try:
            self._prefix.decode_pools(
                q,
                prefix.cache.k_cache,
                prefix.cache.v_cache,
                prefix.table,
                prefix.lens,
                self._outputs[0, :rows],
                num_seqs=groups,
                max_blocks_per_seq=int(prefix.table.shape[0]),
                lse=self._lses[0, :rows],
                q_stride=q_stride,
                table_stride=0,
                **options,
            )
        except ArgumentError as error:
            error.rename(_PREFIX_NAMES)
            if isinstance(error, CheckedModeError) and error.array == "prefix_table" and error.index:
                raise _in_one_row(error, error.index[-1]) from None
            raise


def _in_one_row(error: CheckedModeError, index: int) -> CheckedModeError:
    """What is wrong with a table of all groups, by the index in the one row that the caller gave."""
    message = f"{error.array}[{index}]: {error.detail.partition(': ')[2]}"
    return CheckedModeError(message, array=error.array, index=(index,), value=error.value)


def _cache_options(cache: KVCache) -> dict[str, Any]:
    """Scales and size of a cache, as `Decoder.decode` takes them."""
    return {
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "k_scales": cache.k_scales,
        "v_scales": cache.v_scales,
        "num_blocks": cache.num_blocks,
    }
