"""Kernel handles that are looked up once for each backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged.handle import KernelHandle

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

_KEPT = "_kept_kernel_handles"


def kernel_of(gpu: GpuBackend, module: str, entry: str) -> KernelHandle:
    """The handle of a package's kernel, with the specialisations that it has loaded so far.

    A handle refers to its backend, so the backend itself keeps it: both go together.
    """
    kept: dict[tuple[str, str], Any] = vars(gpu).setdefault(_KEPT, {})
    handle: KernelHandle | None = kept.get((module, entry))
    if handle is None:
        handle = kept[module, entry] = gpu.kernel(module, entry)
    return handle
