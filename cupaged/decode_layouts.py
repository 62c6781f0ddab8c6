"""What a `Decoder` asks of its layouts and sizes. Nothing here needs a device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cupaged.errors import ArgumentValueError
from cupaged.formats import FORMATS, CacheLayout
from cupaged.launch import as_integer, in_range
from cupaged.ops._pools import Pools
from cupaged.registry import DTYPES
from cupaged.registry.decode import is_joined, planned_spec
from cupaged.registry.ring import TILE_TOKENS

_MAX_SPLIT_TOKENS = 2**31  # longer than any sequence; kernels add one to a length in 32 bits
_QUERY_DTYPES = {"bfloat16": ("bfloat16", "uint16"), "float16": ("float16",)}


def difference(given: CacheLayout, own: CacheLayout) -> str:
    """The fields in which a layout differs from a decoder's."""
    pairs = ((field.name, getattr(given, field.name), getattr(own, field.name)) for field in fields(own))
    named = ((name, getattr(a, "name", a), getattr(b, "name", b)) for name, a, b in pairs if a != b)
    return ", ".join(f"{name} {a} where the decoder's is {b}" for name, a, b in named)


def pools_of(layout: CacheLayout) -> Pools:
    """How the blocks of a pool lie; pools with a scale section are flat."""
    shape = (layout.block_size, layout.num_kv_heads, layout.head_dim)
    if layout.heads_first:
        shape = (layout.num_kv_heads, layout.block_size, layout.head_dim)
    flat = layout.format.has_scale_section
    return Pools(layout.block_stride_bytes, layout.block_bytes, None if flat else shape)


def scale_rule(layout: CacheLayout) -> tuple[str, bool, bool]:
    """Format name, whether it may have scales, and whether it must."""
    stored = layout.format
    return stored.name, stored.needs_scale or stored.has_scale_section, stored.needs_scale


def is_joined_layout(layout: CacheLayout) -> bool:
    """Whether values and scales of a block come in one copy; see `is_joined`."""
    return layout.format.has_scale_section and is_joined(
        layout.block_size, layout.num_kv_heads, layout.head_dim, layout.data_section_bytes
    )


def strides_of(layout: CacheLayout, value_layout: CacheLayout) -> tuple[int, int, int, int]:
    """Bytes between blocks of K and of V, and from a block to its scales, 0 where it has none."""
    both = (layout, value_layout)
    k_section, v_section = (x.data_section_bytes if x.format.has_scale_section else 0 for x in both)
    return layout.block_stride_bytes, value_layout.block_stride_bytes, k_section, v_section


def layout_spec(layout: CacheLayout, value_layout: CacheLayout, **others: int) -> dict[str, int]:
    """Compile-time constants of a decoder of these layouts: what they say, and others."""
    return planned_spec(
        key_format=FORMATS.index(layout.format),
        value_format=FORMATS.index(value_layout.format),
        head_dim=layout.head_dim,
        num_kv_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        heads_first=int(layout.heads_first),
        joined=int(is_joined_layout(layout) and is_joined_layout(value_layout)),
        **others,
    )


def dtypes_of(q_dtype: str, layout: CacheLayout, value_layout: CacheLayout) -> dict[str, tuple[str, ...]]:
    """Dtypes of a decoder's arrays, by name."""
    if not isinstance(q_dtype, str) or q_dtype not in _QUERY_DTYPES:
        raise ArgumentValueError(f"q_dtype: got {q_dtype!r}, allowed are {', '.join(_QUERY_DTYPES)}")
    rows = _QUERY_DTYPES[q_dtype]
    pools = {f"{side}_cache": DTYPES[x.format.name] for side, x in (("k", layout), ("v", value_layout))}
    return {"q": rows, "output": rows, **pools}


def chunk_sizes(split_tokens: Any, max_blocks_per_seq: Any, layout: CacheLayout) -> tuple[int, int] | None:
    """Tokens of a chunk, and of the longest sequence; None where sequences are not cut into chunks."""
    if split_tokens is None:
        if max_blocks_per_seq is not None:
            raise ArgumentValueError(
                f"max_blocks_per_seq: got {max_blocks_per_seq}, but only split_tokens needs one"
            )
        return None
    split_tokens = as_integer("split_tokens", split_tokens)
    if not 0 < split_tokens <= _MAX_SPLIT_TOKENS or split_tokens % TILE_TOKENS:
        raise ArgumentValueError(
            f"split_tokens: got {split_tokens}, allowed are positive multiples of {TILE_TOKENS} up to "
            f"{_MAX_SPLIT_TOKENS}"
        )
    if max_blocks_per_seq is None:
        raise ArgumentValueError("max_blocks_per_seq: got None; split_tokens needs it, to size its workspace")
    blocks = in_range("max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
    return split_tokens, blocks * layout.block_size
