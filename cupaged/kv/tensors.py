"""K or V of a cache: its pool, its layout and its scale, and the launches that each of them takes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged import ops
from cupaged.errors import ArgumentError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.handle import KernelHandle
from cupaged.kv.pools import Pool
from cupaged.kv.scales import Scale
from cupaged.launch import in_range
from cupaged.ops._checks import check_row_stride
from cupaged.ops._kernels import kernel_of
from cupaged.ops.blocks import FORMAT_NUMBERS, gather_tokens_bf16, gather_tokens_f32
from cupaged.pointers import DevicePtr, is_null

_U32_MAX = 2**32 - 1

# By the dtype of the result; BF16 may come as bits.
GATHER = {"float32": gather_tokens_f32, "bfloat16": gather_tokens_bf16, "uint16": gather_tokens_bf16}
_NO_SCALE = Scale(1.0)


@dataclass(frozen=True)
class CacheTensor:
    """One of K and V.

    Attributes:
        name: ``"k"`` or ``"v"``.
        layout: of the pool.
        pool: where it is.
        scale: dequantisation scale of FP8, second level of NVFP4; None where none was given.
    """

    name: str
    layout: CacheLayout
    pool: Pool
    scale: Scale | None = None

    def known_scale(self) -> Scale:
        """The scale, 1 where none was given."""
        return _NO_SCALE if self.scale is None else self.scale

    def check_output(self, gpu: Any, output: Any) -> None:
        """What the launch of `gather` asks of its output, which messages call ``out_k`` or ``out_v``."""
        launch = GATHER[str(output.dtype)]
        if output.size == 0:
            return
        try:
            _check_pointer(gpu, kernel_of(gpu, "cache_blocks", launch.__name__), "output", output)
        except ArgumentError as error:
            error.rename({"output": f"out_{self.name}"})
            raise

    def gather(self, gpu: Any, block_ids: Any, output: Any, seq_len: int, stream: Any) -> None:
        """Dequantised tokens of a sequence into `output`, by its dtype."""
        layout, launch, scale = self.layout, GATHER[str(output.dtype)], self.known_scale()
        data, scales = layout.format.data_bytes(layout.head_dim), layout.format.scale_bytes(layout.head_dim)
        token_rows = 1 if layout.heads_first else layout.num_kv_heads
        head_rows = layout.block_size if layout.heads_first else 1
        launch(
            gpu,
            kernel_of(gpu, "cache_blocks", launch.__name__),
            self.pool.pointer,
            block_ids,
            0 if scale.heads is None else scale.heads,
            output,
            seq_len,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            FORMAT_NUMBERS[layout.format.name],
            scale.tensor,
            layout.block_stride_bytes,
            token_rows * data,
            head_rows * data,
            layout.data_section_bytes,
            token_rows * scales,
            head_rows * scales,
            stream,
            num_blocks=self.pool.num_blocks,
        )


@dataclass(frozen=True)
class NewTokens:
    """What is to be written: addresses or arrays, and elements between tokens."""

    key: Any
    value: Any
    slots: Any
    count: int
    key_stride: int
    value_stride: int


def write(gpu: Any, k: CacheTensor, v: CacheTensor, new: NewTokens, stream: Any) -> None:
    """Write new tokens: in one launch, or in two where K and V have layouts of their own."""
    for name, rows in (("key", new.key), ("value", new.value)):
        if new.count and is_null(rows):
            raise ArgumentValueError(f"{name}: got a null pointer (address 0) for {new.count} tokens")
    scales = (k.known_scale(), v.known_scale())
    if k.layout == v.layout:
        _write(gpu, k.layout, (k.pool, v.pool), (new.key, new.value), scales, new, stream)
        return
    if new.count:
        _check_value(gpu, v.layout, new)
    _write(gpu, k.layout, (k.pool, None), (new.key, 0), (scales[0], _NO_SCALE), new, stream)
    _write(gpu, v.layout, (None, v.pool), (0, new.value), (_NO_SCALE, scales[1]), new, stream)


def _check_value(gpu: Any, layout: CacheLayout, new: NewTokens) -> None:
    """What the launch that writes V asks of its rows, before the one that writes K."""
    name = f"reshape_and_cache_{layout.format.name}"
    kernel, row = kernel_of(gpu, name, name), layout.num_kv_heads * layout.head_dim
    stride = in_range("value_stride", new.value_stride, 0, _U32_MAX)
    check_row_stride("value_stride", stride, row, new.count, new.value, "value")
    _check_pointer(gpu, kernel, "value", new.value)
    _check_multiple(kernel, "value_stride", stride)


def _check_pointer(gpu: Any, kernel: KernelHandle, name: str, value: Any) -> None:
    """As a launch of the kernel checks what it is given for a pointer."""
    kernel.check_array(_position(kernel, name), value)
    is_address = isinstance(value, (int, np.integer, DevicePtr))
    _check_multiple(kernel, name, operator.index(value) if is_address else gpu.pointer(value))


def _check_multiple(kernel: KernelHandle, name: str, value: int) -> None:
    multiple = 1 if kernel.known is None else kernel.known.multiples.get(name, 1)
    if value % multiple:
        raise kernel.misaligned(_position(kernel, name), value, multiple)


def _position(kernel: KernelHandle, name: str) -> int:
    return [parameter.name for parameter in kernel.parameters].index(name)


def _write(
    gpu: Any,
    layout: CacheLayout,
    pools: tuple[Pool | None, Pool | None],
    rows: tuple[Any, Any],
    scales: tuple[Scale, Scale],
    new: NewTokens,
    stream: Any,
) -> None:
    """One launch; K or V is left out where its pool is None."""
    name = f"reshape_and_cache_{layout.format.name}"
    before, after, keywords = _format_arguments(layout, *scales)
    getattr(ops, name)(
        gpu,
        kernel_of(gpu, name, name),
        *rows,
        *(0 if pool is None else pool.pointer for pool in pools),
        new.slots,
        new.count,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        *before,
        new.key_stride,
        new.value_stride,
        *after,
        stream,
        heads_first=layout.heads_first,
        num_blocks=next(pool.num_blocks for pool in pools if pool is not None),
        **keywords,
    )


def _format_arguments(
    layout: CacheLayout, k: Scale, v: Scale
) -> tuple[tuple[float, ...], tuple[int, ...], dict[str, Any]]:
    """What the writer of this format takes before the row strides, after them, and by keyword.

    Raises:
        KeyError: a format that has no writer.
    """
    heads = {"k_scales": k.heads, "v_scales": v.heads}
    second_level = {"k_scale": k.tensor, "v_scale": v.tensor}
    by_format: dict[str, tuple[tuple[float, ...], tuple[int, ...], dict[str, Any]]] = {
        "bf16": ((), (), {"cache_stride": layout.cache_stride}),
        "fp8": ((k.tensor, v.tensor), (layout.cache_stride,), heads),
        "nvfp4": ((), (layout.block_stride_bytes, layout.data_section_bytes), second_level | heads),
    }
    return by_format[layout.format.name]
