"""The backend's arguments, memory, compiler and cache."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.backends.emulator import EmulatorBackend, compiler, memory
from cupaged.errors import ArgumentTypeError, ArgumentValueError, BackendUnavailableError
from cupaged.pointers import DevicePtr
from tests.emulator.launching import launch


class UcontextBackend(EmulatorBackend):
    """Switches between threads by the C library's means instead of its own."""

    def _runtime_defines(self) -> tuple[str, ...]:
        return ("CUPAGED_EMULATOR_UCONTEXT",)


@pytest.mark.parametrize("name", ["schedule", "check"])
@pytest.mark.parametrize("bad", [["fifo"], None, 3, "lifo", {}])
def test_names_of_modes(name: str, bad: Any) -> None:
    with pytest.raises(ArgumentValueError, match=rf"^{name}: got .*, allowed are "):
        EmulatorBackend(**{name: bad})


@pytest.mark.parametrize("schedule", ["fifo", "random"])
def test_portable_switch_gives_the_same(schedule: str) -> None:
    tiles = np.random.default_rng(0).standard_normal((11, 64)).astype(np.float32)
    results = []
    for backend in (EmulatorBackend, UcontextBackend):
        gpu = backend(schedule=schedule, seed=5)
        out = gpu.empty(64, np.float32)
        launch(gpu, "async_copies", "bulk_ring", gpu.asarray(tiles), out, 11, block=96)
        values = gpu.asarray(np.arange(300, dtype=np.float32))
        launch(gpu, "collectives", "rotate", values, 3, block=300, SPEC_BROKEN=0)
        results.append(np.concatenate([out, values]))
    np.testing.assert_array_equal(*results)


def test_launches_from_many_threads(fifo: EmulatorBackend) -> None:
    results: list[bool] = []

    def work() -> None:
        for _ in range(20):
            values = fifo.asarray(np.arange(256, dtype=np.float32))
            launch(fifo, "collectives", "rotate", values, 3, block=256, SPEC_BROKEN=0)
            results.append(np.array_equal(values, np.roll(np.arange(256), -3)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


# ---- compiler and cache


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"g\+\+, c\+\+, clang\+\+.*apt-get install g\+\+"):
        EmulatorBackend()


def test_cxx_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BackendUnavailableError, match="CXX is 'no-such-compiler -m64'"):
        EmulatorBackend()


def test_ziglang_comes_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: object())
    assert compiler.find_compiler().command[1:] == ("-m", "ziglang", "c++")


def test_cache_is_used_and_holds_nothing_half_made(own_cache: Path) -> None:
    launch(EmulatorBackend(), "geometry", "nothing")
    folder = own_cache / "emulator"
    first = {path.name: path.stat().st_ino for path in folder.glob("[!.]*")}
    assert [Path(name).suffix for name in first] == [".so", ".so"]
    launch(EmulatorBackend(), "geometry", "nothing")
    assert {path.name: path.stat().st_ino for path in folder.glob("[!.]*")} == first
    launch(EmulatorBackend(), "collectives", "rotate", np.zeros(32, np.float32), 1, SPEC_BROKEN=0)
    launch(EmulatorBackend(), "collectives", "rotate", np.zeros(32, np.float32), 1, SPEC_BROKEN=2)
    assert len(list(folder.glob("[!.]*"))) == 4
    assert [path.name for path in folder.glob(".*")] == [".lock"]


def test_cache_that_is_deleted_or_moved_meanwhile(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = EmulatorBackend()
    launch(gpu, "geometry", "nothing")
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(own_cache / "moved"))
    launch(gpu, "collectives", "active", np.zeros(32, np.uint32))
    shutil.rmtree(own_cache)
    launch(gpu, "collectives", "nested_masks", np.zeros(32, np.uint32))


def test_first_compilation_by_many_threads(own_cache: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            launch(EmulatorBackend(), "geometry", "nothing")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(obstacle / "cache"))
    with pytest.warns(RuntimeWarning, match="CUPAGED_CACHE_DIR"):
        launch(EmulatorBackend(), "geometry", "nothing")


# ---- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"check": "some"},
        {"schedule": "lifo"},
        {"workers": 0},
        {"num_sms": 0},
        {"seed": -1},
        {"stack_bytes": 100},
    ],
)
def test_constructor_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentValueError, match=next(iter(wrong))):
        EmulatorBackend(**wrong)


def test_constructor_types() -> None:
    with pytest.raises(ArgumentTypeError, match="workers"):
        EmulatorBackend(workers=True)


def test_identity(fifo: EmulatorBackend) -> None:
    assert (fifo.name, fifo.arch, fifo.num_sms) == ("emulator", "emulator", 4)
    assert EmulatorBackend(num_sms=9).num_sms == 9
    assert type(EmulatorBackend(num_sms=np.int64(9)).num_sms) is int


class OnAGpu:
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (4096, False)}


class StreamProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 77)


class StreamWithPtr:
    ptr = 78


def test_pointers(fifo: EmulatorBackend) -> None:
    array = np.zeros(4, np.float32)
    assert fifo.pointer(array[1:]) == array.ctypes.data + 4
    assert fifo.pointer(DevicePtr(123)) == 123
    assert fifo.pointer(np.uint64(124)) == 124
    with pytest.raises(ArgumentTypeError, match="memory of a GPU"):
        fifo.pointer(OnAGpu())
    for wrong in ("text", None, 1.5, [1]):
        with pytest.raises(ArgumentTypeError, match=r"allowed are an array .*, DevicePtr, an int address"):
            fifo.pointer(wrong)


def test_streams(fifo: EmulatorBackend) -> None:
    assert fifo.null_stream() == 0
    assert [fifo.stream_handle(s) for s in (0, 5, StreamProtocol(), StreamWithPtr())] == [0, 5, 77, 78]
    for wrong in (None, True, "0", 1.0, SimpleNamespace(ptr=True), SimpleNamespace(ptr=1.5)):
        with pytest.raises(ArgumentTypeError, match="stream"):
            fifo.stream_handle(wrong)
    for given in (5, (0,), (0, "x"), (0, 1.5), (0, 1, 2)):
        with pytest.raises(ArgumentTypeError, match=r"^stream: got .* whose __cuda_stream__ gives"):
            fifo.stream_handle(SimpleNamespace(__cuda_stream__=given))
    for number in (-3, 2**64):
        for stream in (number, SimpleNamespace(ptr=number), SimpleNamespace(__cuda_stream__=(0, number))):
            with pytest.raises(ArgumentValueError, match=f"^stream: got {number}, a handle is 0 to"):
                fifo.stream_handle(stream)
    with pytest.raises(ArgumentValueError, match="stream: got -1"):
        fifo.stream_handle(-1)
    fifo.synchronize()
    fifo.synchronize(0)


# ---- memory


def test_allocation(fifo: EmulatorBackend) -> None:
    fresh = fifo.empty((3, 5), np.float32)
    assert fresh.shape == (3, 5)
    assert np.isnan(fresh).all()
    assert fresh.ctypes.data % memory.ALIGNMENT == 0
    assert fifo.zeros(7, np.int64).tolist() == [0] * 7
    assert fifo.empty((0, 4), np.uint8).shape == (0, 4)
    with pytest.raises(ArgumentValueError, match="negative"):
        fifo.empty((2, -1), np.uint8)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.int64])
def test_asarray_copies_and_keeps_the_dtype(fifo: EmulatorBackend, dtype: type) -> None:
    host = np.arange(12).astype(dtype).reshape(3, 4).T
    device = fifo.asarray(host)
    assert device.dtype == host.dtype
    assert device.flags.c_contiguous
    np.testing.assert_array_equal(device, host)
    assert not np.shares_memory(device, host)
    back = fifo.to_host(device)
    np.testing.assert_array_equal(back, host)
    assert not np.shares_memory(back, device)


def test_to_host_wants_an_array(fifo: EmulatorBackend) -> None:
    with pytest.raises(ArgumentTypeError, match="array"):
        fifo.to_host(5)


def test_memset(fifo: EmulatorBackend) -> None:
    array = fifo.zeros(8, np.uint8)
    fifo.memset(fifo.pointer(array) + 2, 7, 3, fifo.null_stream())
    assert array.tolist() == [0, 0, 7, 7, 7, 0, 0, 0]


def test_ranges_of_live_allocations() -> None:
    device = memory.DeviceMemory()
    array = device.allocate((4, 4), np.float32, 0)
    address = array.ctypes.data
    view = array[1:].view(np.uint32)
    assert device.ranges() == [(address, 64)]
    del array
    assert device.ranges() == [(address, 64)]
    del view
    assert device.ranges() == []


class CollectingLock:
    """Runs the garbage collector while it is held, as any allocation of the holder may."""

    def __init__(self) -> None:
        self.held = False
        self.taken_again = 0

    def __enter__(self) -> None:
        self.taken_again += self.held
        self.held = True
        gc.collect()

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_allocations_that_only_the_garbage_collector_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may run while the ranges are being listed; what is over is not kept for ever."""
    device = memory.DeviceMemory()
    cycle: list[object] = [device.allocate(8, np.uint8, 0)]
    cycle.append(cycle)
    del cycle
    with monkeypatch.context() as patch:
        patch.setattr(device, "_lock", lock := CollectingLock())
        assert device.ranges() == []
    assert lock.taken_again == 0
    for _ in range(3000):
        device.allocate(8, np.uint8, 0)
    assert len(device._ranges) <= 1024
