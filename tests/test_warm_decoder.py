"""A decoder's calls like one before: the driver gets the same launches, and every difference is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import KVCache
from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FP8, CacheLayout
from tests.fake_backend import FakeBackend, Launch, aligned
from tests.warm import UNTIL_READY, Counted, same

Gpu = FakeBackend
HEADS, DIM, WIDTH, MAX_SEQS = 8, 64, 5, 16


@pytest.fixture
def gpu() -> Gpu:
    return FakeBackend()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def decoder(gpu: Gpu, **options: Any) -> Decoder:
    return Decoder(gpu, CacheLayout(FP8, 2, DIM, 16), HEADS, **{"max_seqs": MAX_SEQS} | options)  # type: ignore[arg-type]


def batch(num_seqs: int = 3) -> dict[str, Any]:
    """Arguments of `Decoder.decode` over pools."""
    rows = (num_seqs, HEADS, DIM)
    return {
        "q": aligned(rows, ml_dtypes.bfloat16),
        "k_cache": aligned((6, 16, 2, DIM), np.uint8),
        "v_cache": aligned((6, 16, 2, DIM), np.uint8),
        "block_tables": aligned((num_seqs, WIDTH), np.int32),
        "seq_lens": aligned(num_seqs, np.int32),
        "output": aligned(rows, ml_dtypes.bfloat16),
        "num_seqs": num_seqs,
        "max_blocks_per_seq": WIDTH,
        "k_scale": 0.5,
        "v_scale": 0.25,
        "stream": 5,
    }


def bare(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.ctypes.data if isinstance(x, np.ndarray) else x for name, x in given.items()}


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "planned": ({}, 1),
    "many": ({"max_seqs": 513}, 2),
    "chunked": ({"split_tokens": 16, "max_blocks_per_seq": WIDTH}, 2),
}


@pytest.mark.parametrize("pointers", [dict, bare], ids=["arrays", "addresses"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_decoder_launches_what_a_cold_one_does(
    gpu: Gpu, counted: Counted, kind: str, pointers: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    options, launches = KINDS[kind]
    one = decoder(gpu, **options)
    first, second = (pointers(batch()) for _ in range(2))
    for _ in range(2):
        one.decode(**first)
    assert counted.whole == 2 * launches
    del gpu.launches[:]
    one.decode(**second)
    assert counted.whole == 2 * launches, "the third is warm"
    found = gpu.launches[:]
    forget(one)
    one.decode(**second)
    assert len(found) == launches
    assert all(map(same, found, gpu.launches[launches:]))


def forget(one: Decoder) -> None:
    """The decoder has met no call."""
    for calls in (one._calls, one._cache_calls):
        calls.of.cache_clear()
        calls._exact.cache_clear()


OPTIONS: tuple[dict[str, Any], ...] = (
    {"lse": 1 << 30},
    {"sinks": 1 << 30},
    {"k_scale": None, "k_scales": 1 << 30},
    {"v_scales": 1 << 30},
    {"v_scale": 0.75},
    {"softmax_scale": 0.5},
    {"sliding_window": 7},
    {"q_stride": HEADS * DIM + 8},
    {"table_stride": 0},
    {"num_blocks": 3},
    {"num_seqs": 2},
    {"max_blocks_per_seq": 4},
)


@pytest.mark.parametrize("changed", OPTIONS, ids=lambda x: ",".join(x))
def test_every_option_of_a_decoder_counts(gpu: Gpu, changed: dict[str, Any]) -> None:
    one, given = decoder(gpu), bare(batch())
    expected = []
    for options in ({}, changed):
        forget(one)
        one.decode(**given | options)
        expected.append(gpu.last)
    assert not same(*expected)
    for _ in range(UNTIL_READY):
        for options, launch in zip(({}, changed), expected, strict=True):
            one.decode(**given | options)
            assert same(gpu.last, launch)
    assert gpu.again >= 2


def test_scales_that_are_left_out_are_missed(gpu: Gpu) -> None:
    one, given = decoder(gpu), bare(batch())
    for _ in range(UNTIL_READY):
        one.decode(**given | {"k_scale": None, "k_scales": 1 << 30})
    with pytest.raises(ArgumentValueError, match=r"^k_scale: got None"):
        one.decode(**given | {"k_scale": None})


def test_a_decoder_over_a_cache(gpu: Gpu, counted: Counted) -> None:
    cache = KVCache(gpu, CacheLayout(BF16, 2, DIM, 16), 6)
    one = Decoder.for_cache(cache, HEADS, MAX_SEQS)

    def call(**changed: Any) -> Launch:
        given = batch()
        chosen = {name: given[name] for name in ("q", "block_tables", "seq_lens", "stream")}
        out = given["output"]
        assert one.decode(**{"cache": cache, "out": out} | chosen | changed) is changed.get("out", out)
        return gpu.last

    for _ in range(2):
        call()
    given = batch()
    found = call(q=given["q"], out=given["output"])
    assert counted.whole == 2
    assert found.values["q"] == given["q"].ctypes.data
    assert found.values["output"] == given["output"].ctypes.data
    assert found.values["num_blocks"] == 6
    wide = aligned((3, HEADS + 4, DIM), ml_dtypes.bfloat16)[:, :HEADS]
    assert call(q=wide).values["q_stride"] == (HEADS + 4) * DIM
    assert call().values["q_stride"] == HEADS * DIM
    with pytest.raises(ArgumentValueError, match="block_tables: got shape"):
        call(block_tables=aligned((2, WIDTH), np.int32))
    other = KVCache(gpu, CacheLayout(BF16, 2, DIM, 32), 6)
    with pytest.raises(ArgumentValueError, match="cache: its layout has block_size 32"):
        call(cache=other)
    smaller = KVCache(gpu, CacheLayout(BF16, 2, DIM, 16), 4)
    assert call(cache=smaller).values["num_blocks"] == 4


def test_results_that_are_allocated(gpu: Gpu) -> None:
    cache = KVCache(gpu, CacheLayout(BF16, 2, DIM, 16), 6)
    one, given = Decoder.for_cache(cache, HEADS, MAX_SEQS), batch()
    for _ in range(4):
        out = one.decode(given["q"], cache, given["block_tables"], given["seq_lens"], stream=0)
        assert gpu.last.values["output"] == out.ctypes.data
        assert out.shape == (3, HEADS, DIM)


def test_checked_mode_sees_every_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("cupaged.checked._inspect", lambda kernel, values, stream: seen.append(kernel.entry))
    one, given = decoder(gpu, checked=True), bare(batch())
    for _ in range(UNTIL_READY + 1):
        one.decode(**given)
    assert seen == ["paged_decode_attn_planned"] * (UNTIL_READY + 1)
