"""`Decoder.decode` over a `KVCache`: the same as over its pools, with sizes from the arrays."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import KVCache, ops
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError, CheckedModeError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from tests.fake_backend import FakeBackend
from tests.kernels.test_cascade import HEADS, SCALE, Shared, shared
from tests.kernels.test_interop import DLPackOnly, InterfaceOnly, NumpyLender
from tests.oracle import assert_matches
from tests.rig import Rig, bits
from tests.warm import UNTIL_READY

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
LENGTHS = [40, 0, 17, 5]


@pytest.fixture(scope="module")
def case(rig: Rig) -> Shared:
    return shared(rig, BF16, 0, LENGTHS)


@pytest.fixture(scope="module")
def decoder(case: Shared) -> Decoder:
    return Decoder.for_cache(case.cache, HEADS, 4)


def arrays(case: Shared, q: npt.NDArray[Any] | None = None) -> dict[str, Any]:
    _, tables, lengths = case.on_device()
    return {
        "q": case.rig.upload(case.queries() if q is None else q),
        "cache": case.cache,
        "block_tables": tables,
        "seq_lens": lengths,
        "stream": case.rig.stream,
    }


@pytest.mark.parametrize("scales", ["tensor", "heads"])
@formats
def test_against_float64(rig: Rig, fmt: CacheFormat, scales: str) -> None:
    """`shared` gives the cache one scale; here also one for each head, which decode takes from the cache."""
    case = shared(rig, fmt, 0, LENGTHS)
    if scales == "heads":
        if fmt == BF16:
            pytest.skip("a BF16 cache has no scales")
        case.cache.set_scales(np.full(2, 0.5, np.float32), np.full(2, 0.25, np.float32))
    lse = rig.gpu.asarray(np.full((4, HEADS), np.nan, np.float32))
    out = Decoder.for_cache(case.cache, HEADS, 4).decode(**arrays(case), lse=lse)
    expected, expected_lse = case.expected(case.queries())
    assert_matches(rig.download_bf16(out), expected)
    np.testing.assert_allclose(rig.download(lse), expected_lse, atol=3e-4, rtol=1e-5)


def test_a_given_result_is_the_one_returned(rig: Rig, case: Shared, decoder: Decoder) -> None:
    out = rig.full_bf16((4, HEADS, 64))
    _, tables, lengths = case.on_device()
    q = rig.upload(case.queries())
    assert decoder.decode(q, case.cache, tables, lengths, out, stream=rig.stream) is out
    flat = rig.full_bf16((4, HEADS, 64))
    cache = case.cache
    assert decoder.decode(
        q, cache.k_cache, cache.v_cache, tables, lengths, flat, num_seqs=4, max_blocks_per_seq=3,
        stream=rig.stream,
    ) is None  # fmt: skip
    np.testing.assert_array_equal(bits(rig.download(out)), bits(rig.download(flat)))


def test_queries_and_tables_of_any_stride(rig: Rig, case: Shared, decoder: Decoder) -> None:
    plain = arrays(case)
    expected = rig.download(decoder.decode(**plain))
    packed = np.full((4, HEADS + 4, 64), np.nan, ml_dtypes.bfloat16)
    packed[:, :HEADS] = case.queries()
    columns = case.tables.shape[1]
    wide = np.full((4, columns + 5), -1, np.int32)
    wide[:, :columns] = case.tables
    sliced = {"q": rig.upload(packed)[:, :HEADS], "block_tables": rig.upload(wide)[:, :columns]}
    np.testing.assert_array_equal(bits(rig.download(decoder.decode(**plain | sliced))), bits(expected))


def test_a_single_row_has_no_stride(rig: Rig, case: Shared, decoder: Decoder) -> None:
    """Whatever its array says of the next: q whose first axis goes backwards, of one sequence."""
    good = arrays(case)
    one = good | {name: good[name][:1] for name in ("block_tables", "seq_lens")}
    expected = rig.download(decoder.decode(**one | {"q": good["q"][:1]}))
    backwards = rig.upload(case.queries()[::-1])[::-1]
    np.testing.assert_array_equal(
        bits(rig.download(decoder.decode(**one | {"q": backwards[:1]}))), bits(expected)
    )
    with pytest.raises(ArgumentValueError, match=r"^q: "):
        decoder.decode(**good | {"q": backwards})


def test_query_tokens_are_equally_far_apart(rig: Rig, case: Shared) -> None:
    """Also where only two sequences have them; of one sequence there is nothing to compare."""
    decoder = Decoder.for_cache(case.cache, HEADS, 4, query_tokens=2)
    good, wide = arrays(case), rig.upload(case.queries(3))[:, :2]
    for count in (2, 4):
        some = {name: good[name][:count] for name in ("block_tables", "seq_lens")}
        with pytest.raises(ArgumentValueError, match=r"^q: got strides .*must be equally far apart"):
            decoder.decode(**good | some | {"q": wide[:count]})
    one = good | {name: good[name][:1] for name in ("block_tables", "seq_lens")}
    found = [decoder.decode(**one | {"q": q}) for q in (wide[:1], rig.upload(case.queries(3)[:1, :2].copy()))]
    np.testing.assert_array_equal(*(bits(rig.download(out)) for out in found))


def six_bytes_apart(flat: Any) -> Any:
    """Int32 ``[4, 1]`` whose rows are no whole number of integers apart."""
    library = np if isinstance(flat, np.ndarray) else importlib.import_module("cupy")
    return library.lib.stride_tricks.as_strided(flat, (4, 1), (6, 4))


@pytest.mark.parametrize("axes", [3, 4])
def test_several_query_tokens(rig: Rig, axes: int) -> None:
    case = shared(rig, FP8, 0, LENGTHS)
    q = case.queries(3)
    given = q if axes == 4 else q.reshape(-1, HEADS, 64)
    out = Decoder.for_cache(case.cache, HEADS, 4, query_tokens=3).decode(**arrays(case, given))
    assert tuple(out.shape) == given.shape
    assert_matches(rig.download_bf16(out).reshape(q.shape)[[0, 2, 3]], case.expected(q)[0][[0, 2, 3]])


def test_half_precision(rig: Rig, case: Shared) -> None:
    q = case.queries().astype(np.float16)
    out = Decoder.for_cache(case.cache, HEADS, 4, q_dtype="float16").decode(**arrays(case, q))
    assert str(out.dtype) == "float16"
    expected = case.expected(q)[0]
    # Weights over a BF16 cache are BF16: 2^-9 of each, on values of a magnitude of 1.
    np.testing.assert_allclose(rig.download(out).astype(np.float64), expected, atol=2**-8)


def test_formats_of_their_own(rig: Rig) -> None:
    case = shared(rig, NVFP4, 0, LENGTHS, FP8)
    out = Decoder.for_cache(case.cache, HEADS, 4).decode(**arrays(case), softmax_scale=SCALE)
    assert_matches(rig.download_bf16(out), case.expected(case.queries())[0])


def test_checked_mode_names_the_result_as_it_was_given(rig: Rig, case: Shared) -> None:
    good = arrays(case)
    decoder = Decoder.for_cache(case.cache, HEADS, 4, checked=True)
    with pytest.raises(CheckedModeError, match=r"^out: bytes .* share memory with q,") as caught:
        decoder.decode(**good | {"out": good["q"]})
    assert caught.value.array == "out"


@pytest.mark.parametrize("form", ["cache", "pools"])
def test_messages_name_the_result_as_the_caller_does(
    rig: Rig, case: Shared, decoder: Decoder, form: str
) -> None:
    """Whatever finds the fault: sizes, the launch, and the emulator where nothing else looks any more."""
    gpu, good, cache = rig.gpu, arrays(case), case.cache
    name, given = "out", good
    if form == "pools":
        name = "output"
        given = {n: x for n, x in good.items() if n != "cache"} | {
            "k_cache": cache.k_cache, "v_cache": cache.v_cache, "num_seqs": 4, "max_blocks_per_seq": 3
        }  # fmt: skip

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=match) as caught:
            decoder.decode(**given | changed)
        assert caught.value.argument == match[1:].partition(":")[0]

    unaligned = gpu.zeros(2 * 4 * HEADS * 64 + 8, np.uint8)[8:].view(np.uint16).reshape(4, HEADS, 64)
    refused(f"^{name}: got .*multiple of 16", **{name: unaligned})
    refused(f"^{name}: got dtype float32", **{name: gpu.zeros((4, HEADS, 64), np.float32)})
    refused("^q: got dtype float32", q=gpu.zeros((4, HEADS, 64), np.float32), **{name: unaligned})
    text = "output, output: x"
    out = gpu.zeros((4, HEADS, 64), np.uint16)
    with pytest.raises(ArgumentTypeError, match=f"'{text}'"):
        decoder.decode(**given | {name: out, "softmax_scale": text})
    if rig.name == "emulator":
        lse = gpu.zeros((4, HEADS), np.float32)
        lse.flags.writeable = False
        refused("^lse: got a NumPy array that must not be written", lse=lse, **{name: out})
        for _ in range(UNTIL_READY + 1):
            decoder.decode(**given | {name: out})
        out.flags.writeable = False
        refused(f"^{name}: got a NumPy array that must not be written", **{name: out})


def test_arrays_that_are_none_are_named(rig: Rig, case: Shared, decoder: Decoder) -> None:
    """Though they have a shape and strides."""
    other = SimpleNamespace(shape=(4, HEADS, 64), strides=(1024, 128, 2), dtype=np.dtype(np.uint16))
    for name in ("q", "out"):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got SimpleNamespace, allowed"):
            decoder.decode(**arrays(case) | {name: other})


def test_no_window_and_every_shape_of_lse(rig: Rig, case: Shared, decoder: Decoder) -> None:
    good = arrays(case)
    expected = bits(rig.download(decoder.decode(**good)))
    lses = [rig.gpu.zeros(shape, np.float32) for shape in ((4, HEADS), (4, 1, HEADS), (4 * HEADS,))]
    for window, lse in zip((None, 0, None), lses, strict=True):
        out = decoder.decode(**good, sliding_window=window, lse=lse)
        np.testing.assert_array_equal(bits(rig.download(out)), expected)
    first, *others = (rig.download(lse).reshape(-1) for lse in lses)
    assert np.isfinite(first).any()
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_no_sequences(rig: Rig, case: Shared, decoder: Decoder) -> None:
    gpu = rig.gpu
    out = decoder.decode(
        gpu.zeros((0, HEADS, 64), np.uint16), case.cache, gpu.zeros((0, 3), np.int32),
        gpu.zeros(0, np.int32), stream=rig.stream,
    )  # fmt: skip
    assert tuple(out.shape) == (0, HEADS, 64)


def test_what_is_refused(rig: Rig, case: Shared, decoder: Decoder) -> None:
    gpu, good = rig.gpu, arrays(case)
    other = KVCache(gpu, CacheLayout(FP8, 2, 64, 16), 2, k_scale=1.0, v_scale=1.0)
    elsewhere = KVCache(FakeBackend(), case.cache.layout, 2)  # type: ignore[arg-type]
    for changed, match in (
        ({"cache": other}, "^cache: its layout has .* where the decoder's is"),
        ({"cache": elsewhere}, "^cache: got one on another backend, allowed is one on the decoder's"),
        ({"q": 1 << 20}, "^q: got int, allowed is an array of the backend"),
        ({"q": gpu.zeros((4, HEADS, 32), np.uint16)}, r"^q: got shape \(4, 8, 32\)"),
        ({"q": gpu.zeros((4, HEADS, 64), np.float32)}, "^q: got dtype float32"),
        ({"seq_lens": gpu.zeros((4, 1), np.int32)}, r"^seq_lens: got shape \(4, 1\)"),
        ({"seq_lens": gpu.zeros(4, np.int64)}, "seq_lens: got dtype int64"),
        ({"block_tables": gpu.zeros((3, 3), np.int32)}, r"^block_tables: got shape \(3, 3\)"),
        ({"block_tables": gpu.zeros((4, 6), np.int32)[:, ::2]}, "^block_tables: got strides"),
        ({"block_tables": gpu.zeros((4, 4), np.int32)[:, ::2]}, "^block_tables: got strides"),
        ({"block_tables": six_bytes_apart(gpu.zeros(8, np.int32))}, "^block_tables: got strides"),
        ({"block_tables": gpu.zeros((4, 6), np.int64)[:, :3]}, "^block_tables: got dtype int64"),
        ({"out": gpu.zeros((4, HEADS * 64), np.uint16)}, "^out: got shape"),
        ({"out": gpu.zeros((4, HEADS, 64), np.float16)}, "^out: got dtype float16"),
        ({"out": gpu.zeros((4, HEADS, 80), np.uint16)[..., :64]}, r"(^|: )out: got strides"),
        *(({"lse": gpu.zeros(shape, np.float32)}, r"^lse: got shape .*, allowed is \(4, 8\) or .*\(32,\)")
          for shape in ((4, HEADS - 1), (HEADS, 4), (5, HEADS), (100,), (1, 4 * HEADS))),
        ({"seq_lens": good["seq_lens"][:1]}, r"^seq_lens: got shape \(1,\), allowed is \(4,\): q and block"),
        ({"q": good["q"][::-1]}, r"^q: got strides .*; from a query token to the next"),
        ({"q": np.broadcast_to(good["q"][:1], (4, HEADS, 64))}, r"^q: got strides .* and 512 or more"),
        ({"sinks": gpu.zeros((4, HEADS), np.float32)}, r"^sinks: got shape \(4, 8\), allowed is \(8,\)"),
        ({"sliding_window": -1}, "^sliding_window: got -1, allowed is 1 to .*; 0 is no window"),
    ):  # fmt: skip
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=match):
            decoder.decode(**good | changed)
    q, tables, lengths = good["q"], good["block_tables"], good["seq_lens"]
    for call, match in (
        (lambda: decoder.decode(**good | {"num_seqs": 4}),
         "^num_seqs: .*unexpected.*decode\\(q, cache, ...\\) takes q"),
        (lambda: decoder.decode(q, case.cache, tables, lengths), "^stream: missing"),
        (lambda: decoder.decode(q, case.cache, tables, stream=rig.stream), "^seq_lens: missing"),
        (lambda: decoder.decode(q, tables, lengths, stream=rig.stream),
         rf"^cache: got {type(tables).__name__}, allowed is a KVCache \(or both pools and num_seqs=, max_bl"),
        (lambda: decoder.decode(q, cache=tables, block_tables=tables, seq_lens=lengths, stream=rig.stream),
         f"^cache: got {type(tables).__name__}, allowed is a KVCache"),
        (lambda: decoder.decode(q, stream=rig.stream), "^cache: got nothing, allowed is a KVCache"),
        (lambda: decoder.decode(case.cache, q, tables, lengths, stream=rig.stream), "^q: got KVCache"),
        (lambda: decoder.decode(q, 1 << 20, 1 << 20, tables, lengths, q, num_seqs=4, max_blocks_per_seq=3),
         "^stream: missing.*decode\\(q, k_cache, v_cache, ...\\) takes q"),
        (lambda: decoder.decode(q, q, q, tables, lengths, q, stream=0), "^num_seqs, max_blocks"),
        (lambda: decoder.decode(q, case.cache, tables, lengths, None, 0, stream=0), "too many positional"),
        (lambda: decoder.decode(q, case.cache, tables, lengths, stream=0, cache=case.cache),
         "^cache: given twice"),
        (lambda: decoder.decode(q, case.cache, stream=0), "^block_tables, seq_lens: missing"),
        (lambda: decoder.decode(iter([q]), case.cache, tables, lengths, stream=0), "^q: got list_iterator"),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=match) as caught:
            call()
        assert "_decode" not in str(caught.value)
    with pytest.raises(ArgumentTypeError, match="cache: got int, allowed is a KVCache"):
        Decoder.for_cache(4096, HEADS, 4)  # type: ignore[arg-type]


def lenders(rig: Rig) -> list[Any]:
    if rig.name == "cupy":
        return [DLPackOnly, InterfaceOnly]
    # NumPy lends no BF16.
    return [lambda x: NumpyLender(x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x)]


def test_arrays_of_no_library(rig: Rig, case: Shared, decoder: Decoder) -> None:
    """Through both forms of decode, results included."""
    good, cache = arrays(case), case.cache
    expected = bits(rig.download(decoder.decode(**good)))
    for lend in lenders(rig):
        names = ("q", "block_tables", "seq_lens")
        lent = {name: lend(good[name]) for name in names}
        outs = [rig.full_bf16((4, HEADS, 64)) for _ in range(2)]
        lses = [rig.gpu.zeros((4, HEADS), np.float32) for _ in range(2)]
        given = lend(outs[0])
        assert decoder.decode(**good | lent, out=given, lse=lend(lses[0])) is given
        decoder.decode(
            lent["q"], lend(cache.k_pool), lend(cache.v_pool), lent["block_tables"], lent["seq_lens"],
            lend(outs[1]), num_seqs=4, max_blocks_per_seq=3, stream=rig.stream, lse=lend(lses[1]),
        )  # fmt: skip
        for out in outs:
            np.testing.assert_array_equal(bits(rig.download(out)), expected)
        np.testing.assert_array_equal(rig.download(lses[0]), rig.download(lses[1]))


def test_launchers_take_arrays_of_no_library(rig: Rig, case: Shared) -> None:
    """They are checked as the backend's own are: by size, dtype and strides."""
    good, name = arrays(case), "paged_decode_attn_bf16"
    kernel = rig.kernel(name)

    def decode(lend: Any, **changed: Any) -> Any:
        out = rig.full_bf16((4, HEADS, 64))
        pools = (lend(case.cache.k_pool), lend(case.cache.v_pool))
        given = {"q": good["q"], "seq_lens": good["seq_lens"]} | changed
        ops.paged_decode_attn_bf16(
            rig.gpu, kernel, lend(given["q"]), *pools, lend(out), lend(good["block_tables"]),
            lend(given["seq_lens"]), 3, 4, HEADS, 2, 64, 16, SCALE, HEADS * 64, 0, rig.stream,
        )  # fmt: skip
        return rig.download(out)

    expected = bits(decode(lambda array: array))
    for lend in lenders(rig):
        np.testing.assert_array_equal(bits(decode(lend)), expected)
        with pytest.raises(ArgumentValueError, match="seq_lens: got 3 elements, needed are 4"):
            decode(lend, seq_lens=rig.gpu.zeros(3, np.int32))
        with pytest.raises(ArgumentTypeError, match="q: got dtype float32"):
            decode(lend, q=rig.gpu.zeros((4, HEADS, 64), np.float32))


@pytest.mark.gpu
def test_capture(rig: Rig, case: Shared, decoder: Decoder) -> None:
    if rig.name != "cupy":
        pytest.skip("needs a GPU")
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    good = arrays(case) | {"stream": stream}
    out = rig.full_bf16((4, HEADS, 64))
    rig.gpu.synchronize()
    decoder.decode(**good, out=out)
    stream.synchronize()
    expected = bits(rig.download(out))
    with stream:
        stream.begin_capture()
        with pytest.raises(ArgumentValueError, match=r"^out: got None while the stream is being captured"):
            decoder.decode(**good)
        decoder.decode(**good, out=out)
        graph = stream.end_capture()
    out.fill(0x7FC0)
    rig.gpu.synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(bits(rig.download(out)), expected)
