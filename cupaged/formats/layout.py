"""Where a token's bytes lie in a paged pool. K and V are separate pools of one layout."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats.bf16 import BFLOAT16
from cupaged.formats.fp8 import E4M3_MAX
from cupaged.formats.nvfp4 import NVFP4_GROUP


@dataclass(frozen=True)
class CacheFormat:
    """How a value is stored in the cache: one of `BF16`, `FP8`, `NVFP4`.

    Attributes:
        name: ``"bf16"``, ``"fp8"`` or ``"nvfp4"``, as in kernel names.
        dtype: dtype of a pool's elements.
        head_dim_multiple: head_dim must be a multiple of it.
        largest: largest magnitude stored, of a format whose cache must be given scales: absmax / largest is
            the smallest that clips nothing. None for formats that store values as they are, or make their own
            scales.
    """

    name: str
    dtype: np.dtype[Any]
    head_dim_multiple: int
    largest: float | None = None

    @property
    def needs_scale(self) -> bool:
        """Whether a cache must be given its dequantisation scales."""
        return self.largest is not None

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one head in the data section."""
        return head_dim // 2 if self.name == "nvfp4" else head_dim * self.dtype.itemsize

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one head in the scale section; 0 for formats without one."""
        return head_dim // NVFP4_GROUP if self.name == "nvfp4" else 0

    @property
    def has_scale_section(self) -> bool:
        """Whether scales lie behind the values of a block."""
        return self.scale_bytes(self.head_dim_multiple) > 0


_SECTION_ALIGNMENT = 16  # bytes; blocks without a scale section have it by their sizes

BF16 = CacheFormat("bf16", BFLOAT16, 2)
FP8 = CacheFormat("fp8", np.dtype(np.uint8), 2, largest=E4M3_MAX)
NVFP4 = CacheFormat("nvfp4", np.dtype(np.uint8), NVFP4_GROUP)
FORMATS = (BF16, FP8, NVFP4)


def cache_format(name: str) -> CacheFormat:
    """The format of that name.

    Raises:
        ArgumentValueError: no such format.
    """
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise ArgumentValueError(f"format: got {name!r}, allowed are {', '.join(f.name for f in FORMATS)}")


@dataclass(frozen=True)
class CacheLayout:
    """Layout of a paged K or V pool.

    BF16 and FP8 blocks are ``[block_size, num_kv_heads, head_dim]``. An NVFP4 block is a data section
    ``[block_size, num_kv_heads, head_dim / 2]`` and, from ``data_section_bytes`` on, a scale section
    ``[block_size, num_kv_heads, head_dim / 16]``. Blocks follow each other tightly unless overridden; NVFP4
    blocks begin at multiples of 16 bytes, which the kernels ask for.

    Attributes:
        format: how values are stored.
        num_kv_heads: KV heads, > 0.
        head_dim: values of one head: even, for NVFP4 a multiple of 16. Kernels take multiples of 16 up to
            256, of any format, which a `KVCache`, a `Decoder` and the launchers check.
        block_size: tokens of one block, > 0.
        block_stride_override: bytes from one block to the next, at least ``block_bytes``, for pools
            with padding, with K and V interleaved, or of many layers; None = tight. BF16: an even number.
        data_section_override: byte offset of the scale section in its block; None = tight. NVFP4 only.
        heads_first: the order of a block's rows is ``[num_kv_heads, block_size, ...]`` (HND) instead of
            ``[block_size, num_kv_heads, ...]`` (NHD), in both sections.

    Raises:
        ArgumentTypeError: a size that is not an integer, or a format that is none.
        ArgumentValueError: a size outside what is allowed.
    """

    format: CacheFormat
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_stride_override: int | None = None
    data_section_override: int | None = None
    heads_first: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, CacheFormat):
            raise ArgumentTypeError(f"format: got {self.format!r}, allowed are BF16, FP8 and NVFP4")
        self._keep_size("num_kv_heads")
        self._keep_size("head_dim", multiple=self.format.head_dim_multiple)
        self._keep_size("block_size")
        if not isinstance(self.heads_first, bool):
            raise ArgumentTypeError(f"heads_first: got {self.heads_first!r}, allowed are True and False")
        self._check_data_section()
        self._check_block_stride()

    def _keep_size(self, name: str, *, minimum: int = 1, multiple: int = 1) -> None:
        """Check a size and keep it as an int: products of NumPy integers overflow."""
        size = checked_size(name, getattr(self, name), minimum=minimum, multiple=multiple)
        object.__setattr__(self, name, size)

    def _check_data_section(self) -> None:
        override = self.data_section_override
        if override is None:
            return
        if not self.format.has_scale_section:
            raise ArgumentValueError(
                f"data_section_override: got {override}, allowed is None: {self.format.name} has no scale "
                "section"
            )
        self._keep_size("data_section_override", minimum=self._tight_data_bytes)

    def _check_block_stride(self) -> None:
        if self.block_stride_override is not None:
            item = self.pool_dtype.itemsize
            self._keep_size("block_stride_override", minimum=self.block_bytes, multiple=item)

    @property
    def _tight_data_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.format.data_bytes(self.head_dim)

    @property
    def bytes_per_token_head(self) -> int:
        """Bytes of one token of one KV head in one pool, scales included."""
        return self.format.data_bytes(self.head_dim) + self.format.scale_bytes(self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of all KV heads in one pool, scales included."""
        return self.num_kv_heads * self.bytes_per_token_head

    @property
    def data_section_bytes(self) -> int:
        """Bytes from a block's begin to its scale section; for other formats, to the block's end."""
        return self._tight_data_bytes if self.data_section_override is None else self.data_section_override

    @property
    def block_bytes(self) -> int:
        """Bytes from a block's begin to the end of its last section."""
        scale_section = self.block_size * self.num_kv_heads * self.format.scale_bytes(self.head_dim)
        return self.data_section_bytes + scale_section

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next."""
        if self.block_stride_override is not None:
            return self.block_stride_override
        alignment = _SECTION_ALIGNMENT if self.format.has_scale_section else 1
        return -(-self.block_bytes // alignment) * alignment

    @property
    def cache_stride(self) -> int:
        """Pool elements (of ``pool_dtype``) from one block to the next."""
        return self.block_stride_bytes // self.pool_dtype.itemsize

    @property
    def pool_dtype(self) -> np.dtype[Any]:
        """bfloat16 for BF16, uint8 otherwise."""
        return self.format.dtype

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of a pool in ``pool_dtype``.

        Tight BF16 and FP8: ``[num_blocks, block_size, num_kv_heads, head_dim]``; otherwise
        ``[num_blocks, cache_stride]``.
        """
        num_blocks = checked_size("num_blocks", num_blocks, minimum=0)
        if self.format.has_scale_section or self.block_stride_bytes != self.block_bytes:
            return (num_blocks, self.cache_stride)
        if self.heads_first:
            return (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        return (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def blocks_in(self, nbytes: int) -> int:
        """Whole blocks in so many bytes; the last needs no padding behind it."""
        return blocks_in(nbytes, self.block_stride_bytes, self.block_bytes)


def blocks_in(nbytes: int, stride_bytes: int, block_bytes: int) -> int:
    """Whole blocks of block_bytes, stride_bytes (> 0) apart, in so many bytes."""
    return max(0, (nbytes - block_bytes) // stride_bytes + 1)


class ElementStrides(NamedTuple):
    """Strides of `paged_decode_attn_tiled`, in elements: between blocks, tokens and KV heads."""

    blk: int
    tok: int
    kvh: int


def paged_strides(num_kv_heads: int, head_dim: int, block_size: int) -> ElementStrides:
    """Strides of a pool ``[block, block_size, num_kv_heads, head_dim]``."""
    num_kv_heads, head_dim, block_size = _checked_sizes(num_kv_heads, head_dim, block_size)
    return ElementStrides(block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim)


def scratch_strides(num_kv_heads: int, head_dim: int, block_size: int) -> ElementStrides:
    """Strides of a scratch pool ``[slot, K|V, num_kv_heads, block_size, head_dim]``.

    Its V begins ``num_kv_heads * block_size * head_dim`` elements after its K.
    """
    num_kv_heads, head_dim, block_size = _checked_sizes(num_kv_heads, head_dim, block_size)
    return ElementStrides(2 * num_kv_heads * block_size * head_dim, head_dim, block_size * head_dim)


def _checked_sizes(num_kv_heads: int, head_dim: int, block_size: int) -> tuple[int, int, int]:
    return (
        checked_size("num_kv_heads", num_kv_heads),
        checked_size("head_dim", head_dim),
        checked_size("block_size", block_size),
    )


def checked_size(name: str, value: int, *, minimum: int = 1, multiple: int = 1) -> int:
    """A size as an int.

    Raises:
        ArgumentTypeError: no integer.
        ArgumentValueError: below the minimum, or no multiple; the message names it.
    """
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: got {value!r} of type {type(value).__name__}, allowed is an int")
    if size < minimum or size % multiple:
        rule = f"a multiple of {multiple}, " if multiple > 1 else ""
        least = -(-minimum // multiple) * multiple
        raise ArgumentValueError(f"{name}: got {size}, allowed is {rule}{least} or more")
    return size
