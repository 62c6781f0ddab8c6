"""Attention over several sets of keys, merged into attention over all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.interop import check_backend, named_array
from cupaged.kv.spans import check_apart, span_of
from cupaged.ops._kernels import kernel_of
from cupaged.ops.merge import (
    merge_states_bf16,
    merge_states_f16,
    merge_states_f32,
    merge_states_f32_to_bf16,
    merge_states_f32_to_f16,
)

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_NAMES = {"bfloat16": "bf16", "uint16": "bf16", "float16": "f16", "float32": "f32"}
_LAUNCHERS = {
    ("bf16", "bf16"): merge_states_bf16,
    ("f32", "f32"): merge_states_f32,
    ("f32", "bf16"): merge_states_f32_to_bf16,
    ("f16", "f16"): merge_states_f16,
    ("f32", "f16"): merge_states_f32_to_f16,
}


def merge_states(
    gpu: GpuBackend, outputs: Any, lses: Any, out: Any, out_lse: Any = None, *, stream: Any
) -> None:
    """Merge the results of attention over disjoint sets of keys.

    With M the largest LSE of a (sequence, query head), part p weighs e^(lse_p - M). A part without keys, LSE
    -inf, weighs exactly nothing, whatever its output holds (NaN too); merged with such parts alone, a result
    keeps its bits. Without keys in any part, the result is 0 with LSE -inf. A NaN LSE makes its row NaN.

    Args:
        gpu: the backend.
        outputs: BF16, F16 or F32 ``[num_parts, num_seqs, num_q_heads, head_dim]``, normalised, each part
            contiguous: let decoders write to ``outputs[p]`` and ``lses[p]``. Any number of axes between the
            first and the last; head_dim a multiple of 4.
        lses: F32 ``[num_parts, num_seqs, num_q_heads]``: natural logarithms of the sums of exponentials.
        out: ``[num_seqs, num_q_heads, head_dim]``, written; the dtype of outputs, or BF16 or F16 for F32
            outputs. It may be one of the parts, whole and of their dtype; otherwise it shares no memory.
        out_lse: F32 ``[num_seqs, num_q_heads]``, written where given. It may be one of the parts, likewise.
        stream: int handle, CuPy stream, or object with ``__cuda_stream__``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    check_backend(gpu)
    outputs = named_array(gpu, "outputs", outputs, stream)
    lses = named_array(gpu, "lses", lses, stream)
    out = named_array(gpu, "out", out, stream, writable=True)
    arrays = {"outputs": outputs, "lses": lses, "out": out}
    if out_lse is not None:
        arrays["out_lse"] = out_lse = named_array(gpu, "out_lse", out_lse, stream, writable=True)
    for name, array in arrays.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ArgumentTypeError(
                f"{name}: got {type(array).__name__}, allowed is an array; cupaged.ops.merge has launchers "
                "that take addresses"
            )
    shape = tuple(outputs.shape)
    if len(shape) < 3 or shape[0] < 1:
        raise ArgumentValueError(f"outputs: got shape {shape}, allowed is [num_parts, ..., head_dim]")
    _check_shape("lses", lses, shape[:-1])
    _check_shape("out", out, shape[1:])
    if out_lse is not None:
        _check_shape("out_lse", out_lse, shape[1:-1])
    launch = _launcher(str(outputs.dtype), str(out.dtype))
    rows = math.prod(shape[1:-1])
    if rows:
        _check_memory(gpu, outputs, lses, out, out_lse)
    launch(
        gpu,
        kernel_of(gpu, "merge_states", launch.__name__),
        outputs,
        lses,
        out,
        0 if out_lse is None else out_lse,
        shape[0],
        rows,
        shape[-1],
        _part_stride("outputs", outputs, rows * shape[-1]),
        _part_stride("lses", lses, rows),
        stream,
    )


def _check_memory(gpu: GpuBackend, outputs: Any, lses: Any, out: Any, out_lse: Any) -> None:
    """What is written is a whole part, or nobody else's memory: rows are merged in no order."""
    written = {"out": (out, outputs), "out_lse": (out_lse, lses)}
    spans = {name: span_of(gpu, array) for name, (array, _) in written.items() if array is not None}
    for name, span in spans.items():
        array, own = written[name]
        for other_name, other in (("outputs", outputs), ("lses", lses)):
            may_be_part = other is own and array.dtype == other.dtype
            _check_parts(gpu, name, span, other_name, other, may_be_part)
    if len(spans) == 2:
        check_apart("out", spans["out"], "out_lse", spans["out_lse"])


def _check_parts(
    gpu: GpuBackend, name: str, span: tuple[int, int], other_name: str, parts: Any, may_be_part: bool
) -> None:
    """Raise ArgumentValueError where a span shares memory with a part of an array, but is none."""
    size = math.prod(parts.shape[1:])
    stride = _part_stride(other_name, parts, size) * parts.dtype.itemsize
    begin, size = gpu.pointer(parts), size * parts.dtype.itemsize
    part, rest = divmod(span[0] - begin, stride)
    if may_be_part and rest == 0 and 0 <= part < parts.shape[0] and span[1] - span[0] == size:
        return
    # The first part that ends behind the span's begin.
    nearest = max(0, (span[0] - begin - size) // stride + 1)
    if nearest < parts.shape[0]:
        at = begin + nearest * stride
        check_apart(name, span, f"{other_name}[{nearest}]", (at, at + size))


def _launcher(source: str, target: str) -> Any:
    launch = _LAUNCHERS.get((_NAMES.get(source, source), _NAMES.get(target, target)))
    if launch is None:
        raise ArgumentTypeError(
            f"outputs, out: got dtypes {source} and {target}, allowed are bfloat16 (uint16: BF16 as bits), "
            "float16 and float32 to themselves, and float32 to bfloat16 and float16"
        )
    return launch


def _check_shape(name: str, array: Any, needed: tuple[int, ...]) -> None:
    shape = getattr(array, "shape", None)
    if shape is not None and tuple(shape) != needed:
        raise ArgumentValueError(f"{name}: got shape {tuple(shape)}, allowed is {needed}")


def _part_stride(name: str, array: Any, part: int) -> int:
    """Elements between parts."""
    if array.strides is None or array.shape[0] < 2:
        return part
    step, rest = divmod(array.strides[0], array.dtype.itemsize)
    if rest or step < part:
        raise ArgumentValueError(
            f"{name}: got strides {array.strides} (bytes); from a part to the next, allowed are whole "
            f"elements, and {part} or more"
        )
    return int(step)
