"""Checked mode finds each bad value with array, index and value, and says nothing of good ones."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import ops
from cupaged.checked import checked_mode
from cupaged.decode import Decoder
from cupaged.errors import CheckedModeError, CupagedError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from cupaged.pointers import DevicePtr
from tests.fake_backend import FakeBackend
from tests.features.batches import Call, make_batch
from tests.features.setups import Setup
from tests.launcher_cases import LAUNCHERS
from tests.launcher_cases import arguments as launcher_arguments
from tests.launcher_cases import call as fake_call
from tests.oracle import assert_matches
from tests.paths import arguments, call, offers, path_format_pairs, run, run_uploaded
from tests.poison import Options, PagedCase, Shape, random_case
from tests.rig import Rig, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
PAIRS = [(p, f) for p, f in path_format_pairs() if not p.startswith("tiled")]
everywhere = pytest.mark.parametrize(("path", "fmt"), PAIRS, ids=[f"{p}-{f.name}" for p, f in PAIRS])


def a_case(fmt: CacheFormat, window: int = 0) -> PagedCase:
    options = Options(q_gap=24, unused_column=-1)
    return random_case(fmt, [40, 1, 0, 100, 16], Shape(4, 2, 64, 16), window=window, options=options)


def found(rig: Rig, case: PagedCase, path: str, **changed: Any) -> tuple[str, Any, Any]:
    """Array, index and value of what checked mode raises."""
    with checked_mode(), pytest.raises(CheckedModeError) as caught:
        run(rig, case, path, **changed)
    error = caught.value
    for part in (error.index or (), [error.value]):
        for number in part:
            assert str(number) in str(error)
    assert error.array in str(error)
    return error.array, error.index, error.value


@pytest.mark.parametrize(("path", "fmt"), path_format_pairs(), ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_good_inputs_pass_and_give_the_same(rig: Rig, path: str, fmt: CacheFormat, window: int) -> None:
    if not offers(path, fmt, window):
        pytest.skip("no windows over tiles")
    case = a_case(fmt, window)
    tables = case.block_tables.copy()
    if window:
        tables[3, : (100 - window) // 16] = -7  # left out: never looked up
    with checked_mode():
        out = run(rig, dataclasses.replace(case, block_tables=tables), path).out
    assert_matches(out, case.expected()[0])


@everywhere
@pytest.mark.parametrize(("row", "length"), [(0, 113), (3, -1), (4, 2**31 - 1), (2, -(2**31))])
def test_lengths(rig: Rig, path: str, fmt: CacheFormat, row: int, length: int) -> None:
    case = a_case(fmt)
    assert case.max_blocks_per_seq * 16 == 112
    lengths = case.seq_lens.copy()
    lengths[row] = length
    bad = dataclasses.replace(case, seq_lens=lengths)
    assert found(rig, bad, path) == ("seq_lens", (row,), length)


@everywhere
@pytest.mark.parametrize("bad_id", [-1, 14, 2**31 - 1, -(2**31)])
def test_block_ids(rig: Rig, path: str, fmt: CacheFormat, bad_id: int) -> None:
    case = a_case(fmt)
    assert case.num_blocks <= 16
    bad_id = case.num_blocks if bad_id == 14 else bad_id
    tables = case.block_tables.copy()
    tables[3, 2] = tables[3, 6] = tables[4, 0] = bad_id
    bad = dataclasses.replace(case, block_tables=tables)
    assert found(rig, bad, path) == ("block_tables", (3, 2), bad_id)


def test_without_a_pool_size_only_negative_ids_are_found(rig: Rig) -> None:
    up = upload_case(rig, a_case(BF16))
    pools = {"k_cache": rig.gpu.pointer(up.k.array), "v_cache": rig.gpu.pointer(up.v.array)}
    tables = up.case.block_tables.copy()
    tables[0, 1] = -3
    with checked_mode():
        run_uploaded(up, "single", **pools, num_blocks=None)
        with pytest.raises(CheckedModeError, match=r"block_tables\[0, 1\]: got -3, allowed are 0 or more"):
            run_uploaded(up, "single", **pools, num_blocks=None, block_tables=rig.upload(tables))


@everywhere
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_queries(rig: Rig, path: str, fmt: CacheFormat, bad: float) -> None:
    case = a_case(fmt)
    q = case.q.copy()
    q[3, 2, 63] = q[4, 0, 0] = bad
    array, index, value = found(rig, dataclasses.replace(case, q=q), path)
    assert (array, index) == ("q", (3, 2, 63))
    np.testing.assert_equal(value, bad)


@everywhere
def test_the_first_bad_array_is_named(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case = a_case(fmt)
    q, lengths = case.q.copy(), case.seq_lens.copy()
    q[0, 0, 0], lengths[4] = np.nan, 113
    bad = dataclasses.replace(case, q=q, seq_lens=lengths)
    assert found(rig, bad, path) == ("seq_lens", (4,), 113)


@pytest.mark.parametrize("split", [False, True], ids=["planned", "chunked"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sinks(rig: Rig, split: bool, bad: float) -> None:
    """An infinite one has all weight, which no kernel gives; -inf is none at all."""
    setup = Setup(split_tokens=48, max_blocks_per_seq=64) if split else Setup()
    sinks = (1.0, -np.inf, 0.0, -1.0e30, -2.0, 1.0, 2.0, 3.0)
    batch = make_batch(setup, Call(lengths=(40, 0), sinks=sinks))
    with checked_mode():
        batch.check(rig)
        wrong = rig.upload(np.array([*sinks[:5], bad, bad, 0.0], np.float32))
        with pytest.raises(
            CheckedModeError, match=r"^sinks\[5\]: got .*, allowed are finite values and -inf"
        ):
            batch.run(rig, sinks=wrong)


@pytest.mark.parametrize("path", ["single", "splits2", "decoder"])
@pytest.mark.parametrize("pool", ["k_cache", "v_cache"])
def test_scales_of_live_nvfp4_tokens(rig: Rig, path: str, pool: str) -> None:
    case = a_case(NVFP4)
    scales = getattr(case, f"{pool[0]}_pool").reshape(case.num_blocks, -1)[
        :, case.layout.data_section_bytes :
    ]
    block = int(case.block_tables[3, 4])
    scales[block, 7 * 8 + 4 + 3] = 0xFF  # token 4 * 16 + 7 of sequence 3, KV head 1, group 3: a NaN
    array, index, value = found(rig, case, path)
    assert (array, index) == (f"{pool} scale", (3, 71, 1, 3))
    assert np.isnan(value)


@pytest.mark.parametrize("path", ["single", "splits2", "decoder"])
def test_scales_outside_the_window_do_not_matter(rig: Rig, path: str) -> None:
    case = a_case(NVFP4, window=20)
    section = case.layout.data_section_bytes
    block = int(case.block_tables[3, 4])  # tokens 64 to 79; attended are 80 to 99
    case.k_pool.reshape(case.num_blocks, -1)[block, section:] = 0x7F
    with checked_mode():
        assert_matches(run(rig, case, path).out, case.expected()[0])


@formats
@pytest.mark.parametrize("slot", [48, 2**33, 2**62])
def test_slots(rig: Rig, fmt: CacheFormat, slot: int) -> None:
    slots = np.array([0, -1, 17, -(2**40), slot, slot], np.int64)
    _write(rig, fmt, np.delete(slots, [4, 5]))
    with checked_mode():
        _write(rig, fmt, np.delete(slots, [4, 5]))
        with pytest.raises(CheckedModeError) as caught:
            _write(rig, fmt, slots)
    error = caught.value
    assert (error.array, error.index, error.value) == ("slot_mapping", (4,), slot)
    assert "below 48 (num_blocks * block_size)" in str(error)


def _write(rig: Rig, fmt: CacheFormat, slots: np.ndarray, **changed: Any) -> None:
    layout = CacheLayout(fmt, 2, 64, 16)
    key = np.ones((len(slots), 2, 64)).astype(ml_dtypes.bfloat16)
    pools = {name: rig.gpu.zeros(layout.pool_shape(3), layout.pool_dtype) for name in ("k_cache", "v_cache")}
    named: dict[str, Any] = dict(
        pools, key=rig.upload(key), value=rig.upload(key), slot_mapping=rig.upload(slots),
        num_tokens=len(slots), num_kv_heads=2, head_dim=64, block_size=16, k_scale=1.0, v_scale=1.0,
        key_stride=128, value_stride=128, cache_stride=layout.cache_stride,
        block_stride_bytes=layout.block_stride_bytes, data_section_bytes=layout.data_section_bytes,
    )  # fmt: skip
    call(rig, f"reshape_and_cache_{fmt.name}", **named | changed)


@pytest.mark.parametrize("fault", ["id", "count", "valid"])
def test_tiles(rig: Rig, fault: str) -> None:
    up = upload_case(rig, random_case(BF16, [40, 20], Shape(4, 2, 64, 16)))
    ids, counts, valid = np.array([[1, 2], [3, -9]], np.int32), np.array([2, 1], np.int32), [16, 4]
    if fault == "id":
        ids[1, 0] = 77
    elif fault == "count":
        counts[1] = 3
    else:
        valid[0] = 17
    zeros = {name: rig.gpu.zeros((2, 4), np.float32) for name in ("m_state", "l_state")}
    named = arguments(up) | zeros | {
        "q": rig.upload(up.case.q), "k_pool": up.k.array, "v_pool": up.v.array, "gqa_ratio": 2,
        "o_state": rig.gpu.zeros((2, 4, 64), np.float32), "tile_capacity": 2, "blk_stride": 16 * 128,
        "tok_stride": 128, "kvh_stride": 64, "last_block_valid_slots": 16, "tile_blocks": rig.upload(ids),
        "tile_block_counts": rig.upload(counts),
        "last_block_valid_slots_per_seq": rig.upload(np.array(valid, np.int32)),
    }  # fmt: skip
    with checked_mode(), pytest.raises(CheckedModeError) as caught:
        call(rig, "paged_decode_attn_tiled", **named)
    error = caught.value
    wanted = {
        "id": ("tile_blocks", (1, 0), 77),
        "count": ("tile_block_counts", (1,), 3),
        "valid": ("last_block_valid_slots_per_seq", (0,), 17),
    }[fault]
    assert (error.array, error.index, error.value) == wanted


@pytest.mark.parametrize("other", ["q", "k_cache", "v_cache", "block_tables", "seq_lens"])
@pytest.mark.parametrize("by", ["begin", "end"])
def test_outputs_that_share_memory_with_an_input(rig: Rig, other: str, by: str) -> None:
    up = upload_case(rig, random_case(BF16, [40, 3], Shape(4, 2, 64, 16)))
    named = arguments(up)
    address, size = rig.gpu.pointer(named[other]), int(named[other].nbytes)
    room = 2 * 4 * 64 * 2
    if size < room:  # its neighbours in memory would share some of the output too
        around = rig.gpu.zeros(2 * room + size, np.uint8)
        address = rig.gpu.pointer(around) + room
        around[room : room + size] = named[other].reshape(-1).view(np.uint8)
        named[other] = DevicePtr(address, size)
    out = address - room + 16 if by == "begin" else (address + size - 1) // 16 * 16
    with checked_mode(), pytest.raises(CheckedModeError, match=f"share memory with {other}") as caught:
        call(rig, "paged_decode_attn_bf16", **named, output=out)
    assert caught.value.array == "output"


def test_neighbours_do_not_share_memory(rig: Rig) -> None:
    up = upload_case(rig, random_case(BF16, [40, 3], Shape(4, 2, 64, 16)))
    rows = 2 * 4 * 64
    three = rig.gpu.zeros(3 * rows, np.uint16)
    three[rows : 2 * rows] = rig.upload(up.case.q).reshape(-1)
    q = rig.gpu.pointer(three) + 2 * rows
    given = arguments(up) | {"q": q}
    with checked_mode():
        for side in (-1, 1):
            call(rig, "paged_decode_attn_bf16", **given, output=q + side * 2 * rows)
            with pytest.raises(CheckedModeError, match="share memory with q"):
                call(rig, "paged_decode_attn_bf16", **given, output=q + side * (2 * rows - 16))


def test_a_pool_of_unknown_size_has_its_first_block(rig: Rig) -> None:
    up = upload_case(rig, random_case(BF16, [40, 3], Shape(4, 2, 64, 16)))
    pools = {"k_cache": rig.gpu.pointer(up.k.array), "v_cache": rig.gpu.pointer(up.v.array)}
    given = arguments(up) | pools | {"num_blocks": None}
    for name, begin in pools.items():
        with checked_mode(), pytest.raises(CheckedModeError, match=f"share memory with {name}"):
            call(rig, "paged_decode_attn_bf16", **given, output=begin + 16)


def test_a_writers_pool_that_shares_memory_with_its_source(rig: Rig) -> None:
    key = rig.gpu.zeros((48, 2, 64), np.uint16)
    with checked_mode(), pytest.raises(CheckedModeError, match=r"k_cache: .*share memory with key"):
        _write(rig, BF16, np.arange(3, dtype=np.int64), key=key, k_cache=rig.gpu.pointer(key), num_blocks=3)


@formats
def test_interleaved_pools_are_no_overlap(rig: Rig, fmt: CacheFormat) -> None:
    if fmt == BF16:
        pytest.skip("BF16 pools are contiguous")
    stride = 2 * CacheLayout(fmt, 2, 64, 16).block_stride_bytes
    pool = rig.gpu.zeros(3 * stride, np.uint8)
    with checked_mode():
        _write(rig, fmt, np.arange(3, dtype=np.int64), k_cache=pool, v_cache=pool[stride // 2 :],
               cache_stride=stride, block_stride_bytes=stride)  # fmt: skip


@everywhere
def test_off_by_default_and_off_again_afterwards(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case = a_case(fmt)
    lengths = case.seq_lens.copy()
    lengths[0] = 113
    bad = dataclasses.replace(case, seq_lens=lengths)
    run(rig, bad, path)
    with checked_mode():
        with checked_mode(enabled=False):
            run(rig, bad, path)
        found(rig, bad, path)
    run(rig, bad, path)


def test_other_threads_are_not_checked(rig: Rig) -> None:
    case = a_case(BF16)
    lengths = case.seq_lens.copy()
    lengths[0] = 113
    bad, ended = dataclasses.replace(case, seq_lens=lengths), []

    def work() -> None:
        run(rig, bad, "single")
        ended.append(True)

    with checked_mode():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ended


def test_a_checked_decoder(rig: Rig) -> None:
    case = a_case(FP8)
    decoder = Decoder(rig.gpu, case.layout, 4, 8, checked=True)
    for length in (40, 113):
        lengths = case.seq_lens.copy()
        lengths[0] = length
        up = upload_case(rig, dataclasses.replace(case, seq_lens=lengths))
        given = (up.q, up.k.array, up.v.array, up.tables, up.lengths, rig.full_bf16(case.q.shape))
        keywords: dict[str, Any] = {
            "num_seqs": case.num_seqs, "max_blocks_per_seq": case.max_blocks_per_seq, "stream": rig.stream,
            "q_stride": case.q_stride, "k_scale": case.k_scale, "v_scale": case.v_scale,
        }  # fmt: skip
        if length == 40:
            decoder.decode(*given, **keywords)
            continue
        with pytest.raises(CheckedModeError, match=r"seq_lens\[0\]: got 113"):
            decoder.decode(*given, **keywords)


@pytest.mark.gpu
def test_inside_a_capture_it_is_refused(rig: Rig) -> None:
    if rig.name == "emulator":
        pytest.skip("the emulator captures nothing")
    import cupy

    up = upload_case(rig, a_case(BF16))
    run_uploaded(up, "single")
    output = rig.full_bf16(up.case.q.shape)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with checked_mode(), pytest.raises(CheckedModeError, match="captured"):
            call(rig, "paged_decode_attn_bf16", stream, **arguments(up), output=output)
        call(rig, "paged_decode_attn_bf16", stream, **arguments(up), output=output)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(rig.download_bf16(output), run_uploaded(up, "single").out)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_is_looked_at(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """The hook sees every launcher's kernel, with as many values as it has parameters."""
    gpu, seen = FakeBackend(), []
    monkeypatch.setattr(
        "cupaged.checked._inspect", lambda kernel, values, stream: seen.append((kernel, values))
    )
    with checked_mode():
        fake_call(gpu, launcher, launcher_arguments(launcher), stream=3)
    ((kernel, values),) = seen
    assert kernel.entry == launcher
    assert len(values) == len(kernel.parameters)
    assert hasattr(ops, launcher)


def test_the_error_is_a_value_error_of_the_package() -> None:
    assert issubclass(CheckedModeError, CupagedError)
    assert issubclass(CheckedModeError, ValueError)
