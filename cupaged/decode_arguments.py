"""What a decode over a `KVCache` takes from its arrays: sizes and strides. Nothing here synchronises."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError, CheckedModeError, CupagedError
from cupaged.interop import PLAIN_TYPES, backend_array, is_capturing, stream_memory
from cupaged.kv import KVCache
from cupaged.ops._checks import check_scale, check_score_scale, check_shape, check_size
from cupaged.pointers import DevicePtr
from cupaged.registry import dtype_names

_INT32_BYTES = 4
_POOL_SIZES = {"num_seqs", "max_blocks_per_seq"}  # of the form with pools, which has no defaults for them
_CACHE_NAMES = {"output": "out"}  # what the form with pools calls an argument -> what that with a cache does


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
    shape, (flat, q_stride) = tuple(q.shape), _query_rows(q, num_seqs, rows)
    tables, columns, table_stride = _table_rows(gpu, block_tables, num_seqs)
    return CacheCall(flat, tables, seq_lens, shape, num_seqs, columns, q_stride, table_stride)


def call_error(error: Exception, form: Callable[..., Any], given: Sequence[Any], options: Any) -> Exception:
    """The error of a call of `Decoder.decode`, under the names that its arguments were given by."""
    signature = inspect.signature(form)
    over_cache = "cache" in signature.parameters
    if isinstance(error, CupagedError):
        return _renamed(error) if over_cache else error
    try:
        signature.bind(*given, **options)
    except TypeError as misfit:
        if not over_cache and not _POOL_SIZES & options.keys():
            return _no_cache(given, options)
        found = re.search(r"'(\w+)'", str(misfit))
        name = f"{found[1]}: " if found else ""
        takes = "q, cache" if over_cache else "q, k_cache, v_cache"
        return ArgumentTypeError(
            f"{name}{misfit}; decode({takes}, ...) takes {', '.join(signature.parameters)}"
        )
    return error


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


def _renamed(error: CupagedError) -> CupagedError:
    """The error with the names that arguments of the cache form have."""
    text = re.sub(r"\b\w+(?=[:,])", lambda word: _CACHE_NAMES.get(word[0], word[0]), str(error))
    error.args = (text, *error.args[1:])
    if isinstance(error, CheckedModeError):
        error.array = _CACHE_NAMES.get(error.array, error.array)
    return error


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
    gpu.pointer(array)  # it lives on this backend
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
    if q.strides is None or shape[0] == 0:
        return q, heads * head_dim
    step, rest = divmod(q.strides[0], q.dtype.itemsize)
    if rest:
        raise ArgumentValueError(f"q: got {q.strides[0]} bytes between rows, allowed are whole elements")
    return q, int(step) if flat[0] > 1 else heads * head_dim


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
    check_size("output", output, outputs)
    if lse is not None and type(lse) is not int:
        check_shape("lse", lse, (num_q_heads,))
        check_size("lse", lse, outputs // head_dim)
    if sinks is not None:
        check_size("sinks", sinks, num_q_heads)


def backend_arrays(gpu: Any, names: tuple[str, ...], given: tuple[Any, ...], stream: Any) -> tuple[Any, ...]:
    """What was given under these names, other libraries' arrays as the backend's."""
    if PLAIN_TYPES.issuperset(map(type, given)):
        return given
    return tuple(
        backend_array(gpu, name, value, stream, writable=name in ("output", "lse"))
        for name, value in zip(names, given, strict=True)
    )


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
        scales: F32 ``[num_kv_heads]``, or None.
        num_kv_heads: of the cache.

    Raises:
        ArgumentValueError: one that the format has not, or none where it needs one.
    """
    format_name, allowed, needed = rule
    given = scale is not None or scales is not None
    if given and not allowed:
        got = scale if scale is not None else scales
        raise ArgumentValueError(f"{name}: got {got}; a {format_name} cache has none")
    if needed and not given:
        raise ArgumentValueError(
            f"{name}: got None; an {format_name} cache needs it or {name}s, as it was written"
        )
    if scales is not None:
        check_size(f"{name}s", scales, num_kv_heads)
    return 1.0 if scale is None else check_scale(name, scale), 0 if scales is None else scales
