"""Launchers: shapes, ratios, handles and streams that are refused before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import ops
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from tests.fake_backend import FakeBackend
from tests.launcher_cases import LAUNCHERS, addresses, arguments, call, handle, pairs


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def strides_for(given: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """Arguments with changed sizes, and strides that are large enough for them."""
    changed = given | sizes
    roomy = {"q_stride": 2**16, "key_stride": 2**16, "value_stride": 2**16, "cache_stride": 2**22}
    roomy |= {"data_section_bytes": 2**22, "block_stride_bytes": 2**23}
    return changed | {name: value for name, value in roomy.items() if name in given}


WITH_HEADS = [name for name, _ in pairs({"num_kv_heads"}) if not name.startswith(("reshape", "gather"))]


@pytest.mark.parametrize("launcher", WITH_HEADS)
@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (5, 0), (0, 0), (0, 2), (129, 1), (512, 2)])
def test_ratios_refused(gpu: FakeBackend, launcher: str, heads: tuple[int, int]) -> None:
    given = strides_for(addresses(launcher), num_q_heads=heads[0], num_kv_heads=heads[1])
    with pytest.raises(ArgumentValueError, match=f"num_q_heads, num_kv_heads: got {heads[0]}, {heads[1]}"):
        call(gpu, launcher, given)
    assert gpu.launches == []


@pytest.mark.parametrize("launcher", WITH_HEADS)
@pytest.mark.parametrize("heads", [(9, 3), (28, 4), (24, 4), (5, 1), (16, 1), (1, 1), (17, 1), (128, 1)])
def test_ratios_allowed(gpu: FakeBackend, launcher: str, heads: tuple[int, int]) -> None:
    given = strides_for(addresses(launcher), num_q_heads=heads[0], num_kv_heads=heads[1])
    if "gqa_ratio" in given:
        given["gqa_ratio"] = heads[0] // heads[1]
    call(gpu, launcher, given)
    assert gpu.last.constants["SPEC_GQA_RATIO"] == str(heads[0] // heads[1])


def of_a_format(names: set[str]) -> list[tuple[str, str]]:
    """Parameters of launchers that have a specialisation for each shape, which those of `upkeep` have not."""
    return [pair for pair in pairs(names) if not pair[0].startswith(("gather_tokens", "merge_states"))]


@pytest.mark.parametrize(("launcher", "name"), of_a_format({"head_dim"}))
@pytest.mark.parametrize("head_dim", [0, 1, 8, 15, 17, 46, 63, 65, 72, 100, 264, 272, 512])
def test_head_dims_refused(gpu: FakeBackend, launcher: str, name: str, head_dim: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"head_dim: got {head_dim}, allowed"):
        call(gpu, launcher, strides_for(addresses(launcher), head_dim=head_dim))
    with pytest.raises(ArgumentValueError, match=r"head_dim|needed are|between rows"):
        call(gpu, launcher, strides_for(arguments(launcher), head_dim=head_dim))
    assert gpu.launches == []


@pytest.mark.parametrize(("launcher", "name"), of_a_format({"block_size"}))
@pytest.mark.parametrize("block_size", [0, 257, 2**31])
def test_block_sizes_refused(gpu: FakeBackend, launcher: str, name: str, block_size: int) -> None:
    given = strides_for(addresses(launcher), block_size=block_size)
    roomy = {"cache_stride": 2**50, "data_section_bytes": 2**50, "block_stride_bytes": 2**51}
    with pytest.raises(ArgumentValueError, match=f"block_size: got {block_size}, allowed"):
        call(gpu, launcher, given | {n: v for n, v in roomy.items() if n in given})
    assert gpu.launches == []


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"slot_mapping"})])
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "block_size"])
def test_writers_want_sizes_above_zero(gpu: FakeBackend, launcher: str, name: str) -> None:
    for given in (arguments(launcher), addresses(launcher)):
        with pytest.raises(ArgumentValueError, match=f"{name}: got 0, allowed"):
            call(gpu, launcher, given, **{name: 0})
    assert gpu.launches == []


@pytest.mark.parametrize(("launcher", "name"), pairs({"num_splits"}))
def test_numbers_of_splits(gpu: FakeBackend, launcher: str, name: str) -> None:
    for bad in (0, 65_536):
        with pytest.raises(ArgumentValueError, match=f"num_splits: got {bad}, allowed is 1 to 65535"):
            call(gpu, launcher, addresses(launcher), num_splits=bad)
    assert gpu.launches == []
    for good in (1, 65_535):
        call(gpu, launcher, addresses(launcher), num_splits=good)
        assert gpu.last.values["num_splits"] == good


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"gqa_ratio"})])
def test_a_ratio_that_contradicts_the_heads(gpu: FakeBackend, launcher: str) -> None:
    given = arguments(launcher)
    with pytest.raises(ArgumentValueError, match="gqa_ratio: got 2, but num_q_heads / num_kv_heads is 4"):
        call(gpu, launcher, given, gqa_ratio=2)
    assert gpu.launches == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_handles_of_other_kernels(gpu: FakeBackend, launcher: str, tmp_path: Path) -> None:
    given = arguments(launcher).values()
    function = getattr(ops, launcher)
    other = "bf16_absmax" if launcher != "bf16_absmax" else "bf16_absmax_rows"
    path = tmp_path / "own.cu"
    path.write_text(f'extern "C" __global__ void {launcher}(u32 a) {{}}')
    for kernel in (handle(gpu, other), gpu.kernel(path, launcher)):
        with pytest.raises(ArgumentValueError, match=f"kernel: got .*{kernel.entry}.* launches {launcher}$"):
            function(gpu, kernel, *given, 0)
    for nothing in (None, launcher, 3):
        with pytest.raises(ArgumentTypeError, match=f"kernel: got {nothing!r}, allowed is a handle"):
            function(gpu, nothing, *given, 0)
        with pytest.raises(ArgumentTypeError, match="kernel: got"):
            function(gpu, kernel=nothing, **arguments(launcher), stream=0)
    with pytest.raises(ArgumentValueError, match=r"kernel: got .*, allowed is a handle made by this"):
        function(gpu, handle(FakeBackend(), launcher), *given, 0)
    assert gpu.launches == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_streams(gpu: FakeBackend, launcher: str) -> None:
    for bad, error in ((None, TypeError), (True, TypeError), (False, TypeError), (-1, ValueError)):
        with pytest.raises(error, match="stream: got"):
            call(gpu, launcher, arguments(launcher), stream=bad)
    for other in ("0", 0.0):
        with pytest.raises(ArgumentTypeError, match="stream: got"):
            call(gpu, launcher, arguments(launcher), stream=other)
    assert gpu.launches == []
    for stream in (0, 1, 2, 2**40):
        call(gpu, launcher, arguments(launcher), stream=stream)
    assert [launch.stream for launch in gpu.launches] == [0, 1, 2, 2**40]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_missing_and_surplus_arguments_are_plain_type_errors(gpu: FakeBackend, launcher: str) -> None:
    function, given = getattr(ops, launcher), list(arguments(launcher).values())
    with pytest.raises(TypeError, match=rf"{launcher}\(\) missing .*stream"):
        function(gpu, handle(gpu, launcher), *given)
    with pytest.raises(TypeError, match=rf"{launcher}\(\) takes .* positional arguments"):
        function(gpu, handle(gpu, launcher), *given, 0, 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        function(gpu, handle(gpu, launcher), *given, 0, no_such=1)
    assert gpu.launches == []


def test_pinned_handles_refuse_other_shapes(gpu: FakeBackend) -> None:
    kernel = gpu.kernel("paged_decode_attn_fp8", "paged_decode_attn_fp8", head_dim=128)
    with pytest.raises(ArgumentValueError, match="head_dim is pinned to 128, but this launch asks for 64"):
        ops.paged_decode_attn_fp8(gpu, kernel, **arguments("paged_decode_attn_fp8"), stream=0)  # type: ignore[arg-type]
    assert gpu.launches == gpu.loads == []  # type: ignore[comparison-overlap]


def test_a_grid_beyond_the_limits(gpu: FakeBackend) -> None:
    given = addresses("reshape_and_cache_bf16")
    with pytest.raises(ArgumentValueError, match=r"reshape_and_cache_bf16: got grid .* allowed is at most"):
        call(gpu, "reshape_and_cache_bf16", given, num_tokens=2**32 - 1, num_kv_heads=2**8, **{
            "key_stride": 2**20, "value_stride": 2**20})  # fmt: skip
    assert gpu.launches == []


def test_scalars_as_numpy_floats_are_no_integers(gpu: FakeBackend) -> None:
    with pytest.raises(ArgumentTypeError, match=r"n_elems: got np\.float64\(1000\.0\)"):
        call(gpu, "bf16_absmax", arguments("bf16_absmax"), n_elems=np.float64(1000))
    assert gpu.launches == []
