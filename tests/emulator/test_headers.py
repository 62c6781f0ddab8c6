"""The emulator's headers keep up with the kernels' own."""

from __future__ import annotations

import re

from cupaged.backends.emulator import build
from cupaged.source import kernels_dir

_FUNCTION = re.compile(r"^DEVICE ((?:const )?\w+\*? \w+\([^)]*\))", re.MULTILINE)


def signatures(text: str) -> set[str]:
    return {" ".join(match.split()) for match in _FUNCTION.findall(text)}


def test_every_ptx_wrapper_has_a_body_with_the_same_signature() -> None:
    device = signatures((kernels_dir() / "ptx.cuh").read_text())
    emulated = signatures((build.INCLUDE / "cupaged_emulator_ptx.h").read_text())
    assert len(device) > 25
    # Kernels use their own code in place of these instructions, and pointers, here.
    only_on_device = {
        "u32 e4m3x2_to_f16x2(u32 codes)",
        "u32 floats_to_e4m3x4(float a, float b, float c, float d)",
        "u32 max_magnitude_bf16x2(u32 a, u32 b)",
        "u32 min_magnitude_bf16x2(u32 a, u32 b)",
        "u32 min_magnitude_f16x2(u32 a, u32 b)",
        "u32 shared_address(const void* pointer)",
    }
    assert device - emulated == only_on_device
