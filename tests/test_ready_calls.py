"""Calls that come again exactly: one look-up launches what was checked, and no other is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr, ops
from cupaged.errors import ArgumentTypeError, KernelFault, LaunchError
from cupaged.ops import _warm
from tests.fake_backend import FakeBackend, Launch
from tests.launcher_cases import LAUNCHERS, addresses, arguments, handle
from tests.test_warm_decoder import KINDS, bare, batch, decoder
from tests.warm import UNTIL_READY, Counted, same

DECODE = "paged_decode_attn_bf16"
BLOCKS = {"num_blocks": 64}


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


class Called:
    """A launcher's calls with one handle."""

    def __init__(self, gpu: FakeBackend, launcher: str = DECODE) -> None:
        self.gpu, self.launcher, self.kernel = gpu, launcher, handle(gpu, launcher)
        self.given = addresses(launcher)

    def __call__(self, *, gpu: Any = None, kernel: Any = None, stream: Any = 3, **changed: Any) -> Launch:
        now = self.given | changed
        by_position = [now.pop(name) for name in self.given]
        launch = getattr(ops, self.launcher)
        launch(gpu or self.gpu, kernel or self.kernel, *by_position, stream, **now)
        return self.gpu.last

    def until_ready(self, **changed: Any) -> Launch:
        for _ in range(UNTIL_READY - 1):
            self(**changed)
        before = self.gpu.again
        found = self(**changed)
        assert self.gpu.again == before + 1
        return found


def cold(launcher: str = DECODE, **changed: Any) -> Launch:
    return Called(FakeBackend(), launcher)(**changed)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_fifth_call_is_ready(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    call = Called(gpu, launcher)
    call.until_ready()
    expected = cold(launcher)
    monkeypatch.setattr(_warm.WarmCalls, "call", None)  # the first look-up is enough
    assert same(call(), expected)
    assert gpu.prepared == 1


def test_arrays_are_ready_too(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend prepares launches of arrays, which FakeBackend does of those it says it made."""
    call = Called(gpu)
    first, second = arguments(DECODE), arguments(DECODE)
    gpu.made |= {x.ctypes.data for given in (first, second) for x in given.values() if hasattr(x, "ctypes")}
    for given in (first, second):
        for _ in range(UNTIL_READY):
            assert same(call(**given), cold(**given))
    assert gpu.again == 1 + 3, "the fifth of the first, and from the third on of the second"
    table = first["block_tables"]
    table.shape = table.shape[::-1]
    with pytest.raises(ValueError, match="max_blocks_per_seq"):
        call(**first)
    table.shape = table.shape[::-1]
    assert same(call(**first), cold(**first))
    view = {"q": first["q"].view(np.int16)}
    with pytest.raises(ArgumentTypeError, match="q: got dtype int16"):
        call(**first | view)
    monkeypatch.setattr(gpu, "stream_handle", lambda stream: stream.handle, raising=False)
    stream = Stream()
    for stream.handle in (3, 4, 3, 4, 3, 4):
        assert same(call(**first, stream=stream), cold(**first, stream=stream.handle))


class Stream:
    handle = 0


def test_a_streams_handle_is_asked_each_time(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Called(gpu)
    call.until_ready()
    monkeypatch.setattr(gpu, "stream_handle", lambda stream: stream.handle, raising=False)
    stream = Stream()
    for stream.handle in (3, 8, 3, 9) * 3:
        assert call(stream=stream).stream == stream.handle
    assert call().stream == 3


def test_streams_are_told_apart(gpu: FakeBackend) -> None:
    call = Called(gpu)
    for stream in (1, 2, 3):
        assert same(
            call.until_ready(stream=stream) if stream == 1 else call(stream=stream), cold(stream=stream)
        )
    for stream in (1, 2, 3) * UNTIL_READY:
        assert same(call(stream=stream), cold(stream=stream))
    with pytest.raises(ArgumentTypeError, match="stream: got True"):
        call(stream=True)
    with pytest.raises(ArgumentTypeError, match=r"stream: got 1\.0"):
        call(stream=1.0)


def test_options_are_told_apart(gpu: FakeBackend) -> None:
    call = Called(gpu)
    values: tuple[dict[str, Any], ...] = ({}, {"num_blocks": None}, {"num_blocks": 1}, {"num_blocks": 64})
    for _ in range(UNTIL_READY + 1):
        for options in values:
            assert same(call(**options), cold(**options))
    for bad in (True, 1.0):
        with pytest.raises(ArgumentTypeError, match="num_blocks: got"):
            call(num_blocks=bad)


@pytest.mark.parametrize("equal", [np.int64, np.uint64, DevicePtr])
def test_equal_addresses_of_other_types(gpu: FakeBackend, equal: Callable[[int], Any]) -> None:
    call = Called(gpu)
    ready = call.until_ready()
    for name in ("q", "k_cache", "seq_lens"):
        for _ in range(UNTIL_READY):
            assert call(**{name: equal(call.given[name])}).packed == ready.packed
    for bad in (float, complex, np.float64):
        with pytest.raises(ArgumentTypeError, match="seq_lens: got"):
            call(seq_lens=bad(call.given["seq_lens"]))


def test_another_backend_and_handle(gpu: FakeBackend) -> None:
    call = Called(gpu)
    call.until_ready()
    with pytest.raises(ValueError, match="made by this very backend"):
        call(gpu=FakeBackend())
    other = handle(gpu, DECODE)
    launches = gpu.again
    call(kernel=other)
    assert gpu.again == launches, "a handle keeps its own"


def test_what_is_evicted_while_it_is_launched(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warm, "_MAX_EXACT", 2)
    call = Called(gpu)
    call.until_ready()

    def others() -> None:
        gpu.before_read = lambda: None
        for i in range(8):
            call.until_ready(stream=10 + i)

    gpu.before_read = others
    assert same(call(), cold())


def test_the_least_recently_used_goes_first(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warm, "_MAX_EXACT", 2)
    call = Called(gpu)
    for stream in (1, 2):
        call.until_ready(stream=stream)
    call(stream=1)
    call.until_ready(stream=3)
    (calls,) = call.kernel.calls.values()
    hits = calls._exact.cache_info().hits
    call(stream=1)
    assert calls._exact.cache_info().hits == hits + 1


def test_a_call_within_another_that_is_stored(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finaliser may make it: what is stored is of the outer one alone."""
    call = Called(gpu)
    call.until_ready(num_blocks=1)
    assert _warm._storing.call is None
    (calls,) = call.kernel.calls.values()
    launches = (lambda: pytest.fail("of another call"),)
    given = (gpu, call.kernel, *call.given.values(), 3)
    monkeypatch.setattr(_warm._storing, "call", (calls, _warm._ids(given, BLOCKS), launches))
    for options in ({}, {"q": 1 << 30} | BLOCKS, {"num_blocks": 2}):
        assert same(call(**options), cold(**options))


def test_a_decoder_within_another_that_is_stored(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their calls look the same, and their workspaces are not."""
    one, other, given = decoder(gpu), decoder(gpu), bare(batch())
    keys: list[Any] = []
    again = _warm.WarmCalls.again
    monkeypatch.setattr(_warm.WarmCalls, "again", lambda *x: keys.append(x[1:]) or again(*x))
    other.decode(**given)
    for _ in range(UNTIL_READY):
        other.decode(**given | {"stream": 6})
    launches = (lambda: pytest.fail("of another decoder"),)
    monkeypatch.setattr(_warm._storing, "call", (one._calls, _warm._ids(*keys[0]), launches))
    other.decode(**given)
    assert same(gpu.launches[0], gpu.last)


def test_a_launch_that_is_refused(gpu: FakeBackend) -> None:
    call = Called(gpu)
    call.until_ready()

    def refuse() -> None:
        raise LaunchError("refused")

    gpu.before_read = refuse
    with pytest.raises(LaunchError, match="refused"):
        call()
    gpu.before_read = lambda: None
    assert same(call(), cold())


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoders_fifth_call_is_ready(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    options, launches = KINDS[kind]
    one, given = decoder(gpu, **options), bare(batch())
    one.decode(**given)
    expected = gpu.launches[-launches:]
    for _ in range(UNTIL_READY - 1):
        one.decode(**given)
    assert gpu.again == launches
    monkeypatch.setattr(_warm.WarmCalls, "call", None)
    for decode in (one.decode, one.decode_pools):
        decode(**given)
        assert all(map(same, gpu.launches[-launches:], expected))
    assert gpu.prepared == launches


def test_a_fault_in_a_ready_call_restores_the_decoder(
    gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, given = decoder(gpu), bare(batch())
    for _ in range(UNTIL_READY):
        one.decode(**given)
    restored: list[Any] = []
    monkeypatch.setattr(one._kernels, "restore", restored.append)

    def fault() -> None:
        raise KernelFault("found")

    gpu.before_read = fault
    with pytest.raises(KernelFault, match="found"):
        one.decode(**given)
    assert restored == [given["stream"]]


def test_sizes_that_grow(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of each go the whole way, and the fifth is ready."""
    counted = Counted(monkeypatch)
    call = Called(gpu)
    for num_seqs in (1, 2, 3):
        for _ in range(UNTIL_READY):
            call(num_seqs=num_seqs)
    assert counted.whole == 6
    assert gpu.again == 3


def test_all_of_a_calls_launches_are_ready_or_none(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    options, launches = KINDS["many"]
    one, given = decoder(gpu, **options), bare(batch())
    prepare = gpu.prepare

    def only_the_first(kernel: Any, *rest: Any, **named: Any) -> Any:
        return None if kernel.source.entry.endswith("planned") else prepare(kernel, *rest, **named)

    monkeypatch.setattr(gpu, "prepare", only_the_first)
    one.decode(**given)
    expected = gpu.launches[:]
    for _ in range(UNTIL_READY + 1):
        one.decode(**given)
        assert all(map(same, gpu.launches[-launches:], expected))
    assert len(gpu.launches) == launches * (UNTIL_READY + 2)
    assert gpu.again == 0
