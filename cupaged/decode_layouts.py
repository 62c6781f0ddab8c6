"""What a `Decoder` asks of its layouts and sizes. Nothing here needs a device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer
from cupaged.ops._pools import Pools
from cupaged.registry.decode import is_joined
from cupaged.registry.ring import TILE_TOKENS


def in_range(name: str, value: int, least: int, most: int) -> int:
    """The integer, which must be in that range."""
    value = as_integer(name, value)
    if not least <= value <= most:
        raise ArgumentValueError(f"{name}: got {value}, allowed is {least} to {most}")
    return value


def check_layouts(layout: Any, value_layout: Any) -> None:
    """Layouts of K and V that the kernels can read, of the same sizes."""
    for name, given in (("layout", layout), ("value_layout", value_layout)):
        if not isinstance(given, CacheLayout):
            raise ArgumentTypeError(f"{name}: got {given!r}, allowed is a CacheLayout")
        strides = {"block_stride_bytes": given.block_stride_bytes}
        if given.format.name == "nvfp4":
            strides["data_section_bytes"] = given.data_section_bytes
        for stride, value in strides.items():
            if value % 16:
                raise ArgumentValueError(f"{name}: its {stride} is {value}, which must be a multiple of 16")
    for field in ("num_kv_heads", "head_dim", "block_size", "heads_first"):
        ours, theirs = getattr(layout, field), getattr(value_layout, field)
        if ours != theirs:
            raise ArgumentValueError(f"value_layout: its {field} is {theirs}, K's is {ours}")


def difference(given: CacheLayout, own: CacheLayout) -> str:
    """The fields in which a layout differs from a decoder's."""
    pairs = ((field.name, getattr(given, field.name), getattr(own, field.name)) for field in fields(own))
    named = ((name, getattr(a, "name", a), getattr(b, "name", b)) for name, a, b in pairs if a != b)
    return ", ".join(f"{name} {a} where the decoder's is {b}" for name, a, b in named)


def pools_of(layout: CacheLayout) -> Pools:
    """How the blocks of a pool lie; NVFP4 pools are flat."""
    shape = (layout.block_size, layout.num_kv_heads, layout.head_dim)
    if layout.heads_first:
        shape = (layout.num_kv_heads, layout.block_size, layout.head_dim)
    flat = layout.format.name == "nvfp4"
    return Pools(layout.block_stride_bytes, layout.block_bytes, None if flat else shape)


def scale_rule(layout: CacheLayout) -> tuple[str, bool, bool]:
    """Format name, whether it may have scales, and whether it must."""
    name = layout.format.name
    return name, name != "bf16", name == "fp8"


def is_joined_layout(layout: CacheLayout) -> bool:
    """Whether an NVFP4 block comes in one copy; see `is_joined`."""
    return layout.format.name == "nvfp4" and is_joined(
        layout.block_size, layout.num_kv_heads, layout.head_dim, layout.data_section_bytes
    )


def chunk_sizes(split_tokens: Any, max_blocks_per_seq: Any, layout: CacheLayout) -> tuple[int, int]:
    """Tokens of a chunk, and of the longest sequence."""
    split_tokens = as_integer("split_tokens", split_tokens)
    if split_tokens < TILE_TOKENS or split_tokens % TILE_TOKENS:
        raise ArgumentValueError(
            f"split_tokens: got {split_tokens}, allowed are positive multiples of {TILE_TOKENS}"
        )
    if max_blocks_per_seq is None:
        raise ArgumentValueError("max_blocks_per_seq: got None; split_tokens needs it, to size its workspace")
    blocks = in_range("max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
    return split_tokens, blocks * layout.block_size
