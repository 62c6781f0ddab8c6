"""Launchers: how far pointers that know their size must reach, null pointers, and scales by head."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged import DevicePtr
from tests.fake_backend import FakeBackend, aligned
from tests.launcher_cases import addresses, arguments, call, pairs
from tests.test_ops_errors import POINTERS, UNSIZED, refused


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


@pytest.mark.parametrize(("launcher", "name"), [p for p in pairs(POINTERS) if p[1] not in UNSIZED])
def test_sized_pointers_one_byte_too_short(gpu: FakeBackend, launcher: str, name: str) -> None:
    """All that an array must have, a `DevicePtr` that says its size must have too."""
    given = arguments(launcher)
    array = given[name]
    reach = array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    address = addresses(launcher)[name]
    message = refused(gpu, launcher, given, ValueError, name, **{name: DevicePtr(address, reach - 1)})
    assert message == f"{name}: got {reach - 1} bytes, needed are {reach}"
    for enough in (DevicePtr(address, reach), DevicePtr(address)):
        call(gpu, launcher, given, **{name: enough})
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"slot_mapping"})])
def test_a_writer_without_anything_to_write(gpu: FakeBackend, launcher: str) -> None:
    for null in (0, np.uint64(0), DevicePtr(0), DevicePtr(0, 8)):
        for given in (addresses(launcher), arguments(launcher)):
            message = refused(gpu, launcher, given, ValueError, "key, value", key=null, value=0)
            assert message == "key, value: got two null pointers (address 0) for 10 tokens, allowed is one"
            call(gpu, launcher, given, key=null)
            call(gpu, launcher, given, value=null)
            call(gpu, launcher, given, key=null, value=null, num_tokens=0)
            gpu.launches.clear()


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("reshape_and_cache_fp8", ("k_scales", "v_scales")),
        ("reshape_and_cache_nvfp4", ("k_scales", "v_scales")),
        ("gather_tokens_f32", ("scales",)),
        ("gather_tokens_bf16", ("scales",)),
    ],
)
def test_scales_by_head_have_one_shape(gpu: FakeBackend, launcher: str, names: tuple[str, ...]) -> None:
    """Of another one, the first values would be used for any head."""
    given = arguments(launcher)
    for name in names:
        for shape in ((3,), (8,), (2, 1), (1, 2), (2, 2)):
            scales = aligned(shape, np.float32)
            message = refused(gpu, launcher, given, ValueError, name, **{name: scales})
            assert message == f"{name}: got shape {shape}, allowed is (2,), a number for each head"
        refused(gpu, launcher, given, ValueError, name, **{name: DevicePtr(4096, 7)})
        call(gpu, launcher, given, **{name: aligned((2,), np.float32)})
        gpu.launches.clear()
