"""Sizes of new tokens, as their arrays tell them."""

from __future__ import annotations

from typing import Any

from cupaged.errors import ArgumentValueError
from cupaged.launch import as_integer


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
