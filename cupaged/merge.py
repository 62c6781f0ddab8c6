"""Attention over several sets of keys, merged into attention over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.interop import device_array
from cupaged.kv.kernels import kernel_of
from cupaged.ops.merge import merge_states_bf16, merge_states_f32, merge_states_f32_to_bf16

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_NAMES = {"bfloat16": "bf16", "uint16": "bf16", "float32": "f32"}
_LAUNCHERS = {
    ("bf16", "bf16"): merge_states_bf16,
    ("f32", "f32"): merge_states_f32,
    ("f32", "bf16"): merge_states_f32_to_bf16,
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
        outputs: BF16 or F32 ``[num_parts, num_seqs, num_q_heads, head_dim]``, normalised, each part
            contiguous: let decoders write to ``outputs[p]`` and ``lses[p]``. Any number of axes between the
            first and the last; head_dim a multiple of 4.
        lses: F32 ``[num_parts, num_seqs, num_q_heads]``: natural logarithms of the sums of exponentials.
        out: ``[num_seqs, num_q_heads, head_dim]``, written; the dtype of outputs, or BF16 for F32 outputs. It
            may be one of the parts.
        out_lse: F32 ``[num_seqs, num_q_heads]``, written where given. It may be one of the parts.
        stream: int handle, CuPy stream, or object with ``__cuda_stream__``.

    Raises:
        ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
    """
    outputs, lses = (device_array(gpu, array, stream) for array in (outputs, lses))
    out = device_array(gpu, out, stream, writable=True)
    for name, array in (("outputs", outputs), ("lses", lses), ("out", out)):
        if not hasattr(array, "shape"):
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
        out_lse = device_array(gpu, out_lse, stream, writable=True)
        _check_shape("out_lse", out_lse, shape[1:-1])
    launch = _launcher(str(outputs.dtype), str(out.dtype))
    rows = 1
    for length in shape[1:-1]:
        rows *= length
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


def _launcher(source: str, target: str) -> Any:
    launch = _LAUNCHERS.get((_NAMES.get(source, source), _NAMES.get(target, target)))
    if launch is None:
        raise ArgumentTypeError(
            f"outputs, out: got dtypes {source} and {target}, allowed are bfloat16 to bfloat16, float32 to "
            "float32 and float32 to bfloat16"
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
    if rest:
        raise ArgumentValueError(
            f"{name}: got {array.strides[0]} bytes between parts, allowed are whole elements"
        )
    return int(step)
