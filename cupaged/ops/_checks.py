"""What launchers check before a launch, beyond what the kernel registry knows. Nothing here synchronises.

Objects given for pointers are checked for size; bare ints are taken at their word.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import checked_scale
from cupaged.handle import KernelHandle
from cupaged.launch import as_integer
from cupaged.registry import MAX_GRID_YZ
from cupaged.registry.rules import check_head_dim

__all__ = [
    "UNLIMITED_BLOCKS",
    "UNLIMITED_SLOTS",
    "check_decode",
    "check_heads",
    "check_num_blocks",
    "check_positive",
    "check_row_stride",
    "check_rows",
    "check_scale",
    "check_shape",
    "check_size",
    "check_splits",
    "check_stride",
    "launcher",
]

# Without a pool size, every id that is not negative is taken to be inside.
UNLIMITED_BLOCKS = 2**31 - 1
UNLIMITED_SLOTS = 2**63 - 1


_Parameters = ParamSpec("_Parameters")


def launcher(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Makes a function the launcher of the kernel that has its name.

    The handle given must be that kernel's. Parameters annotated as int arrive as
    int: products of NumPy integers overflow, and what is no integer would fail in them without a name.
    """
    signature = inspect.signature(function).parameters
    integers = [(i, p.name) for i, p in enumerate(signature.values()) if p.annotation == "int"]
    optional = [p.name for p in signature.values() if p.annotation == "int | None"]

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
        _check_kernel(given[1] if len(given) > 1 else kwargs.get("kernel"), function.__name__)
        function(*given, **kwargs)

    return checked


def _check_kernel(kernel: object, entry: str) -> None:
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


def check_size(name: str, value: Any, needed: int) -> None:
    """An array holds at least that many elements."""
    if _is_array(value) and value.size < needed:
        raise ArgumentValueError(f"{name}: got {value.size} elements, needed are {needed}")


def check_shape(name: str, array: Any, tail: tuple[int, ...]) -> None:
    """An array with one axis more than `tail` has that shape behind its first; a flat one may be anything."""
    shape = getattr(array, "shape", None) if _is_array(array) else None
    if shape is not None and len(shape) == len(tail) + 1 and tuple(shape[1:]) != tail:
        allowed = ", ".join(map(str, ("n", *tail)))
        raise ArgumentValueError(
            f"{name}: got shape {tuple(shape)}, allowed is [{allowed}]; give a flat array for another layout"
        )


def check_row_stride(name: str, stride: int, row: int, count: int, array: Any, array_name: str) -> None:
    """Rows do not overlap, and an array's own stride agrees with the one given."""
    strides = getattr(array, "strides", None) if _is_array(array) else None
    if count > 1 and strides and len(strides) > 1 and array.shape[0] > 1:
        own = strides[0] / array.dtype.itemsize
        if own != stride:
            raise ArgumentValueError(
                f"{name}: got {stride}, but {array_name} has {own:g} elements between rows"
            )
    check_rows(name, stride, row, count, array, array_name)


def check_rows(name: str, stride: int, row: int, count: int, array: Any, array_name: str) -> None:
    """Rows do not overlap, and an array reaches to the end of the last one."""
    if stride < row and count > 1:
        raise ArgumentValueError(f"{name}: got {stride}, a row has {row} elements")
    if not _is_array(array):
        return
    reach = array.size
    if reach and getattr(array, "strides", None):
        steps = zip(array.shape, array.strides, strict=True)
        reach = 1 + sum((length - 1) * abs(step) for length, step in steps) // array.dtype.itemsize
    needed = (count - 1) * stride + row if count > 0 and row > 0 else 0
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


def check_decode(
    q: Any,
    block_tables: Any,
    seq_lens: Any,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    q_stride: int,
) -> None:
    """What every decode launcher asks of its common arguments."""
    check_heads(num_q_heads, num_kv_heads)
    check_positive(head_dim=head_dim, block_size=block_size)
    check_head_dim(head_dim)
    check_scale("inv_sqrt_d", inv_sqrt_d)
    check_shape("q", q, (num_q_heads, head_dim))
    check_row_stride("q_stride", q_stride, num_q_heads * head_dim, num_seqs, q, "q")
    table: Any = getattr(block_tables, "shape", ()) if _is_array(block_tables) else ()
    if len(table) == 2 and table[0] > 1 and table[1] != max_blocks_per_seq:
        raise ArgumentValueError(
            f"max_blocks_per_seq: got {max_blocks_per_seq}, but block_tables has {table[1]} columns"
        )
    check_size("block_tables", block_tables, num_seqs * max_blocks_per_seq)
    check_size("seq_lens", seq_lens, num_seqs)
