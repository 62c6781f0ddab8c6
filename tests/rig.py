"""A backend under test: uploads, downloads, kernel handles, and the three ways to run a decode."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import ops
from cupaged.formats import CacheFormat, CacheLayout
from cupaged.handle import KernelHandle
from tests.poison import GUARD_BYTE, GUARD_BYTES, Guarded, PagedCase

BF16_NAN = 0x7FC0


@dataclass
class DeviceGuarded:
    """An array on the device with guard bytes on both sides."""

    storage: Any
    array: Any


class Rig:
    """One backend; kernels are looked up once."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.stream = gpu.null_stream()
        self._kernels: dict[tuple[str, str], KernelHandle] = {}

    @property
    def name(self) -> str:
        return str(self.gpu.name)

    def kernel(self, module: str, entry: str | None = None) -> KernelHandle:
        key = (module, entry or module)
        if key not in self._kernels:
            self._kernels[key] = self.gpu.kernel(*key)
        return self._kernels[key]

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy on the device; ml_dtypes become bits."""
        host = np.ascontiguousarray(array)
        if host.dtype == ml_dtypes.bfloat16:
            host = host.view(np.uint16)
        return self.gpu.asarray(host.copy())

    def upload_guarded(self, guarded: Guarded) -> DeviceGuarded:
        """A copy between guard bytes, whatever the alignment of the host's storage."""
        data = guarded.array.reshape(-1).view(np.uint8)
        wide = np.full(data.nbytes + 2 * GUARD_BYTES, GUARD_BYTE, np.uint8)
        wide[GUARD_BYTES : GUARD_BYTES + data.nbytes] = data
        storage = self.gpu.asarray(wide)
        inside = storage[GUARD_BYTES : GUARD_BYTES + data.nbytes]
        return DeviceGuarded(storage, inside.view(_bits(guarded.array.dtype)).reshape(guarded.array.shape))

    def assert_guards_intact(self, guarded: DeviceGuarded) -> None:
        host = self.gpu.to_host(guarded.storage)
        for side in (host[:GUARD_BYTES], host[-GUARD_BYTES:]):
            assert (side == GUARD_BYTE).all(), "guard bytes changed"

    def full_bf16(self, shape: tuple[int, ...], bits: int = BF16_NAN) -> Any:
        return self.gpu.asarray(np.full(shape, bits, np.uint16))

    def download(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(self.gpu.to_host(array))

    def download_bf16(self, array: Any) -> npt.NDArray[Any]:
        return self.download(array).view(np.uint16).view(ml_dtypes.bfloat16)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint16) if dtype == ml_dtypes.bfloat16 else dtype


@dataclass
class UploadedCase:
    """A `PagedCase` on a device."""

    rig: Rig
    case: PagedCase
    q: Any
    k: DeviceGuarded
    v: DeviceGuarded
    tables: Any
    lengths: Any

    def assert_pools_untouched(self) -> None:
        for device, host in ((self.k, self.case.k_guarded), (self.v, self.case.v_guarded)):
            self.rig.assert_guards_intact(device)
            found = self.rig.download(device.array).reshape(-1).view(np.uint8)
            assert (found == host.array.reshape(-1).view(np.uint8)).all(), "decode changed a pool"


def upload_case(rig: Rig, case: PagedCase) -> UploadedCase:
    return UploadedCase(
        rig=rig,
        case=case,
        q=rig.upload(case.q_storage()),
        k=rig.upload_guarded(case.k_guarded),
        v=rig.upload_guarded(case.v_guarded),
        tables=rig.upload(case.block_tables),
        lengths=rig.upload(case.seq_lens),
    )


@dataclass(frozen=True)
class LaunchArguments:
    """Where the launchers of the formats differ.

    Attributes:
        scales: positional ones, before the row strides.
        strides: positional ones, after the row strides.
        window: sliding_window, where it is positional; the last before the stream.
        keywords: sliding_window, where it is a keyword.
    """

    scales: tuple[Any, ...]
    strides: tuple[int, ...]
    window: tuple[int, ...]
    keywords: dict[str, Any]


def launch_arguments(
    launcher: str, layout: CacheLayout, scales: tuple[Any, Any] = (1.0, 1.0), window: int = 0
) -> LaunchArguments:
    """What a launcher's own signature asks for, of a layout: so a new format has no case here.

    Args:
        launcher: a writer's name, or that of a decode.
        layout: of the pools.
        scales: K's and V's, for formats that need them.
        window: sliding_window.
    """
    parameters = inspect.signature(getattr(ops, launcher)).parameters
    given: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1], "sliding_window": window}

    def positional(*names: str) -> tuple[Any, ...]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found = [name for name in names if name in parameters and parameters[name].kind is kind]
        return tuple(given[name] if name in given else getattr(layout, name) for name in found)

    windows = positional("sliding_window")
    is_keyword = "sliding_window" in parameters and not windows
    return LaunchArguments(
        scales=positional("k_scale", "v_scale"),
        strides=positional("cache_stride", "block_stride_bytes", "data_section_bytes"),
        window=windows,
        keywords={"sliding_window": window} if is_keyword else {},
    )


def _case_arguments(launcher: str, case: PagedCase) -> LaunchArguments:
    return launch_arguments(launcher, case.layout, (case.k_scale, case.v_scale), case.window)


def reduction(fmt: CacheFormat) -> str:
    """Name of the reduction's launcher: a format without one of its own takes FP8's."""
    own = f"paged_decode_attn_reduce_{fmt.name}"
    return own if hasattr(ops, own) else "paged_decode_attn_reduce_fp8"


def run_single(up: UploadedCase, *, num_blocks: int | None = None) -> npt.NDArray[Any]:
    """Single-pass decode; BF16 ``[num_seqs, num_q_heads, head_dim]`` on the host."""
    rig, case = up.rig, up.case
    name = f"paged_decode_attn_{case.layout.format.name}"
    own = _case_arguments(name, case)
    output = rig.full_bf16(case.q.shape)
    getattr(ops, name)(
        rig.gpu,
        rig.kernel(name),
        up.q,
        up.k.array,
        up.v.array,
        output,
        up.tables,
        up.lengths,
        case.max_blocks_per_seq,
        case.num_seqs,
        case.num_q_heads,
        case.layout.num_kv_heads,
        case.layout.head_dim,
        case.layout.block_size,
        case.inv_sqrt_d,
        *own.scales,
        case.q_stride,
        *own.strides,
        *own.window,
        rig.stream,
        num_blocks=num_blocks,
        **own.keywords,
    )
    return rig.download_bf16(output)


def run_split(up: UploadedCase, num_splits: int, *, num_blocks: int | None = None) -> Any:
    """Split-K decode alone; the workspace on the device, with NaN where nothing was written."""
    rig, case = up.rig, up.case
    fmt = case.layout.format.name
    entry = f"paged_decode_attn_splitk_{fmt}"
    own = _case_arguments(entry, case)
    shape = (case.num_seqs, case.num_q_heads, num_splits, case.layout.head_dim + 2)
    workspace = rig.gpu.asarray(np.full(shape, np.nan, np.float32))
    getattr(ops, entry)(
        rig.gpu,
        rig.kernel(f"paged_decode_attn_{fmt}", entry),
        up.q,
        up.k.array,
        up.v.array,
        workspace,
        up.tables,
        up.lengths,
        case.max_blocks_per_seq,
        case.num_q_heads,
        case.layout.num_kv_heads,
        case.layout.head_dim,
        case.layout.block_size,
        case.inv_sqrt_d,
        num_splits,
        *own.scales,
        case.q_stride,
        *own.strides,
        case.num_seqs,
        *own.window,
        rig.stream,
        num_blocks=num_blocks,
        **own.keywords,
    )
    return workspace


def run_reduce(up: UploadedCase, workspace: Any, num_splits: int) -> npt.NDArray[Any]:
    """The second step of split-K decode."""
    rig, case = up.rig, up.case
    entry = reduction(case.layout.format)
    output = rig.full_bf16(case.q.shape)
    getattr(ops, entry)(
        rig.gpu,
        rig.kernel("paged_decode_attn_reduce", entry),
        workspace,
        output,
        up.lengths,
        case.num_q_heads,
        case.layout.head_dim,
        num_splits,
        case.num_seqs,
        rig.stream,
    )
    return rig.download_bf16(output)


def run_decode(up: UploadedCase, splits: int, *, num_blocks: int | None = None) -> npt.NDArray[Any]:
    """Decode by the path that ``splits`` names: 0 is the single pass, otherwise split-K and reduce."""
    if splits == 0:
        return run_single(up, num_blocks=num_blocks)
    return run_reduce(up, run_split(up, splits, num_blocks=num_blocks), splits)


def bits(array: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray(array).view(np.uint16)


def num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
