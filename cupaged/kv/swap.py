"""Blocks in the host's memory, where those of a cache may wait."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupaged.formats import CacheLayout
from cupaged.pointers import DevicePtr

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


@dataclass(frozen=True)
class HostBlocks:
    """K and V blocks in pinned memory of the host, which a GPU reaches by itself; plain on the emulator.

    What a stream copies there is to be read by the host after that stream was waited for.

    Attributes:
        layout: of the K blocks, which lie tightly.
        value_layout: the same of V.
        num_blocks: blocks of each.
        k: K blocks, uint8 ``[num_blocks, layout.block_stride_bytes]``.
        v: V blocks, uint8 ``[num_blocks, value_layout.block_stride_bytes]``.
    """

    layout: CacheLayout
    value_layout: CacheLayout
    num_blocks: int
    k: npt.NDArray[np.uint8]
    v: npt.NDArray[np.uint8]

    @staticmethod
    def allocate(
        gpu: GpuBackend, layout: CacheLayout, value_layout: CacheLayout, num_blocks: int
    ) -> HostBlocks:
        """Room for blocks of a cache of these layouts."""
        layouts = (_tight(layout), _tight(value_layout))
        k, v = (_pinned(gpu, (num_blocks, tight.block_stride_bytes)) for tight in layouts)
        return HostBlocks(*layouts, num_blocks, k, v)

    def pointers(self) -> tuple[DevicePtr, DevicePtr]:
        """Where the K and the V blocks begin, for the GPU."""
        k, v = (DevicePtr(pool.ctypes.data, pool.nbytes) for pool in (self.k, self.v))
        return k, v


def _tight(layout: CacheLayout) -> CacheLayout:
    """The layout without gaps, sections and blocks at multiples of 16 bytes, as kernels copy them."""
    plain = dataclasses.replace(layout, block_stride_override=None, data_section_override=None)
    if layout.format.has_scale_section:
        section = _multiple_of_16(plain.data_section_bytes)
        plain = dataclasses.replace(plain, data_section_override=section)
    return dataclasses.replace(plain, block_stride_override=_multiple_of_16(plain.block_bytes))


def _multiple_of_16(size: int) -> int:
    return -(-size // 16) * 16


def _pinned(gpu: Any, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    if gpu.name != "cupy":
        plain: npt.NDArray[np.uint8] = gpu.zeros(shape, np.uint8)
        return plain
    import cupy

    size = shape[0] * shape[1]
    with cupy.cuda.Device(gpu.device):
        # A block of its own: CuPy's pool of pinned memory rounds sizes up to powers of two.
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(max(1, size)), 0)
    pinned: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size).reshape(shape)
    pinned[...] = 0
    return pinned
