"""The launch builder's geometry, streams and handles, with kernels of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ArgumentValueError, KernelSourceError
from tests.fake_backend import FakeBackend, builder, own_kernel, small


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


def test_own_kernels_need_grid_and_block(gpu: FakeBackend, tmp_path: Path) -> None:
    kernel = own_kernel(gpu, tmp_path, ())
    for launch in (builder(gpu, kernel), builder(gpu, kernel).grid([1, 1, 1])):
        with pytest.raises(ArgumentValueError, match="k_: this kernel needs both grid and block"):
            launch.launch(0)
    with pytest.raises(ArgumentValueError, match="needs both"):
        builder(gpu, kernel).block([1, 1, 1]).launch(0)
    assert gpu.launches == []


@pytest.mark.parametrize("which", ["grid", "block"])
@pytest.mark.parametrize(
    ("dims", "error"),
    [
        *(
            (dims, ValueError)
            for dims in ([], [1], [1, 1], [1, 1, 1, 1], [0, 1, 1], [1, -1, 1], [1, 1, 2**32])
        ),
        *((dims, TypeError) for dims in ([1.0, 1, 1], [True, 1, 1], 4, None)),
    ],
)
def test_bad_dimensions(
    gpu: FakeBackend, tmp_path: Path, which: str, dims: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{which}: got .*allowed"):
        getattr(builder(gpu, own_kernel(gpu, tmp_path, ())), which)(dims)


def test_dimensions_of_numpy_integers_and_tuples(gpu: FakeBackend, tmp_path: Path) -> None:
    kernel = own_kernel(gpu, tmp_path, ())
    builder(gpu, kernel).grid((np.int64(2), 3, 4)).block(list(np.array([8, 4, 2]))).launch(0)
    assert (gpu.last.grid, gpu.last.block) == ((2, 3, 4), (8, 4, 2))
    assert all(type(n) is int for n in (*gpu.last.grid, *gpu.last.block))


def test_grid_limits(gpu: FakeBackend, tmp_path: Path) -> None:
    kernel = own_kernel(gpu, tmp_path, ())
    limits = (2**31 - 1, 65_535, 65_535)
    builder(gpu, kernel).grid(limits).block([1, 1, 1]).launch(0)
    assert gpu.last.grid == limits
    for axis in range(3):
        grid = list(limits)
        grid[axis] += 1
        with pytest.raises(ArgumentValueError, match=rf"k_: got grid \({grid[0]}, .*allowed is at most"):
            builder(gpu, kernel).grid(grid).block([1, 1, 1]).launch(0)
    assert len(gpu.launches) == 1


def test_shared_memory(gpu: FakeBackend, tmp_path: Path) -> None:
    launch = small(gpu, own_kernel(gpu, tmp_path, ()))
    launch.launch(0)
    launch.shared_mem(100_000).launch(0)
    assert [launch.shared_mem for launch in gpu.launches] == [0, 100_000]
    for bad, error in ((-1, ValueError), (2**32, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="shared_mem: got"):
            launch.shared_mem(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stream", "error"), [(None, TypeError), (True, TypeError), (-1, ValueError)])
def test_a_stream_is_always_given(
    gpu: FakeBackend, tmp_path: Path, stream: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="stream: got"):
        small(gpu, own_kernel(gpu, tmp_path, ())).launch(stream)
    assert gpu.launches == []


def test_a_handle_of_another_backend_is_refused(gpu: FakeBackend, tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="kernel: got <KernelHandle k_:k_ on fake>"):
        builder(FakeBackend(), own_kernel(gpu, tmp_path, ()))


def test_own_kernels_get_macros_and_are_loaded_once(gpu: FakeBackend, tmp_path: Path) -> None:
    own_kernel(gpu, tmp_path, ("u32",))
    kernel = gpu.kernel(str(tmp_path / "k_u32.cu"), "k_u32", TILE=8, NAME="x")
    assert not kernel.owns_geometry
    kernel.warm()
    for value in range(3):
        small(gpu, kernel).arg_u32(value).launch(0)
    assert len(gpu.loads) == 1
    assert gpu.last.constants == {"TILE": "8", "NAME": "x"}
    with pytest.raises(ArgumentValueError, match=r"k_u32: got \['TILE'\].*gpu.kernel"):
        kernel.warm(TILE=8)


def test_missing_files_and_entries_are_kernel_source_errors(gpu: FakeBackend, tmp_path: Path) -> None:
    with pytest.raises(KernelSourceError, match=r"missing\.cu: cannot be read"):
        gpu.kernel(tmp_path / "missing.cu", "k")
    own_kernel(gpu, tmp_path, ())
    with pytest.raises(KernelSourceError, match=r"k_\.cu: no entry .*void other"):
        gpu.kernel(tmp_path / "k_.cu", "other")
    with pytest.raises(
        KernelSourceError, match=r"no kernel bf16_absmax:nothing; the nearest are .*bf16_absmax:bf16"
    ):
        gpu.kernel("bf16_absmax", "nothing")
