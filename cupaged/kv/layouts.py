"""Layouts that the package's kernels can write and read."""

from __future__ import annotations

from typing import Any

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.registry.rules import check_block_size, check_head_dim

_COPY_BYTES = 16  # one copy of a lane; sections and blocks begin at multiples of it


def checked_layouts(layout: Any, value_layout: Any) -> tuple[CacheLayout, CacheLayout]:
    """Layouts of K and V, which are of the same sizes; V's is K's where None.

    Raises:
        ArgumentTypeError: no layout.
        ArgumentValueError: one that no kernel takes, or two that do not belong together.
    """
    value_layout = layout if value_layout is None else value_layout
    for name, given in (("layout", layout), ("value_layout", value_layout)):
        if not isinstance(given, CacheLayout):
            raise ArgumentTypeError(f"{name}: got {given!r}, allowed is a CacheLayout")
        _check_kernels(name, given)
    for field in ("num_kv_heads", "head_dim", "block_size", "heads_first"):
        of_k, of_v = getattr(layout, field), getattr(value_layout, field)
        if of_k != of_v:
            raise ArgumentValueError(f"value_layout: its {field} is {of_v}, that of layout is {of_k}")
    return layout, value_layout


def _check_kernels(name: str, layout: CacheLayout) -> None:
    try:
        check_head_dim(layout.head_dim)
        check_block_size(layout.block_size)
    except ArgumentValueError as error:
        raise ArgumentValueError(f"{name}: its {error}") from None
    places = [("block_stride_bytes", layout.block_stride_bytes, "block_stride_override")]
    if layout.format.has_scale_section:
        places.append(("data_section_bytes", layout.data_section_bytes, "data_section_override"))
    for field, value, override in places:
        if value % _COPY_BYTES:
            fitting = -(-value // _COPY_BYTES) * _COPY_BYTES
            raise ArgumentValueError(
                f"{name}: its {field} is {value}, which must be a multiple of {_COPY_BYTES}: "
                f"CacheLayout(..., {override}={fitting})"
            )
