"""What launchers check before a launch, beyond what the kernel registry knows. Nothing here synchronises.

Objects given for pointers are checked for size; bare ints are taken at their word.
"""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import checked_scale
from cupaged.handle import KernelHandle
from cupaged.interop import PLAIN_TYPES, backend_arrays
from cupaged.launch import as_integer
from cupaged.ops._warm import WarmCalls
from cupaged.pointers import DevicePtr
from cupaged.registry import DTYPES, MAX_GRID_YZ, dtype_names

__all__ = [
    "UNLIMITED_BLOCKS",
    "UNLIMITED_SLOTS",
    "check_each",
    "check_fp8_scales",
    "check_heads",
    "check_kernel",
    "check_num_blocks",
    "check_positive",
    "check_row_stride",
    "check_rows",
    "check_scale",
    "check_score_scale",
    "check_shape",
    "check_size",
    "check_splits",
    "check_stride",
    "item_bytes",
    "launcher",
    "remembered",
    "takes_arrays",
]

# Without a pool size, every id that is not negative is taken to be inside.
UNLIMITED_BLOCKS = 2**31 - 1
UNLIMITED_SLOTS = 2**63 - 1
_LOG2_E = 1.4426950408889634
_FLOAT32_MAX = 3.4028234663852886e38


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_MAX_REMEMBERED = 4096  # results of one function, each a few hundred bytes


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Parameter name -> what it is annotated with, whether that stands in the source as text or not."""
    # Backends are imported for type checkers alone.
    hints = typing.get_type_hints(function, localns={"GpuBackend": object})
    return {name: hints[name] for name in inspect.signature(function).parameters}


def _members(hint: Any) -> frozenset[Any]:
    """The types of a union; a type by itself is one. A default of None may have joined them."""
    return frozenset(typing.get_args(hint)) or frozenset({hint})


_INTEGER, _OPTIONAL_INTEGER = frozenset({int}), frozenset({int, type(None)})


def remembered(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Keeps what a check of integers returned, so that the same ones again cost one look-up.

    The integers arrive as ints: products of NumPy integers overflow, and what is no integer would fail in
    them without a name (None stays, where the annotation allows it). Types are told apart (True is not 1),
    and errors are not kept. Positional arguments only.
    """
    parameters = _parameters_of(function)
    optional = [(name, _members(hint) == _OPTIONAL_INTEGER) for name, hint in parameters.items()]

    def converted(*given: Any) -> _Result:
        integers = [
            None if may_be_none and value is None else as_integer(name, value)
            for (name, may_be_none), value in zip(optional, given, strict=False)
        ]
        return function(*integers)  # type: ignore[arg-type, call-arg]

    kept = functools.lru_cache(maxsize=_MAX_REMEMBERED, typed=True)(converted)

    @functools.wraps(function)
    def called(*given: Any) -> _Result:
        try:
            return kept(*given)
        except TypeError as error:
            if isinstance(error, ArgumentTypeError):
                raise
        return converted(*given)  # one of them cannot be hashed, as a NumPy array of no dimensions

    return cast(Callable[_Parameters, _Result], called)


def launcher(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Makes a function the launcher of the kernel that has its name.

    The convenient form. The launchers of writes, and of decode in one pass or by splits, do the same with
    `check_kernel` and `remembered` sizes, which takes half the time. The handle given must be that kernel's.
    Parameters annotated as int arrive as int: products of NumPy integers overflow, and what is no integer
    would fail in them without a name.
    """
    kinds = {name: _members(hint) for name, hint in _parameters_of(function).items()}
    integers = [(i, name) for i, (name, kind) in enumerate(kinds.items()) if kind == _INTEGER]
    optional = [name for name, kind in kinds.items() if kind == _OPTIONAL_INTEGER]

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        given: list[Any] = list(args)
        for position, name in integers:
            if position >= len(given):
                if name in kwargs:
                    kwargs[name] = as_integer(name, kwargs[name])
            elif type(given[position]) is not int:
                given[position] = as_integer(name, given[position])
        for name in optional:
            if kwargs.get(name) is not None:
                kwargs[name] = as_integer(name, kwargs[name])
        check_kernel(given[1] if len(given) > 1 else kwargs.get("kernel"), function.__name__)
        function(*given, **kwargs)

    return takes_arrays(checked)


def takes_arrays(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Lets a launcher take arrays of any library for its pointers, in the order of their streams.

    What `cupaged.interop.device_array` takes becomes an array of the backend, before the launcher checks it.
    Pointers are the parameters annotated Any, the stream apart. A call like one that its handle has seen is
    launched at once (`cupaged.ops._warm`).
    """
    arguments = _Arguments(function)
    needed, optional = arguments.needed, arguments.optional
    pointers_of, scalars_of = arguments.pointers_of, arguments.scalars_of
    are_addresses = frozenset({int, type(None)}).issuperset

    @functools.wraps(function)
    def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        if len(args) != needed:
            ordered = arguments.in_order(args, kwargs)
            if ordered is None:
                function(*args, **kwargs)  # which raises Python's own error
                return
            args, kwargs = ordered  # type: ignore[assignment]
        kernel = args[1]
        if type(kernel) is not KernelHandle or kernel.gpu is not args[0]:
            arguments.call(args, kwargs)  # which says so
            return
        calls = kernel.calls.get(function) or arguments.calls_of(kernel)
        if type(args[2]) is int and calls.again(args, kwargs):
            return
        if optional and not are_addresses(map(type, map(kwargs.get, optional))):
            arguments.call(args, kwargs)
            return
        calls.call(
            args, kwargs, scalars_of(args), pointers_of(args), args[-1], lambda: arguments.call(args, kwargs)
        )

    return called


class _Arguments:
    """The arguments of a launcher: gpu and kernel, pointers and scalars, the stream, and those by keyword.

    Attributes:
        needed: how many come by position, the stream the last of them.
        pointers_of, scalars_of: take those out of the arguments by position.
        optional: names of the pointers that come by keyword.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        parameters = _parameters_of(function)
        self._names = list(parameters)
        self._pointers = [
            name for name, hint in parameters.items() if Any in _members(hint) and name != "stream"
        ]
        stream_at = self._names.index("stream")
        self.needed = stream_at + 1
        self._by_position = self._names[: self.needed]
        self.optional = [name for name in self._pointers if name not in self._by_position]
        places = range(2, stream_at)
        self.pointers_of = _several([i for i in places if self._names[i] in self._pointers])
        self.scalars_of = _several([i for i in places if self._names[i] not in self._pointers])

    def calls_of(self, kernel: KernelHandle) -> WarmCalls:
        """What a handle keeps of calls of this launcher."""
        names = self.pointers_of(tuple(self._names))
        found: WarmCalls = kernel.calls.setdefault(self._function, WarmCalls(kernel.gpu, names))
        return found

    def in_order(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The same arguments, by position as far as they can be; None where they do not fit the launcher."""
        given = dict(zip(self._by_position, args, strict=False)) | kwargs
        if len(given) != len(args) + len(kwargs) or not given.keys() >= set(self._by_position):
            return None
        return tuple(given.pop(name) for name in self._by_position), given

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the launcher itself, other libraries' arrays as the backend's."""
        given = (*self.pointers_of(args), *map(kwargs.get, self.optional))
        if not PLAIN_TYPES.issuperset(map(type, given)):
            named = dict(zip(self._by_position, args, strict=True)) | kwargs
            pointers = {name: named[name] for name in self._pointers if name in named}
            named |= _backend_arrays(pointers, named)
            args, kwargs = tuple(named.pop(name) for name in self._by_position), named
        self._function(*args, **kwargs)


def _several(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What stands at these positions, as a tuple also where it is one."""
    if len(positions) == 1:
        return lambda given: (given[positions[0]],)
    return operator.itemgetter(*positions)


def _backend_arrays(pointers: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The pointers of a launch that are given, as the backend has them."""
    kernel = given.get("kernel")
    known = kernel.parameters if isinstance(kernel, KernelHandle) else ()
    written = {parameter.name for parameter in known if not parameter.const}
    return backend_arrays(given["gpu"], pointers, given["stream"], written)


def check_kernel(kernel: object, entry: str) -> None:
    """The handle is that of the package's kernel of this name."""
    if not isinstance(kernel, KernelHandle):
        raise ArgumentTypeError(f"kernel: got {kernel!r}, allowed is a handle that gpu.kernel made")
    if kernel.entry != entry or kernel.known is None:
        raise ArgumentValueError(f"kernel: got {kernel!r}, this launcher launches {entry}")


def check_positive(**sizes: int) -> None:
    """Sizes are at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentValueError(f"{name}: got {size}, allowed is 1 or more")


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """A whole number of query heads for each KV head."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {num_q_heads}, {num_kv_heads}; "
            "num_q_heads must be a positive multiple of num_kv_heads"
        )


def _is_array(value: Any) -> bool:
    """True for objects that know how many elements they have, and are no address."""
    if type(value) is int or isinstance(value, np.generic):
        return False
    return isinstance(getattr(value, "size", None), int)


def item_bytes(kernel: KernelHandle, name: str) -> int:
    """Bytes of an element of what one of the kernel's own pointers holds."""
    return np.dtype(DTYPES[kernel.known.holds[name]][-1]).itemsize if kernel.known else 1


def _check_reach(name: str, pointer: Any, num_bytes: int) -> None:
    """A pointer that knows its size, and is not null, reaches that far."""
    if type(pointer) is not DevicePtr or pointer.nbytes is None or pointer.address == 0:
        return
    if pointer.nbytes < num_bytes:
        raise ArgumentValueError(f"{name}: got {pointer.nbytes} bytes, needed are {num_bytes}")


def check_size(name: str, value: Any, needed: int, element_bytes: int = 4) -> None:
    """An array holds at least that many elements, or a sized pointer as many of element_bytes bytes."""
    if type(value) is int:
        return
    _check_reach(name, value, needed * element_bytes)
    if _is_array(value) and value.size < needed:
        raise ArgumentValueError(f"{name}: got {value.size} elements, needed are {needed}")


def check_each(name: str, value: Any, count: int) -> None:
    """An array has shape ``[count]`` exactly, one number for each head; a sized pointer has room for them."""
    shape = getattr(value, "shape", None) if _is_array(value) else None
    if shape is None:
        check_size(name, value, count)
        return
    if str(value.dtype) not in DTYPES["f32"]:
        raise ArgumentTypeError(f"{name}: got dtype {value.dtype}, allowed: {dtype_names(DTYPES['f32'])}")
    if tuple(shape) != (count,):
        raise ArgumentValueError(
            f"{name}: got shape {tuple(shape)}, allowed is ({count},), a number for each head"
        )


def check_shape(name: str, array: Any, tail: tuple[int, ...]) -> None:
    """An array with one axis more than `tail` has that shape behind its first; a flat one may be anything."""
    shape = getattr(array, "shape", None) if _is_array(array) else None
    if shape is not None and len(shape) == len(tail) + 1 and tuple(shape[1:]) != tail:
        allowed = ", ".join(map(str, ("n", *tail)))
        raise ArgumentValueError(
            f"{name}: got shape {tuple(shape)}, allowed is [{allowed}]; give a flat array for another layout"
        )


def check_row_stride(
    name: str, stride: int, row: int, count: int, array: Any, array_name: str, element_bytes: int = 2
) -> None:
    """Rows do not overlap, and an array's own stride agrees with the one given.

    A row may be one entry of the array's first axis or, in an array of two axes, several that lie together:
    q as ``[num_seqs * num_q_heads, head_dim]``.
    """
    strides = getattr(array, "strides", None) if _is_array(array) else None
    if count > 1 and strides and len(strides) > 1 and array.shape[0] > 1:
        own = strides[0] / array.dtype.itemsize
        if len(strides) == 2 and own == array.shape[1] and row % own == 0:
            own = row  # contiguous, so where one row ends the next begins
        if own != stride:
            raise ArgumentValueError(
                f"{name}: got {stride}, but {array_name} has {own:g} elements between rows"
            )
    check_rows(name, stride, row, count, array, array_name, element_bytes)


def check_rows(
    name: str, stride: int, row: int, count: int, array: Any, array_name: str, element_bytes: int = 2
) -> None:
    """Rows do not overlap, and an array or a sized pointer reaches to the end of the last one."""
    if stride < row and count > 1:
        raise ArgumentValueError(f"{name}: got {stride}, a row has {row} elements")
    needed = (count - 1) * stride + row if count > 0 and row > 0 else 0
    _check_reach(array_name, array, needed * element_bytes)
    if not _is_array(array):
        return
    reach = array.size
    if reach and getattr(array, "strides", None):
        steps = zip(array.shape, array.strides, strict=True)
        reach = 1 + sum((length - 1) * abs(step) for length, step in steps) // array.dtype.itemsize
    if reach < needed:
        raise ArgumentValueError(f"{array_name}: reaches over {reach} elements, needed are {needed}")


def check_stride(name: str, stride: int, needed: int) -> None:
    """Blocks do not overlap."""
    if stride < needed:
        raise ArgumentValueError(f"{name}: got {stride}, a block needs {needed}")


def check_scale(name: str, value: Any) -> float:
    """A factor that is finite and above 0 as float32, which it is rounded to when it is packed."""
    if type(value) is float and 1e-30 < value < 1e30:
        return value  # what most are, told quickly
    return checked_scale(name, value)


def check_score_scale(name: str, value: Any, k_scale: float = 1.0) -> float:
    """A softmax scale: `check_scale`, and finite times k_scale and log2(e) too, as scores are scaled."""
    scale = check_scale(name, value)
    if not scale * k_scale * _LOG2_E <= _FLOAT32_MAX:
        times = "" if k_scale == 1.0 else f"k_scale, {k_scale}, and "
        raise ArgumentValueError(
            f"{name}: got {value}, which times {times}log2(e) is beyond float32; allowed is up to "
            f"{_FLOAT32_MAX / _LOG2_E / k_scale:.6g}"
        )
    return scale


def check_fp8_scales(inv_sqrt_d: Any, k_scale: Any, v_scale: Any) -> tuple[float, float]:
    """Dequantisation scales of K and V, and the softmax scale with them."""
    k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
    check_score_scale("inv_sqrt_d", inv_sqrt_d, k_scale)
    return k_scale, v_scale


def check_splits(num_splits: int) -> None:
    """As many splits as a grid has along z."""
    if not 1 <= num_splits <= MAX_GRID_YZ:
        raise ArgumentValueError(f"num_splits: got {num_splits}, allowed is 1 to {MAX_GRID_YZ}")


def check_num_blocks(num_blocks: int | None) -> int:
    """The pool size given, or the largest there can be."""
    blocks = UNLIMITED_BLOCKS if num_blocks is None else num_blocks
    if not 0 <= blocks <= UNLIMITED_BLOCKS:
        raise ArgumentValueError(f"num_blocks: got {num_blocks}, allowed is 0 to {UNLIMITED_BLOCKS}")
    return blocks
