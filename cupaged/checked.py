"""Checked mode: what is in device memory is looked at before each launch of one of the package's kernels.

Off by default, because it waits for the stream. Inside ``with checked_mode():`` every launcher, and inside a
`Decoder` made with ``checked=True`` every call, first runs small kernels (``kernels/input_checks.cu``) on
the caller's stream, reads their findings back and raises `CheckedModeError` instead of launching where it
finds

* a sequence length below 0 or beyond its block table, a block id outside the pool among those that are
  looked up, a slot beyond the pool (negative slots are skipped by the writers, and allowed),
* a NaN or an infinity in q, an array of scales by KV head with a value that is not finite and above 0, a NaN
  or +inf among sinks, a NaN among the NVFP4 scales of live tokens where block tables tell which they are,
* memory that is written and is another argument's too. Every pointer of every launcher is compared, by the
  bytes its rows and blocks take; what lies between them is nobody's. Allowed are what is made for it: a merge
  into one of its parts, copies within a pool, K and V in turns.

Findings are exact and the first of each array: its smallest index. Pool sizes are those the launcher knows;
without ``num_blocks`` and with bare addresses only negative ids can be found, and of a pool only its first
block is compared. Not looked at: the pairs of `copy_cache_blocks` (those outside are left out), NVFP4 scales
that a step over tiles or a gather reads, and a `Decoder`'s own memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from cupaged.checked_rules import Check, Element, check_overlaps, checks_of, named_values
from cupaged.errors import CheckedModeError
from cupaged.launch import KernelLaunch, before_launch
from cupaged.ops._kernels import kernel_of
from cupaged.registry.checks import INPUT_CHECKS

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend
    from cupaged.handle import KernelHandle, Value

__all__ = ["checked_mode", "in_checked_mode"]

_NOTHING = 0x7F7F7F7F7F7F7F7F  # a record without a finding: every byte 0x7F

_Parameters = ParamSpec("_Parameters")


@contextlib.contextmanager
def checked_mode(enabled: bool = True) -> Iterator[None]:
    """Check the inputs of every launch in this block, in this thread (or asynchronous task) only.

    Each checked launch waits for its stream, so a stream that is being captured refuses it.

    Args:
        enabled: False turns an outer checked mode off for the block.
    """
    token = before_launch.set(_inspect if enabled else None)
    try:
        yield
    finally:
        before_launch.reset(token)


def in_checked_mode(launcher: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """A launcher whose every call is checked."""

    @functools.wraps(launcher)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        with checked_mode():
            launcher(*args, **kwargs)

    return checked


def _inspect(kernel: KernelHandle, values: Sequence[Value], stream: int) -> None:
    """What `KernelLaunch.launch` calls before a launch of a kernel of the package."""
    known = kernel.known
    if known is None or known.module == INPUT_CHECKS:
        return
    named = named_values(kernel, values)
    written = {parameter.name for parameter in kernel.parameters if not parameter.const}
    check_overlaps(known.holds, written, named)
    checks = checks_of(known.holds, named)
    if checks:
        _run(kernel.gpu, checks, stream)


def _run(gpu: GpuBackend, checks: Sequence[Check], stream: int) -> None:
    _refuse_capture(gpu, stream)
    records = gpu.empty(len(checks), np.int64)
    base = gpu.pointer(records)
    gpu.memset(base, 0x7F, 8 * len(checks), stream)
    for position, check in enumerate(checks):
        _launch(gpu, check.entry, (*check.before, base + 8 * position, *check.after), stream)
    for check, found in zip(checks, _read(gpu, records, stream), strict=True):
        if found != _NOTHING:
            raise _error(gpu, check, int(found), stream)


def _error(gpu: GpuBackend, check: Check, flat: int, stream: int) -> CheckedModeError:
    index = tuple(int(i) for i in np.unravel_index(flat, check.shape))
    value = math.nan if check.element is None else _value_at(gpu, check.element, flat, stream)
    where = ", ".join(map(str, index))
    return CheckedModeError(
        f"{check.array}[{where}]: got {value}, allowed are {check.allowed}",
        array=check.array,
        index=index,
        value=value,
    )


def _value_at(gpu: GpuBackend, element: Element, flat: int, stream: int) -> int | float:
    record = gpu.empty(1, np.int64)
    arguments = (element.address(flat), gpu.pointer(record), element.dtype.itemsize)
    _launch(gpu, "input_value", arguments, stream)
    raw = np.array(_read(gpu, record, stream)).view(np.uint8)[: element.dtype.itemsize]
    number: int | float = raw.view(element.dtype)[0].item()
    return number


def _launch(gpu: GpuBackend, entry: str, arguments: tuple[int, ...], stream: int) -> None:
    kernel = kernel_of(gpu, INPUT_CHECKS, entry)
    launch = KernelLaunch(gpu, kernel)
    for kind, value in zip(kernel.kinds, arguments, strict=True):
        getattr(launch, f"arg_{kind}")(value)
    launch.launch(stream)


def _read(gpu: GpuBackend, records: Any, stream: int) -> Any:
    """Records on the host, after what is queued on this stream; other streams run on."""
    if isinstance(records, np.ndarray):
        gpu.synchronize(stream)
        return gpu.to_host(records)
    from cupaged.backends.cupy.streams import stream_of

    return records.get(stream=stream_of(stream))


def _refuse_capture(gpu: GpuBackend, stream: int) -> None:
    if gpu.name != "cupy":
        return
    from cupy_backends.cuda.api import runtime

    try:
        capturing = bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError:  # the default stream, while another one is captured
        capturing = True
    if capturing:
        raise CheckedModeError(
            "stream: it is being captured; checked mode reads the device, which no graph can do. Capture "
            "outside of checked mode",
            array="stream",
        )
