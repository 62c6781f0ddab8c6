"""What streaming asks of its arguments before anything runs. Nothing here synchronises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from cupaged.decode_layouts import pools_of
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.interop import backend_array
from cupaged.launch import in_range
from cupaged.ops._checks import check_shape, check_size
from cupaged.pointers import DevicePtr
from cupaged.registry import DTYPES, dtype_names

MOST_BLOCKS = 2**31 - 1  # block ids are int32
MOST_BYTES = 1 << 48  # of one allocation; more than any GPU or host has
MOST_RANKS = 1 << 16
_MOST_ADDRESS = 2**64 - 1
_MOST_TOKENS = 2**31 - 1  # of a sequence, as kernels count them

_Choice = TypeVar("_Choice")


def of_format(choices: Mapping[str, _Choice], fmt: CacheFormat | str) -> _Choice:
    """What a table by format names has for a format.

    Raises:
        ArgumentValueError: it has nothing for it.
    """
    name = fmt if isinstance(fmt, str) else fmt.name
    if name not in choices:
        raise ArgumentValueError(f"layout: its format is {name!r}, allowed are {', '.join(choices)}")
    return choices[name]


def check_callable(name: str, value: Any) -> None:
    """Raise ArgumentTypeError for a callback that is given and cannot be called."""
    if value is not None and not callable(value):
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed is a callable or None")


def items(name: str, value: Any, of: str) -> list[Any]:
    """What can be iterated over on the host, as a list.

    Raises:
        ArgumentTypeError: it cannot.
    """
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return list(value)
    raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed is a sequence of {of}")


def lengths_of(name: str, value: Any, most: int) -> np.ndarray:
    """Tokens of each sequence, given on the host, as int64: each 0 to `most`."""
    if hasattr(value, "__cuda_array_interface__"):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed are integers on the host")
    most = min(most, _MOST_TOKENS)
    return np.array([in_range(name, n, 0, most) for n in items(name, value, "integers")], np.int64)


def device_rows(
    gpu: Any,
    name: str,
    value: Any,
    holds: str,
    count: int,
    row: tuple[int, ...],
    stream: int,
    *,
    writable: bool = False,
) -> DevicePtr:
    """`count` rows of device memory, one right behind the other, that an argument gives.

    Args:
        gpu: the backend.
        name: of the argument.
        value: an array ``[n, *row]`` or flat, of the backend or lent; a `DevicePtr`; or an address.
        holds: what is in it, a key of `cupaged.registry.DTYPES`.
        count: rows that are used; an array may have more.
        row: shape of a row.
        stream: that they are used on.
        writable: whether they are written.

    Returns:
        The rows that are used: never more than an array or a `DevicePtr` has.

    Raises:
        ArgumentTypeError: no device memory, or another dtype.
        ArgumentValueError: too few elements, another shape, or gaps between elements.
    """
    elements = count * math.prod(row)
    num_bytes = elements * np.dtype(DTYPES[holds][-1]).itemsize
    array = backend_array(gpu, name, value, stream, writable=writable)
    if isinstance(array, DevicePtr):
        if array.nbytes is not None and array.nbytes < num_bytes:
            raise ArgumentValueError(f"{name}: got {array.nbytes} bytes, needed are {num_bytes}")
        return DevicePtr(array.address, num_bytes)
    if isinstance(array, (int, np.integer)):
        return DevicePtr(in_range(name, array, 0, _MOST_ADDRESS), num_bytes)
    check_dtype(name, array, holds)
    check_shape(name, array, row)
    check_size(name, array, elements)
    _check_tight(name, array)
    return DevicePtr(int(gpu.pointer(array)), num_bytes)


def device_pool(gpu: Any, name: str, value: Any, layout: CacheLayout, num_blocks: int, stream: int) -> Any:
    """A pool of K or V that an argument gives, as a launcher takes it: with its own size where it has one.

    Raises:
        ArgumentTypeError: no device memory, or another dtype.
        ArgumentValueError: a pool of other blocks, or of fewer.
    """
    pool = backend_array(gpu, name, value, stream)
    if isinstance(pool, (int, np.integer)) and not isinstance(pool, bool):
        reach = max(0, num_blocks - 1) * layout.block_stride_bytes + layout.block_bytes
        return DevicePtr(in_range(name, pool, 0, _MOST_ADDRESS), reach)
    if not isinstance(pool, DevicePtr):
        check_dtype(name, pool, layout.format.name)
    pools_of(layout).blocks_of(num_blocks, name, pool)
    return pool


def check_dtype(name: str, array: Any, holds: str) -> None:
    """Raise ArgumentTypeError unless this is an array of what a kernel reads."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not hasattr(array, "shape"):
        raise ArgumentTypeError(
            f"{name}: got {type(array).__name__}, allowed is an array, an address or a DevicePtr"
        )
    if str(dtype) not in DTYPES[holds]:
        raise ArgumentTypeError(f"{name}: got dtype {dtype}, allowed: {dtype_names(DTYPES[holds])}")


def _check_tight(name: str, array: Any) -> None:
    """Raise ArgumentValueError where elements do not follow each other."""
    strides, shape = getattr(array, "strides", None), tuple(array.shape)
    if strides is None or 0 in shape:
        return
    expected = array.dtype.itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            raise ArgumentValueError(
                f"{name}: got strides {tuple(strides)} (bytes) for shape {shape}, allowed is C order without "
                "gaps"
            )
        expected *= length
