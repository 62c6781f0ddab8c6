"""What a decode over a `KVCache` takes from its arrays: sizes and strides. Nothing here synchronises."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from cupaged.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from cupaged.interop import backend_array, is_capturing, stream_memory
from cupaged.kv import KVCache
from cupaged.launch import as_integer
from cupaged.ops._checks import check_each, check_scale, check_score_scale, check_size
from cupaged.pointers import DevicePtr, is_null
from cupaged.registry import dtype_names

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_INT32_BYTES = 4
_MAX_WINDOW = 2**32 - 1
_POOL_SIZES = {"num_seqs", "max_blocks_per_seq"}  # of the form with pools, which has no defaults for them
_MOST_WITH_CACHE = 5  # arguments by position of the form with a cache
_CACHE_NAMES = {"output": "out"}  # the kernels' name, and that of the form with pools -> that with a cache


class CacheCall(NamedTuple):
    """Arguments of a decode, sizes included.

    Attributes:
        q: ``[num_seqs * query_tokens, num_q_heads, head_dim]``.
        block_tables: an array of contiguous rows, or a pointer where rows are further apart.
        seq_lens: int32 ``[num_seqs]``.
        shape: of q as it was given.
        others: as `Decoder.decode` takes them.
    """

    q: Any
    block_tables: Any
    seq_lens: Any
    shape: tuple[int, ...]
    num_seqs: int
    max_blocks_per_seq: int
    q_stride: int
    table_stride: int


def cache_call(
    gpu: Any, q: Any, block_tables: Any, seq_lens: Any, rows: tuple[int, int, int], stream: Any
) -> CacheCall:
    """The call that these arrays describe.

    Args:
        gpu: the backend.
        q: see `Decoder.decode`.
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``.
        seq_lens: int32 ``[num_seqs]``.
        rows: query tokens, query heads and head_dim of the decoder.
        stream: that the arrays are going to be read on.

    Raises:
        ArgumentTypeError: something that is no array, or tables of another dtype.
        ArgumentValueError: shapes or strides that do not belong together.
    """
    q, block_tables, seq_lens = (
        sized(gpu, name, array, stream)
        for name, array in (("q", q), ("block_tables", block_tables), ("seq_lens", seq_lens))
    )
    if len(seq_lens.shape) != 1:
        raise ArgumentValueError(f"seq_lens: got shape {tuple(seq_lens.shape)}, allowed is [num_seqs]")
    num_seqs = int(seq_lens.shape[0])
    _check_counts(q, block_tables, num_seqs, rows)
    shape, (flat, q_stride) = tuple(q.shape), _query_rows(q, num_seqs, rows)
    tables, columns, table_stride = _table_rows(gpu, block_tables, num_seqs)
    return CacheCall(flat, tables, seq_lens, shape, num_seqs, columns, q_stride, table_stride)


def _check_counts(q: Any, block_tables: Any, num_seqs: int, rows: tuple[int, int, int]) -> None:
    """Raise ArgumentValueError about seq_lens where both others agree on another number of sequences."""
    shape = tuple(q.shape)
    if shape[1:] == rows[1:]:
        others, rest = divmod(shape[0], rows[0])
    else:
        others, rest = (shape[0], 0) if shape[1:] == rows else (num_seqs, 0)
    if others != num_seqs and not rest and block_tables.shape[:1] == (others,):
        raise ArgumentValueError(
            f"seq_lens: got shape ({num_seqs},), allowed is ({others},): q and block_tables are of {others} "
            "sequences"
        )


def call_error(error: Exception, form: Callable[..., Any], given: Sequence[Any], options: Any) -> Exception:
    """The error of a call of `Decoder.decode`, under the names that its arguments were given by."""
    parameters = inspect.signature(form).parameters
    over_cache = "cache" in parameters
    if isinstance(error, ArgumentError):
        if over_cache:
            error.rename(_CACHE_NAMES)
        return error
    misfit = _misfit(parameters, given, options)
    if misfit is None:
        return error
    of_pools = len(given) > _MOST_WITH_CACHE or _POOL_SIZES & options.keys()
    if not over_cache and not of_pools:
        return _no_cache(given, options)
    takes = "q, cache" if over_cache else "q, k_cache, v_cache"
    return ArgumentTypeError(f"{misfit}; decode({takes}, ...) takes {', '.join(parameters)}")


def _misfit(
    parameters: Mapping[str, inspect.Parameter], given: Sequence[Any], options: Mapping[str, Any]
) -> str | None:
    """Why Python cannot call a function of these parameters so, the argument's name first; None if it can."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    parameters = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    places = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(given) > len(places):
        return f"got {len(given)} arguments without a name, which are too many positional arguments"
    by_place = places[: len(given)]
    needed = [name for name, p in parameters.items() if p.default is p.empty]
    found = {
        "given twice": [name for name in by_place if name in options],
        "unexpected keyword": [name for name in options if name not in parameters and not takes_any],
        "missing": [name for name in needed if name not in (*by_place, *options)],
    }
    return next((f"{', '.join(names)}: {fault}" for fault, names in found.items() if names), None)


def names_misfits(
    **reasons: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Arguments that a method has not, or that are missing, raise an ArgumentTypeError that begins with them.

    Args:
        **reasons: an argument that the method does not take -> why.
    """

    def decorate(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        _, *named = inspect.signature(method).parameters.items()  # without self
        parameters = dict(named)
        takes = ", ".join(f"**{x}" if p.kind is p.VAR_KEYWORD else x for x, p in named)
        called = method.__qualname__.removesuffix(".__init__")

        @functools.wraps(method)
        def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return method(*args, **kwargs)
            except TypeError as error:
                if isinstance(error, ArgumentError):
                    raise
                misfit = _misfit(parameters, args[1:], kwargs)
                if misfit is None:
                    raise
                told = "".join(f"; {reason}" for name, reason in reasons.items() if name in kwargs)
                text = f"{misfit}{told}; {called} takes {takes}"
            raise ArgumentTypeError(text)

        return checked

    return decorate


def _no_cache(given: Sequence[Any], options: Mapping[str, Any]) -> ArgumentTypeError:
    """The error of a call with neither a cache in its place nor the sizes of pools."""
    if isinstance(given[0], KVCache):
        return ArgumentTypeError(
            "q: got KVCache, allowed is an array; the cache comes second, decode(q, cache)"
        )
    second = [*given[1:2], *(options[name] for name in ("cache", "k_cache") if name in options)]
    got = type(second[0]).__name__ if second else "nothing"
    sizes = ", ".join(f"{name}=" for name in sorted(_POOL_SIZES, reverse=True))
    return ArgumentTypeError(f"cache: got {got}, allowed is a KVCache (or both pools and {sizes})")


def sized(gpu: Any, name: str, value: Any, stream: Any, *, writable: bool = False) -> Any:
    """An array of the backend over `value`, which must know its shape.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no array, or one that this backend cannot use.
    """
    array = backend_array(gpu, name, value, stream, writable=writable)
    if not hasattr(array, "shape") or not hasattr(array, "strides"):
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}, allowed is an array of the backend; addresses go with both "
            "pools and the sizes in place of the cache"
        )
    try:
        gpu.pointer(array)  # it lives on this backend
    except ArgumentError as error:
        error.rename({"pointer": name})
        raise
    return array


def result_array(gpu: Any, name: str, given: Any, call: CacheCall, dtype: str, stream: Any) -> Any:
    """Where the result of a call goes: the array given, or a new one of q's shape in the stream's memory.

    Raises:
        ArgumentValueError: another shape, or nothing given while the stream is being captured.
        ArgumentTypeError: no array.
    """
    if given is None:
        if is_capturing(gpu, stream):
            raise ArgumentValueError(
                f"{name}: got None while the stream is being captured; allocate it before the capture"
            )
        with stream_memory(gpu, stream):
            return gpu.empty(call.shape, dtype)
    array = sized(gpu, name, given, stream, writable=True)
    if tuple(array.shape) not in (call.shape, tuple(call.q.shape)):
        raise ArgumentValueError(f"{name}: got shape {tuple(array.shape)}, q has {call.shape}")
    return array


def contiguous(array: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A view of that shape of an array that is written.

    Raises:
        ArgumentValueError: another size, or strides that no view has.
    """
    if array.size != math.prod(shape):
        raise ArgumentValueError(f"{name}: got shape {tuple(array.shape)}, needed are {shape}")
    if not array.flags.c_contiguous:
        raise ArgumentValueError(f"{name}: got strides {array.strides} (bytes), allowed is C order")
    return array.reshape(shape)


def _query_rows(q: Any, num_seqs: int, rows: tuple[int, int, int]) -> tuple[Any, int]:
    """q as ``[num_seqs * query_tokens, num_q_heads, head_dim]``, and elements between its rows."""
    tokens, heads, head_dim = rows
    shape = tuple(q.shape)
    flat = (num_seqs * tokens, heads, head_dim)
    if shape not in (flat, (num_seqs, *rows)):
        allowed = " or ".join(map(str, dict.fromkeys(((num_seqs, *rows), flat))))
        raise ArgumentValueError(
            f"q: got shape {shape}, allowed is {allowed} for the {num_seqs} sequences of seq_lens"
        )
    if len(shape) == 4:
        if num_seqs > 1 and tokens > 1 and q.strides is not None and q.strides[0] != tokens * q.strides[1]:
            raise ArgumentValueError(
                f"q: got strides {q.strides} (bytes) for shape {shape}; query tokens must be equally far "
                "apart"
            )
        q = q[:, 0] if tokens == 1 else q.reshape(flat)
    if q.strides is None or flat[0] < 2:
        return q, heads * head_dim
    step, rest = divmod(q.strides[0], q.dtype.itemsize)
    if rest or step < heads * head_dim:
        raise ArgumentValueError(
            f"q: got strides {q.strides} (bytes) for shape {shape}; from a query token to the next, allowed "
            f"are whole elements, and {heads * head_dim} or more"
        )
    return q, int(step)


def _table_rows(gpu: Any, tables: Any, num_seqs: int) -> tuple[Any, int, int]:
    """The tables as launches take them, their columns, and entries between rows."""
    if len(tables.shape) != 2 or tables.shape[0] != num_seqs:
        raise ArgumentValueError(
            f"block_tables: got shape {tuple(tables.shape)}, allowed is [{num_seqs}, max_blocks_per_seq], a "
            "row for each of seq_lens"
        )
    columns = int(tables.shape[1])
    row = _INT32_BYTES * columns
    if num_seqs < 2 or tables.strides is None or tables.strides[0] == row or not columns:
        return tables, columns, columns
    if str(tables.dtype) != "int32":
        raise ArgumentTypeError(f"block_tables: got dtype {tables.dtype}, allowed: int32")
    between, within = tables.strides
    if between < 0 or between % _INT32_BYTES or (columns > 1 and within != _INT32_BYTES):
        raise ArgumentValueError(
            f"block_tables: got strides {tables.strides} (bytes), allowed are contiguous rows of int32"
        )
    reach = (num_seqs - 1) * between + row
    return DevicePtr(gpu.pointer(tables), reach), columns, between // _INT32_BYTES


def check_sizes(rows: tuple[int, int, int], output: Any, lse: Any, sinks: Any, outputs: int) -> None:
    """What a decoder of these rows writes, `outputs` elements of them, has room; the sinks are all there."""
    _, num_q_heads, head_dim = rows
    check_size("output", output, outputs, 2)
    shape = _shape_of(lse)
    if shape is not None and len(shape) > 1 and shape[-1] != num_q_heads:
        raise ArgumentValueError(
            f"lse: got shape {shape}, allowed are rows of {num_q_heads}, a number for each query head"
        )
    check_size("lse", lse, outputs // head_dim)
    check_each("sinks", sinks, num_q_heads)


def check_lse(lse: Any, num_seqs: int, rows: tuple[int, int, int]) -> None:
    """Raise ArgumentValueError for an array that has not a number for each row of the output; see `rows`."""
    tokens, heads, _ = rows
    allowed = dict.fromkeys(
        ((num_seqs * tokens, heads), (num_seqs, tokens, heads), (num_seqs * tokens * heads,))
    )
    shape = _shape_of(lse)
    if shape is not None and shape not in allowed:
        raise ArgumentValueError(f"lse: got shape {shape}, allowed is {' or '.join(map(str, allowed))}")


def _shape_of(array: Any) -> tuple[int, ...] | None:
    """None for an address, of which nothing is known, and for what is left out."""
    return None if isinstance(array, np.generic) or not hasattr(array, "shape") else tuple(array.shape)


def window_of(sliding_window: Any) -> int:
    """Newest tokens attended, as kernels take them: 0 for all."""
    window = 0 if sliding_window is None else as_integer("sliding_window", sliding_window)
    if not 0 <= window <= _MAX_WINDOW:
        raise ArgumentValueError(
            f"sliding_window: got {window}, allowed is 1 to {_MAX_WINDOW} newest tokens; 0 is no window"
        )
    return window


def check_dtypes(allowed: Mapping[str, tuple[str, ...]], **arrays: Any) -> None:
    """Arrays have one of the dtypes that are allowed for their names; addresses have none."""
    for name, array in arrays.items():
        check_dtype(name, array, allowed[name])


def check_dtype(name: str, array: Any, allowed: Sequence[str]) -> None:
    """Raise ArgumentTypeError for an array of another dtype; an address has none."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or isinstance(array, np.generic) or str(dtype) in allowed:
        return
    raise ArgumentTypeError(f"{name}: got dtype {dtype}, this decoder takes {dtype_names(allowed)}")


def score_factor(softmax_scale: float, k_factor: float) -> float:
    """What products of q and stored keys are multiplied by.

    Raises:
        ArgumentValueError: beyond float32 in the kernels' units, which are those of base-2 logarithms.
    """
    return check_score_scale("softmax_scale", softmax_scale, k_factor) * k_factor


def factor(
    name: str, rule: tuple[str, bool, bool], scale: float | None, scales: Any, num_kv_heads: int
) -> tuple[float, Any]:
    """A scale's factor for all heads and the pointer to those by head.

    Args:
        name: of the argument.
        rule: of the cache's format, from `cupaged.decode_layouts.scale_rule`.
        scale: for all heads, or None.
        scales: F32 ``[num_kv_heads]``, or None; a null pointer is none either.
        num_kv_heads: of the cache.

    Raises:
        ArgumentValueError: one that the format has not, or none where it needs one.
    """
    format_name, allowed, needed = rule
    if is_null(scales):
        scales = None
    given = scale is not None or scales is not None
    if given and not allowed:
        got = scale if scale is not None else scales
        raise ArgumentValueError(f"{name}: got {got}; a {format_name} cache has none")
    if needed and not given:
        raise ArgumentValueError(
            f"{name}: got None; an {format_name} cache needs it or {name}s, as it was written"
        )
    check_each(f"{name}s", scales, num_kv_heads)
    return 1.0 if scale is None else check_scale(name, scale), 0 if scales is None else scales
