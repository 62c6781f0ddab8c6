"""What a backend must offer to the launch builder and to the launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cupaged.registry import DeviceLimits
from cupaged.source import KernelSource

if TYPE_CHECKING:
    from cupaged.handle import KernelHandle


class LoadedKernel(Protocol):
    """One compiled specialisation, ready to launch; made by `GpuBackend.load`."""

    @property
    def source(self) -> KernelSource: ...


class GpuBackend(Protocol):
    """A device, real or emulated. All streams are explicit; nothing here synchronises unless it says so."""

    @property
    def name(self) -> str:
        """``"cupy"`` or ``"emulator"``."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors; the emulator says 4."""

    @property
    def limits(self) -> DeviceLimits:
        """What kernels are shaped by; the emulator says what it would be on sm_90."""

    @property
    def arch(self) -> str:
        """Compilation target, for example ``"sm_90a"``; the emulator says ``"emulator"``."""

    def kernel(self, module: str | Path, entry: str, **spec: int | str) -> KernelHandle:
        """Handle of a kernel; `cupaged.handle.HandleFactory` provides it."""

    def load(self, source: KernelSource) -> LoadedKernel:
        """Compile (or fetch from a cache) and load.

        Raises:
            CompileError: with the compiler's log.
        """

    def launch_packed(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        params: int,
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> None:
        """Launch with packed parameters.

        Args:
            kernel: from `load`.
            grid: blocks in x, y, z.
            block: threads in x, y, z.
            shared_mem: bytes of dynamic shared memory.
            params: address of an array of pointers, one to each packed parameter.
            stream: raw stream handle.
            arguments: parameter position -> the object given for that pointer, where it was not a bare
                int (the emulator's check mode learns buffer sizes from them).
            cooperative: all blocks must be resident at once.
            overlapping: the kernel waits by itself for the one before, and may be launched while that ends.
        """

    def prepare(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        parameters: bytes,
        offsets: Sequence[int],
        stream: int,
        arguments: Mapping[int, Any],
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> Callable[[], None] | None:
        """A launch that was made before, to make it again; threads may share it, and it keeps no array.

        Args:
            parameters: packed as the driver takes them.
            offsets: of each parameter in these bytes.
            kernel, grid, block, shared_mem, stream, arguments, cooperative, overlapping: as `launch_packed`
                takes them.

        Returns:
            None where the backend must have each launch by `launch_packed`.
        """

    def pointer(self, value: Any) -> int:
        """Device address of an array that lives on this backend.

        Raises:
            ArgumentTypeError: the object is nothing that lives on a device like this one.
            ArgumentValueError: it lives on another device.
        """

    def views(self, pointers: Sequence[Any]) -> tuple[Any, ...] | None:
        """What checks look at, for each pointer of a call: equal ones pass the same checks.

        Of an array of the backend's own kind: (address, device, dtype, shape, strides), the device left out
        where there is but one; of a `DevicePtr`: (address, its type, nbytes); ints and None are themselves.
        None where any is something else: `pointer` says what is wrong with it, if anything.
        """

    def stream_handle(self, stream: Any) -> int:
        """Raw handle of a stream: an int, a CuPy stream, or an object with ``__cuda_stream__``."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Uninitialised device array (on the emulator: a NumPy array filled with 0xFF bytes)."""

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Zeroed device array."""

    def asarray(self, host: npt.ArrayLike) -> Any:
        """Copy of a host array on the device; types NumPy has no native code for come as ml_dtypes arrays."""

    def to_host(self, array: Any) -> np.ndarray:
        """Copy to the host, after everything queued on every stream (synchronises)."""

    def memset(self, pointer: int, value: int, num_bytes: int, stream: int) -> None:
        """Fill bytes, ordered on the stream."""

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for one stream, or for the whole device."""

    def null_stream(self) -> int:
        """Handle of the default stream."""
