"""What a cache takes from the arrays and lists that it is given: sizes of new tokens, ids of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.interop import named_array, to_device
from cupaged.launch import as_integer
from cupaged.pointers import DevicePtr


def num_tokens_of(given: int | None, **arrays: Any) -> int:
    """Tokens of a write: as given, or what all arrays agree on."""
    if given is not None:
        return as_integer("num_tokens", given)
    counts = {name: array.shape[0] for name, array in arrays.items() if getattr(array, "shape", ())}
    if not counts:
        raise ArgumentValueError("num_tokens: got None, and no array tells how many; addresses need it")
    if len(set(counts.values())) != 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ArgumentValueError(f"num_tokens: the arrays' first axes differ: {found}")
    return int(next(iter(counts.values())))


def token_stride(name: str, array: Any, row: int) -> int:
    """Elements between tokens, from an array's strides; `row` where it has none."""
    if isinstance(array, np.generic):
        return row  # an address
    strides, shape = getattr(array, "strides", None), getattr(array, "shape", None)
    if shape is not None and len(shape) < 2:
        raise ArgumentValueError(f"{name}: got shape {tuple(shape)}, allowed is [num_tokens, ...]")
    if not strides or shape is None or shape[0] < 2:
        return row
    step, rest = divmod(strides[0], array.dtype.itemsize)
    if rest:
        raise ArgumentValueError(f"{name}: got {strides[0]} bytes between tokens, allowed are whole elements")
    return int(step)


def check_token_shape(name: str, array: Any, num_kv_heads: int, head_dim: int) -> None:
    """Raise ArgumentValueError for an array whose tokens have other heads or another head_dim."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) == 0:
        return
    if tuple(shape[1:]) not in ((num_kv_heads, head_dim), (num_kv_heads * head_dim,)):
        raise ArgumentValueError(
            f"{name}: got shape {tuple(shape)}, allowed is [num_tokens, {num_kv_heads}, {head_dim}] or "
            f"[num_tokens, {num_kv_heads * head_dim}]"
        )


def host_integers(name: str, given: Any) -> np.ndarray:
    """A list or a NumPy array as integers.

    Raises:
        ArgumentTypeError: other elements, bools among them.
        ArgumentValueError: lists of unequal lengths, or an integer beyond 64 bits.
    """
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ArgumentValueError(f"{name}: {error}") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}, allowed are integers")
    if not isinstance(given, np.ndarray) and any(
        isinstance(value, (bool, np.bool_)) for value in np.array(given, object).flat
    ):
        raise ArgumentTypeError(f"{name}: got a bool, allowed are integers")
    return array


def block_ids_of(gpu: Any, given: Any, stream: Any) -> Any:
    """Block ids of one sequence on the device: an array or an address there, or a list, which is copied.

    Raises:
        ArgumentTypeError, ArgumentValueError: what is none; the message names ``block_ids``.
    """
    if isinstance(given, (list, tuple)):
        ids = host_integers("block_ids", given)
        _check_one_axis(ids.shape)
        if ids.size and not (ids.min() >= -(2**31) and ids.max() < 2**31):
            wrong = int(ids.min() if ids.min() < -(2**31) else ids.max())
            raise ArgumentValueError(f"block_ids: got {wrong}, allowed are 32-bit integers")
        return to_device(gpu, ids.astype(np.int32), stream)
    array = named_array(gpu, "block_ids", given, stream)
    if isinstance(array, (int, np.integer, DevicePtr)):
        return array
    if not hasattr(array, "shape"):
        raise ArgumentTypeError(
            f"block_ids: got {type(given).__name__}, allowed are a list of integers and an int32 array of "
            "the backend"
        )
    _check_one_axis(tuple(array.shape))
    return array


def _check_one_axis(shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise ArgumentValueError(f"block_ids: got shape {shape}, allowed is one axis")
