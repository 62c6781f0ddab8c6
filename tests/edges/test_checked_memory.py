"""Checked mode knows the memory of every launcher's arguments, and keeps no backend."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import EmulatorBackend, KVCache, ops
from cupaged.checked import checked_mode
from cupaged.errors import CheckedModeError
from cupaged.formats import BF16, FORMATS, CacheFormat, CacheLayout
from cupaged.ops._memory import memory_of
from tests.fake_backend import FakeBackend
from tests.launcher_cases import LAUNCHERS, addresses, call, handle
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
# By keyword, where a launcher takes it.
_OPTIONAL = {"k_scales": 120 << 20, "v_scales": 121 << 20, "last_block_valid_slots_per_seq": 122 << 20}


def pointers(launcher: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Pointers that a launcher writes, all of them, and its arguments as addresses far from each other."""
    parameters = [p for p in handle(FakeBackend(), launcher).parameters if p.kind == "ptr"]
    optional = {p.name: _OPTIONAL[p.name] for p in parameters if p.name in _OPTIONAL}
    written = [p.name for p in parameters if not p.const]
    return written, [p.name for p in parameters], addresses(launcher) | {"scales": 119 << 20} | optional


CASES = [
    (launcher, written, other)
    for launcher in LAUNCHERS
    for written in pointers(launcher)[0]
    for other in pointers(launcher)[1]
    if other != written
]


def allowed(launcher: str, written: str, other: str) -> bool:
    """Results in the memory of a part, and copies within a pool."""
    in_place = launcher.startswith("merge_states") and "_to_" not in launcher
    if (written, other) in (("out", "outputs"), ("out_lse", "lses")):
        return other == "lses" or in_place
    return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """It runs nothing, so nothing is looked at on it."""
    monkeypatch.setattr("cupaged.checked._run", lambda *_: None)
    return FakeBackend()


def checked(gpu: FakeBackend, launcher: str, given: dict[str, Any], **changed: Any) -> None:
    names = addresses(launcher)
    arguments = {name: value for name, value in given.items() if name in names}
    keywords = {name: value for name, value in given.items() if name in _OPTIONAL and name not in names}
    with checked_mode():
        call(gpu, launcher, arguments | {n: v for n, v in changed.items() if n in names}, **keywords
             | {n: v for n, v in changed.items() if n not in names})  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_memory_that_nothing_shares(gpu: FakeBackend, launcher: str) -> None:
    checked(gpu, launcher, pointers(launcher)[2])
    assert len(gpu.launches) == 1


@pytest.mark.parametrize(("launcher", "written", "other"), CASES)
def test_every_output_in_the_memory_of_every_other_argument(
    gpu: FakeBackend, launcher: str, written: str, other: str
) -> None:
    given = pointers(launcher)[2]
    if allowed(launcher, written, other):
        checked(gpu, launcher, given, **{written: given[other]})
        return
    with pytest.raises(CheckedModeError, match=r"share memory with") as caught:
        checked(gpu, launcher, given, **{written: given[other]})
    assert caught.value.array in (written, other)
    assert written in str(caught.value)
    assert other in str(caught.value)
    assert gpu.launches == []


def test_states_of_all_splits(gpu: FakeBackend) -> None:
    """m ``[3, num_splits, 8]`` F32: the last bytes of the last split."""
    launcher = "paged_decode_attn_tiled"
    given = pointers(launcher)[2]
    size = 4 * 3 * 5 * 8
    checked(gpu, launcher, given, num_splits=5, l_state=given["m_state"] + size)
    with pytest.raises(CheckedModeError, match=r"m_state: .* share memory with l_state"):
        checked(gpu, launcher, given, num_splits=5, l_state=given["m_state"] + size - 4)
    with pytest.raises(CheckedModeError, match=r"o_state: .* share memory with q"):
        checked(gpu, launcher, given, num_splits=5, q=given["o_state"] + 64 * size - 16)


def test_what_lies_between_rows_is_nobodys(gpu: FakeBackend) -> None:
    """q in an array with K and V of the new tokens, and an output between its rows."""
    launcher = "paged_decode_attn_bf16"
    given = pointers(launcher)[2]
    row = 2 * 8 * 64
    for offset, shared in ((row, False), (row - 16, True), (2 * row, False)):
        changed = {"q_stride": 4 * 8 * 64, "num_seqs": 1, "output": given["q"] + offset}
        if shared:
            with pytest.raises(CheckedModeError, match=r"output: .* share memory with q"):
                checked(gpu, launcher, given, **changed)
        else:
            checked(gpu, launcher, given, **changed)
    scattered = {"q_stride": 4 * 8 * 64, "num_seqs": 2, "output": given["q"] + row}
    checked(gpu, launcher, given, **scattered)


@pytest.mark.parametrize("launcher", [n for n in LAUNCHERS if n.startswith("merge_states")])
def test_a_merge_into_a_part_is_no_overlap(gpu: FakeBackend, launcher: str) -> None:
    given = pointers(launcher)[2]
    kinds = handle(gpu, launcher).known.holds  # type: ignore[union-attr]
    part = (4 if kinds["outputs"] == "f32" else 2) * given["part_stride"]
    for number in (0, 3):
        changed = {"out": given["outputs"] + number * part, "out_lse": given["lses"] + number * 4 * 15}
        if kinds["outputs"] == kinds["out"]:
            checked(gpu, launcher, given, **changed)
            continue
        with pytest.raises(CheckedModeError, match=r"out: .* share memory with outputs"):
            checked(gpu, launcher, given, **changed)
    for name, other in (("out", "outputs"), ("out_lse", "lses")):
        with pytest.raises(CheckedModeError, match=f"{name}: .* share memory with {other}"):
            checked(gpu, launcher, given, **{name: given[other] + 16})


def test_copies_within_a_pool_are_no_overlap(gpu: FakeBackend) -> None:
    """The same blocks on both sides, K and V in turns; not blocks that reach into two others."""
    given = pointers("copy_cache_blocks")[2]
    both = {"source_stride_bytes": 4096, "target_stride_bytes": 4096, "target_section_bytes": 1040}
    k, v = given["k_source"], given["k_source"] + 2048
    checked(gpu, "copy_cache_blocks", given, **both, k_target=k, v_source=v, v_target=v)
    checked(gpu, "copy_cache_blocks", given, **both, k_target=k + 3 * 4096)
    checked(gpu, "copy_cache_blocks", given, k_source=0, k_target=given["v_source"])  # left out
    for target in (k + 16, k + 4096 + 1024):
        with pytest.raises(CheckedModeError, match=r"k_target: .* share memory with k_source"):
            checked(gpu, "copy_cache_blocks", given, **both, k_target=target)
    with pytest.raises(CheckedModeError, match=r"k_target: .* share memory with k_source"):
        checked(gpu, "copy_cache_blocks", given, k_target=k)  # strides differ


@formats
def test_one_pool_for_k_and_v(gpu: FakeBackend, fmt: CacheFormat) -> None:
    launcher = f"reshape_and_cache_{fmt.name}"
    given = pointers(launcher)[2]
    with pytest.raises(CheckedModeError, match=r"k_cache: .* share memory with v_cache"):
        checked(gpu, launcher, given, v_cache=given["k_cache"], num_blocks=4)
    checked(gpu, launcher, given, v_cache=given["k_cache"], value=0, num_blocks=4)


@formats
def test_gathers(rig: Rig, fmt: CacheFormat) -> None:
    layout = CacheLayout(fmt, 2, 64, 16)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if fmt.name == "fp8" else {}
    cache = KVCache(rig.gpu, layout, 3, **scales)
    good, bad = (rig.upload(np.array([0, block], np.int32)) for block in (2, 3))
    with checked_mode():
        cache.gather(good, 20, stream=rig.stream)
        cache.gather(bad, 16, stream=rig.stream)  # the second block is not looked up
        with pytest.raises(CheckedModeError) as caught:
            cache.gather(bad, 17, stream=rig.stream)
    error = caught.value
    assert (error.array, error.index, error.value) == ("block_ids", (1,), 3)
    assert "allowed are 0 to 2 (num_blocks - 1)" in str(error)


def test_scales_of_a_gather(rig: Rig) -> None:
    kernel = rig.gpu.kernel("cache_blocks", "gather_tokens_f32")
    pool, ids = rig.gpu.zeros((1, 16, 2, 64), np.uint8), rig.upload(np.zeros(1, np.int32))
    out = rig.gpu.zeros((16, 2, 64), np.float32)
    sizes = (16, 2, 64, 16, 1, 1.0, 2048, 128, 64, 0, 0, 0)  # an FP8 pool

    def gather(*scales: float) -> None:
        array = rig.upload(np.array(scales, np.float32))
        ops.gather_tokens_f32(rig.gpu, kernel, pool, ids, array, out, *sizes, rig.stream)

    with checked_mode():
        gather(1.0, 2.0)
        with pytest.raises(
            CheckedModeError, match=r"scales\[1\]: got -2.0, allowed are finite values above 0"
        ):
            gather(1.0, -2.0)


@pytest.mark.parametrize("is_checked", [False, True])
def test_no_backend_is_kept(is_checked: bool) -> None:
    def used() -> weakref.ref[EmulatorBackend]:
        gpu = EmulatorBackend()
        cache = KVCache(gpu, CacheLayout(BF16, 1, 16, 16), 2)
        key = gpu.zeros((1, 1, 16), ml_dtypes.bfloat16)
        with checked_mode(is_checked):
            cache.write(key, key, gpu.zeros(1, np.int64), stream=0)
        return weakref.ref(gpu)

    reference = used()
    gc.collect()
    assert reference() is None


def test_every_pointer_of_every_launcher_is_known() -> None:
    """What a launcher gains must be told to checked mode."""
    assert set(LAUNCHERS) == set(ops.__all__)
    for launcher in LAUNCHERS:
        kernel, given = handle(FakeBackend(), launcher), pointers(launcher)[2]
        values = {
            "query_tokens": 1,
            "num_blocks": 6,
            "num_slots": 96,
            "num_splits": 2,
            "table_stride": 5,
        } | given
        known = [name for name, _ in memory_of(kernel.known.holds, values)]  # type: ignore[union-attr]
        assert set(known) == {p.name for p in kernel.parameters if p.kind == "ptr"}, launcher
