"""Calls like one before skip the checks: the driver gets the same, and every difference is seen."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import DevicePtr, ops
from cupaged.backends.cupy import CupyBackend
from cupaged.checked import checked_mode
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.launch import recording
from cupaged.ops import _warm
from tests.fake_backend import FakeBackend, Launch, aligned, own_kernel, small
from tests.launcher_cases import LAUNCHERS, SCALARS, addresses, arguments, handle, pairs
from tests.warm import UNTIL_READY, Counted, same

Gpu = FakeBackend
launchers = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def gpu() -> Gpu:
    return FakeBackend()


def caller(gpu: Gpu, launcher: str, given: dict[str, Any]) -> Callable[..., Launch]:
    """Calls one handle's launcher, and says what reached the driver."""
    function, kernel = getattr(ops, launcher), handle(gpu, launcher)

    def call(stream: int = 3, **changed: Any) -> Launch:
        now = given | changed
        function(gpu, kernel, *(now.pop(name) for name in given), stream, **now)
        return gpu.last

    return call


def warm(gpu: Gpu, launcher: str, given: dict[str, Any]) -> Callable[..., Launch]:
    """The same after as many calls as it takes until all is ready."""
    call = caller(gpu, launcher, given)
    for _ in range(UNTIL_READY):
        call()
    return call


def cold(launcher: str, given: dict[str, Any], stream: int = 3, **changed: Any) -> Launch:
    """What reaches the driver in a first call."""
    return caller(FakeBackend(), launcher, given)(stream, **changed)


def moved(given: dict[str, Any]) -> dict[str, Any]:
    """The same call with every pointer elsewhere: other addresses, or other arrays of the same kind."""

    def elsewhere(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value + (1 << 30)
        storage = np.zeros(value.nbytes * 4 + 4096, np.uint8)
        start = -storage.ctypes.data % 256
        return np.lib.stride_tricks.as_strided(
            storage[start:][: value.size * value.itemsize].view(value.dtype), value.shape, value.strides
        )

    return {name: value if name in SCALARS else elsewhere(value) for name, value in given.items()}


@pytest.mark.parametrize("kind", [addresses, arguments])
@launchers
def test_a_warm_call_launches_what_a_cold_one_does(
    gpu: Gpu, counted: Counted, launcher: str, kind: Callable[[str], dict[str, Any]]
) -> None:
    given = kind(launcher)
    call = warm(gpu, launcher, given)
    assert same(call(), cold(launcher, given))
    counted.whole = 0
    others = moved(given)
    assert same(call(**others), expected := cold(launcher, others))
    assert same(call(**others), expected)
    assert same(call(7), cold(launcher, given, 7))
    assert counted.whole == 2, "only the two cold ones"


@launchers
def test_by_keyword_too(gpu: Gpu, counted: Counted, launcher: str) -> None:
    given = addresses(launcher)
    function, kernel = getattr(ops, launcher), handle(gpu, launcher)
    for _ in range(UNTIL_READY + 1):
        function(gpu=gpu, **given, stream=3, kernel=kernel)
    assert counted.whole == 2
    assert gpu.again > 0
    assert same(gpu.last, cold(launcher, given))


@pytest.mark.parametrize(("launcher", "name"), pairs(set(SCALARS)))
def test_every_scalar_counts(gpu: Gpu, launcher: str, name: str) -> None:
    """With another value the launch, or the refusal, is that of a first call."""
    given = addresses(launcher)
    call = warm(gpu, launcher, given)
    call()
    other = given[name] * 2
    try:
        expected = cold(launcher, given, **{name: other})
    except (ArgumentValueError, IndexError) as error:
        launched = len(gpu.launches)
        with pytest.raises(type(error)):
            call(**{name: other})
        assert len(gpu.launches) == launched
    else:
        assert same(call(**{name: other}), expected)


DECODE = "paged_decode_attn_bf16"


def test_another_dtype_shape_or_stride_is_seen(gpu: Gpu) -> None:
    given = arguments(DECODE)
    call = warm(gpu, DECODE, given)
    wide = aligned((3, 10), np.int32)
    for changed, match in (
        ({"q": given["q"].view(np.int16)}, "q: got dtype int16"),
        ({"seq_lens": given["seq_lens"][:2]}, "seq_lens: got 2 elements"),
        ({"output": aligned((8, 3, 64), ml_dtypes.bfloat16).swapaxes(0, 1)}, "output: got strides"),
        ({"block_tables": wide[:, ::2]}, "block_tables: got strides"),
        ({"k_cache": given["k_cache"][:0]}, "num_blocks: got 0"),
    ):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=match):
            call(**changed)
        for _ in range(2):
            call()
    assert call(k_cache=given["k_cache"][:4]).values["num_blocks"] == 4
    assert call().values["num_blocks"] == len(given["k_cache"])


def test_an_array_that_was_reshaped_in_place_is_seen(gpu: Gpu) -> None:
    call = warm(gpu, DECODE, given := arguments(DECODE))
    table = given["block_tables"]
    table.shape = (5, 3)
    with pytest.raises(ArgumentValueError, match="max_blocks_per_seq: got 5, but block_tables has 3 columns"):
        call()
    table.shape = (3, 5)
    call()


def test_a_pointer_with_another_size_is_seen(gpu: Gpu, counted: Counted) -> None:
    given = addresses(DECODE)
    block = 2 * 16 * 2 * 64
    pools = {name: DevicePtr(given[name], 6 * block) for name in ("k_cache", "v_cache")}
    call = warm(gpu, DECODE, given | pools)
    assert call().values["num_blocks"] == 6
    assert call(k_cache=DevicePtr(1 << 30, 6 * block)).values["k_cache"] == 1 << 30
    assert counted.whole == 2
    assert call(k_cache=DevicePtr(given["k_cache"], 5 * block)).values["num_blocks"] == 5


def test_null_pointers_go_the_whole_way(gpu: Gpu, counted: Counted) -> None:
    """What a null pointer means to the other arguments is not known here."""
    given = addresses("gather_tokens_f32")
    call = warm(gpu, "gather_tokens_f32", given)
    assert call(scales=0).values["scales"] == 0
    assert counted.whole == 3
    assert call(scales=0).values["scales"] == 0
    assert call().values["scales"] == given["scales"]
    assert counted.whole == 3


def test_an_optional_pointer_and_its_array(gpu: Gpu) -> None:
    launcher = "paged_decode_attn_tiled"
    call = warm(gpu, launcher, given := addresses(launcher))
    for value in (None, 1 << 30, 1 << 31, aligned(3, np.int32), aligned(3, np.int32), None):
        option = {} if value is None else {"last_block_valid_slots_per_seq": value}
        for _ in range(UNTIL_READY):
            assert same(call(**option), cold(launcher, given, **option))
    with pytest.raises(ArgumentValueError, match="last_block_valid_slots_per_seq: got 2 elements"):
        call(last_block_valid_slots_per_seq=aligned(2, np.int32))


class Lender:
    """Another library's array, which is hashed by identity."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_another_librarys_array_is_asked_each_time(gpu: Gpu) -> None:
    launcher = "paged_decode_attn_tiled"
    call = warm(gpu, launcher, addresses(launcher))
    for name in ("last_block_valid_slots_per_seq", "tile_block_counts"):
        lender = Lender(aligned(3, np.int32))
        for _ in range(2):
            assert call(**{name: lender}).values[name] == lender.array.ctypes.data
            lender.array = aligned(3, np.int32)
        kept = weakref.ref(lender)
        gpu.launches.clear()
        del lender
        gc.collect()
        assert kept() is None


def test_no_array_is_kept(gpu: Gpu) -> None:
    given = arguments(DECODE)
    call = warm(gpu, DECODE, addresses(DECODE))
    kept = []
    for name in ("q", "k_cache", "seq_lens"):
        for _ in range(2):
            array = moved({name: given[name]})[name]
            call(**{name: array})
            kept.append(weakref.ref(array))
            gpu.launches.clear()
            del array
    gc.collect()
    assert [reference() for reference in kept] == [None] * 6


def test_what_raised_is_not_kept(gpu: Gpu) -> None:
    class Odd:
        pass

    call = warm(gpu, DECODE, addresses(DECODE))
    kept = weakref.ref(odd := Odd())
    with pytest.raises(ArgumentTypeError, match="num_seqs: got"):
        call(num_seqs=odd)
    del odd
    gc.collect()
    assert kept() is None


def test_what_is_kept_is_bounded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_CALLS", "_MAX_KINDS", "_MAX_ADDRESSES", "_MAX_EXACT"):
        monkeypatch.setattr(_warm, name, 4)
    given, kernel = addresses(DECODE), handle(gpu, DECODE)

    def call(**changed: Any) -> dict[str, Any]:
        ops.paged_decode_attn_bf16(gpu, kernel, **given | changed, stream=0)  # type: ignore[arg-type]
        return gpu.last.values

    for i in range(1, 20):
        for _ in range(UNTIL_READY):
            assert call(num_seqs=i)["num_seqs"] == i
        assert call(q=i << 20)["q"] == i << 20
        assert call(k_cache=DevicePtr(1 << 20, i << 20))["num_blocks"] == i << 8
    (calls,) = kernel.calls.values()
    assert calls.of.cache_info().currsize == 4
    assert calls._exact.cache_info().currsize == 4
    one = calls.of(*(given[name] for name in given if name in SCALARS))
    assert 0 < len(one._calls) <= 4
    for kept in (one._packed, one._prepared):
        for i in range(20):
            for _ in range(2):
                call(q=(i + 1) << 20)
        assert 0 < len(kept) <= 4


class Own:
    """A kernel of one pointer and one float, launched through what remembers calls."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self.gpu = gpu
        self.kernel = own_kernel(gpu, folder, ("ptr", "f32"))
        self.calls = _warm.WarmCalls(gpu, ("p0",))

    def call(self, x: float, pointer: int, launched: int) -> list[bytes]:
        launch = small(self.gpu, self.kernel).arg_ptr(launched).arg_f32(x)
        given = (x, pointer, 0)
        if not self.calls.again(given, {}):
            self.calls.call(given, {}, (x,), (pointer,), 0, lambda: launch.launch(0))
        return self.gpu.last.packed


def test_zeros_of_both_signs_are_not_remembered(gpu: Gpu, tmp_path: Path) -> None:
    """They are equal, and their bits are not."""
    own = Own(gpu, tmp_path)
    for x in (0.0, 0.0, -0.0, 1.0, -0.0, 0.0, 1.5, 1.0, *[0.0] * UNTIL_READY, -0.0):
        assert own.call(x, 4096, 4096)[1] == np.float32(x).tobytes()


def test_a_pointer_that_is_replaced_on_the_way_is_not_remembered(gpu: Gpu, tmp_path: Path) -> None:
    """As by a copy, which is another one in the next call."""
    own = Own(gpu, tmp_path)
    for launched in (4096, 8192, 16384, 4096):
        assert own.call(1.0, 4096, launched)[0] == launched.to_bytes(8, "little")
    assert own.call(1.0, 4096, 12288)[0] == (4096).to_bytes(8, "little"), "now it is"


def test_threads_do_not_mix(gpu: Gpu) -> None:
    """All of them are between packing and the driver at once."""
    threads = 4
    barrier = threading.Barrier(threads)
    call = warm(gpu, DECODE, addresses(DECODE))
    call()
    gpu.launches.clear()
    gpu.before_read = lambda: barrier.wait(timeout=30)

    def work(i: int) -> None:
        for _ in range(8):
            call(q=(i + 1) << 24, stream=i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(gpu.launches) == 8 * threads
    assert gpu.again >= 4 * threads
    assert all(launch.values["q"] == (launch.stream + 1) << 24 for launch in gpu.launches)


def test_another_handle_or_backend(gpu: Gpu) -> None:
    given = addresses(DECODE)
    kernel = handle(gpu, DECODE)
    for _ in range(2):
        ops.paged_decode_attn_bf16(gpu, kernel, *given.values(), 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="made by this very backend"):
        ops.paged_decode_attn_bf16(FakeBackend(), kernel, *given.values(), 0)  # type: ignore[arg-type]
    fp8 = addresses("paged_decode_attn_fp8")
    with pytest.raises(ArgumentValueError, match="this launcher launches paged_decode_attn_fp8"):
        ops.paged_decode_attn_fp8(gpu, kernel, *fp8.values(), 0)  # type: ignore[arg-type]
    merge, given = handle(gpu, "merge_states_bf16"), addresses("merge_states_bf16")
    for _ in range(2):
        ops.merge_states_bf16(gpu, merge, *given.values(), 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="this launcher launches merge_states_f32"):
        ops.merge_states_f32(gpu, merge, *given.values(), 0)  # type: ignore[arg-type]


def test_checked_mode_sees_every_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("cupaged.checked._inspect", lambda kernel, values, stream: seen.append(kernel.entry))
    call = warm(gpu, DECODE, addresses(DECODE))
    call()
    with checked_mode():
        call()
        call()
    assert seen == [DECODE] * 2
    call()
    assert len(seen) == 2


def test_recording_sees_every_call(gpu: Gpu) -> None:
    call = warm(gpu, DECODE, addresses(DECODE))
    with recording() as launches:
        call()
        call(q=1 << 30)
    assert [launched.values[0] for launched in launches] == [addresses(DECODE)["q"], 1 << 30]
    call()
    assert len(launches) == 2


@pytest.mark.parametrize("device", [0, 1])
def test_a_gpus_arrays_are_looked_at(device: int) -> None:
    class Ndarray:
        dtype, shape, strides = np.dtype(np.uint8), (3,), (1,)
        data = SimpleNamespace(ptr=4096, device_id=0)

    class Other(Ndarray):
        pass

    gpu = object.__new__(CupyBackend)
    gpu._cupy = SimpleNamespace(ndarray=Ndarray)
    array = Ndarray()
    array.data = SimpleNamespace(ptr=4096, device_id=device)
    seen = (4096, device, np.dtype(np.uint8), (3,), (1,))
    assert gpu.views((array, 5, None, DevicePtr(6, 7))) == (seen, 5, None, (6, DevicePtr, 7))
    for other in (Other(), np.zeros(3), seen, True, 5.0, np.int64(5)):
        assert gpu.views((array, other)) is None


def test_numpy_arrays_are_looked_at() -> None:
    array: npt.NDArray[Any] = aligned((2, 3), np.int32)[:, ::2]
    gpu = FakeBackend()
    seen = (array.ctypes.data, np.dtype(np.int32), (2, 2), (12, 8))
    assert gpu.views((array, 4096)) == (seen, 4096)
    assert gpu.views((array.view(np.recarray),)) is None
