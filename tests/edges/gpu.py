"""Small helpers of the tests that need streams, graphs and more than one GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.paths import arguments, call, decoder_arguments, decoder_of, guarded_nan
from tests.rig import DeviceGuarded, Rig, UploadedCase, bits

SPIN_CYCLES = 200_000_000  # about a tenth of a second

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""


def cupy_of(rig: Rig) -> Any:
    """CuPy, or a skip on the emulator, which runs everything in order."""
    if rig.name != "cupy":
        pytest.skip("streams are for a GPU: the emulator runs launches in order")
    import cupy

    return cupy


def spin(cupy: Any, stream: Any, cycles: int = SPIN_CYCLES) -> None:
    """Keep a stream busy."""
    kernel = cupy.RawKernel(_SPIN, "spin")
    with stream:
        kernel((1,), (1,), (np.int64(cycles),))


class Prepared:
    """One path over a case on the device, with its outputs allocated: `launch` allocates nothing."""

    def __init__(self, up: UploadedCase, path: str, **changed: Any) -> None:
        rig, shape = up.rig, up.case.q.shape
        self.up, self.path, self.rig = up, path, rig
        self.output: DeviceGuarded = guarded_nan(rig, shape, np.uint16)
        self.named = arguments(up) | {"output": self.output.array} | changed
        self.format = up.case.layout.format.name
        if path.startswith("splits"):
            splits = int(path[6:])
            workspace = rig.gpu.asarray(np.full((*shape[:2], splits, shape[2] + 2), np.nan, np.float32))
            self.named |= {"workspace": workspace, "num_splits": splits}
        if path == "decoder":
            self.decoder = decoder_of(rig, up.case)

    def launch(self, stream: Any) -> None:
        """Decode on a stream."""
        if self.path == "single":
            call(self.rig, f"paged_decode_attn_{self.format}", stream, **self.named)
        elif self.path == "decoder":
            named = decoder_arguments(self.up, stream, **self.named)
            self.decoder.decode(**named, output=self.named["output"])
        else:
            call(self.rig, f"paged_decode_attn_splitk_{self.format}", stream, **self.named)
            reduce = "nvfp4" if self.format == "nvfp4" else "fp8"
            call(self.rig, f"paged_decode_attn_reduce_{reduce}", stream, **self.named)

    def result(self) -> Any:
        """The output's bits, after everything on the device."""
        self.rig.assert_guards_intact(self.output)
        return bits(self.rig.download_bf16(self.output.array)).copy()

    def clear(self) -> None:
        """NaN again."""
        self.output.array.fill(0x7FC0)
