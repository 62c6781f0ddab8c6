"""Decode over a shared prefix, against float64 and against the flat decode of the same tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import KVCache, checked_mode
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError, CheckedModeError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from tests.oracle import F64, assert_matches, attention_float64
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 8, 2, 64, 16, 64
SCALE = DIM**-0.5


@dataclass
class Shared:
    """Sequences that begin with the same `prefix` tokens, in a cache whose other tokens are NaN.

    Attributes:
        prefix_table: int32 ``[prefix_blocks]``.
        tables: int32 ``[num_seqs, suffix_blocks]``, unused columns far outside the pool.
        suffixes: int32 ``[num_seqs]``.
        k, v: dequantised tokens of each whole sequence ``[n, KV_HEADS, DIM]``.
    """

    rig: Rig
    cache: KVCache
    prefix: int
    prefix_table: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    suffixes: npt.NDArray[np.int32]
    k: list[F64]
    v: list[F64]

    def queries(self, tokens: int = 1) -> npt.NDArray[Any]:
        rng = np.random.default_rng(5)
        shape = (len(self.suffixes), *((tokens,) if tokens > 1 else ()), HEADS, DIM)
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    def on_device(self) -> tuple[Any, Any, Any]:
        return tuple(self.rig.upload(x) for x in (self.prefix_table, self.tables, self.suffixes))

    def expected(self, q: npt.NDArray[Any], **features: Any) -> tuple[F64, F64]:
        """Output and LSE; query token i of T sees all but the newest T - 1 - i tokens of its suffix."""
        tokens = q.shape[1] if q.ndim == 4 else 1
        rows = q.reshape(len(self.suffixes), tokens, HEADS, DIM)
        out, lse = np.empty(rows.shape), np.empty(rows.shape[:3])
        for seq, suffix in enumerate(self.suffixes):
            for token in range(tokens):
                n = self.prefix + max(0, int(suffix) - (tokens - 1 - token))
                out[seq, token], lse[seq, token] = attention_float64(
                    rows[seq, token], self.k[seq][:n], self.v[seq][:n], SCALE, **features
                )
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def shared(
    rig: Rig, fmt: CacheFormat, prefix: int, suffixes: list[int], fmt_v: CacheFormat | None = None
) -> Shared:
    """Random tokens in random blocks."""
    rng = np.random.default_rng(prefix)
    layout = CacheLayout(fmt, KV_HEADS, DIM, BLOCK)
    value_layout = CacheLayout(fmt_v or fmt, KV_HEADS, DIM, BLOCK)
    scales = {
        name: scale
        for name, each, scale in (("k_scale", layout, 0.5), ("v_scale", value_layout, 0.25))
        if each.format != BF16
    }
    cache = KVCache(rig.gpu, layout, BLOCKS, value_layout=value_layout, **scales)
    order = rng.permutation(BLOCKS).astype(np.int32)
    free = iter(order)
    prefix_table = np.array([next(free) for _ in range(-(-prefix // BLOCK))], np.int32)
    tables = np.full((len(suffixes), max(1, max(-(-n // BLOCK) for n in suffixes))), 0x7FFFFFFF, np.int32)
    for seq, n in enumerate(suffixes):
        tables[seq, : -(-n // BLOCK)] = [next(free) for _ in range(-(-n // BLOCK))]
    nan = rig.upload(np.full((BLOCKS * BLOCK, KV_HEADS, DIM), np.nan, ml_dtypes.bfloat16))
    cache.write(nan, nan, rig.upload(np.arange(BLOCKS * BLOCK)), stream=rig.stream)
    for table, n in [(prefix_table, prefix), *zip(tables, suffixes, strict=True)]:
        position = np.arange(n)
        slots = table[position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
        tokens = rng.standard_normal((2, n, KV_HEADS, DIM)).astype(ml_dtypes.bfloat16)
        cache.write(rig.upload(tokens[0]), rig.upload(tokens[1]), rig.upload(slots), stream=rig.stream)
    k: list[F64] = []
    v: list[F64] = []
    for seq, n in enumerate(suffixes):
        parts = [
            cache.gather(rig.upload(table.copy()), count, stream=rig.stream)
            for table, count in ((prefix_table, prefix), (tables[seq], n))
        ]
        for target, which in ((k, 0), (v, 1)):
            target.append(np.concatenate([rig.download(p[which]) for p in parts]).astype(np.float64))
    return Shared(rig, cache, prefix, prefix_table, tables, np.array(suffixes, np.int32), k, v)


def run(
    case: Shared, q: npt.NDArray[Any], decoder: CascadeDecoder, **options: Any
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Output and LSE on the host, after a decode into arrays of NaN."""
    rig = case.rig
    out = rig.full_bf16(q.shape)
    lse = rig.gpu.asarray(np.full(q.shape[:-1], np.nan, np.float32))
    prefix_table, tables, suffixes = case.on_device()
    got = decoder.decode(
        rig.upload(q), case.cache, prefix_table, case.prefix, tables, suffixes, out, stream=rig.stream,
        lse=lse, **options,
    )  # fmt: skip
    assert got is out
    return rig.download_bf16(out), rig.download(lse)


def cascade(case: Shared, max_seqs: int = 20, **features: Any) -> CascadeDecoder:
    return CascadeDecoder.for_cache(case.cache, HEADS, max_seqs, **features)


@formats
def test_against_float64(rig: Rig, fmt: CacheFormat) -> None:
    """Whole groups, a rest, and a rest alone; suffixes of nothing; prefixes around a block and a tile."""
    decoder = None
    for prefix, suffixes in (
        (200, [5, 0, 40, 1, 16, 17, 3, 9]),
        (33, [5, 0, 40, 1, 16, 17, 3, 9, 2, 0, 33]),
        (16, [7, 0, 1]),
        (1, [0]),
        (0, [3, 20]),
    ):
        case = shared(rig, fmt, prefix, suffixes)
        decoder = decoder or cascade(case)
        q = case.queries()
        out, lse = run(case, q, decoder)
        expected, expected_lse = case.expected(q)
        assert_matches(out, expected)
        np.testing.assert_allclose(lse, expected_lse, atol=3e-4, rtol=1e-5)


@formats
def test_as_flat_decode(rig: Rig, fmt: CacheFormat) -> None:
    """The same tokens in one table each: the prefix is of whole blocks."""
    case = shared(rig, fmt, 64, [5, 0, 40, 1, 16, 17, 3, 9, 21])
    q = case.queries()
    whole = np.hstack([np.tile(case.prefix_table, (len(case.suffixes), 1)), case.tables])
    flat = Decoder.for_cache(case.cache, HEADS, 16)
    lengths = rig.upload((case.suffixes + case.prefix).astype(np.int32))
    flat_out = rig.download_bf16(
        flat.decode(rig.upload(q), case.cache, rig.upload(whole), lengths, stream=rig.stream)
    )
    out, _ = run(case, q, cascade(case))
    assert_matches(out, flat_out.astype(np.float64))


@pytest.mark.parametrize("tokens", [2, 3])
def test_several_query_tokens(rig: Rig, tokens: int) -> None:
    case = shared(rig, FP8, 50, [5, tokens, 40, 17, 1, 0])
    q = case.queries(tokens)
    out, lse = run(case, q, cascade(case, query_tokens=tokens))
    expected, expected_lse = case.expected(q)
    assert_matches(out, expected)
    np.testing.assert_allclose(lse, expected_lse, atol=3e-4, rtol=1e-5)


def test_formats_of_their_own_scale_and_cap(rig: Rig) -> None:
    case = shared(rig, FP8, 40, [5, 0, 30], NVFP4)
    q = case.queries()
    out, _ = run(case, q, cascade(case, soft_cap=2.0), softmax_scale=2 * SCALE)
    expected = np.empty(q.shape)
    for seq in range(3):
        k = np.repeat(case.k[seq], HEADS // KV_HEADS, axis=1)
        v = np.repeat(case.v[seq], HEADS // KV_HEADS, axis=1)
        scores = 2.0 * np.tanh(np.einsum("hd,thd->ht", q[seq].astype(np.float64), k) * 2 * SCALE / 2.0)
        weights = np.exp(scores)
        expected[seq] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    assert_matches(out, expected)


def test_a_sink_counts_once(rig: Rig) -> None:
    """Of e^sink more in the sum, with and without a suffix."""
    case = shared(rig, BF16, 20, [5, 0, 30])
    q = case.queries()
    sinks = np.linspace(-2, 4, HEADS).astype(np.float32)
    out, lse = run(case, q, cascade(case), sinks=rig.upload(sinks))
    plain, plain_lse = case.expected(q)
    expected_lse = np.logaddexp(plain_lse, sinks.astype(np.float64))
    assert_matches(out, plain * np.exp(plain_lse - expected_lse)[..., None])
    np.testing.assert_allclose(lse, expected_lse, atol=3e-4)


def test_lengths_on_the_device_and_strided_queries(rig: Rig) -> None:
    """Ten sequences are three groups; q is a slice of packed rows, the tables of wider ones."""
    case = shared(rig, BF16, 30, [4, 9, 0, 17, 5, 6, 7, 8, 9, 10])
    q = case.queries()
    packed = np.full((10, HEADS + 4, DIM), np.nan, ml_dtypes.bfloat16)
    packed[:, :HEADS] = q
    wide = np.full((10, case.tables.shape[1] + 3), -1, np.int32)
    wide[:, : case.tables.shape[1]] = case.tables
    decoder = cascade(case)
    out = decoder.decode(
        rig.upload(packed)[:, :HEADS], case.cache, rig.upload(case.prefix_table),
        rig.upload(np.full(3, 30, np.int32)), rig.upload(wide)[:, : case.tables.shape[1]],
        rig.upload(case.suffixes), stream=rig.stream,
    )  # fmt: skip
    assert_matches(rig.download_bf16(out), case.expected(q)[0])


def test_a_bad_block_of_the_prefix_makes_all_rows_nan(rig: Rig) -> None:
    case = shared(rig, BF16, 40, [5, 0, 30])
    case.prefix_table[1] = BLOCKS
    out, _ = run(case, case.queries(), cascade(case))
    assert np.isnan(out.astype(np.float32)).all()


def test_what_is_refused(rig: Rig) -> None:
    case = shared(rig, BF16, 40, [5, 0, 30])
    decoder, gpu = cascade(case, max_seqs=3), rig.gpu
    prefix_table, tables, suffixes = case.on_device()
    good: dict[str, Any] = {
        "q": rig.upload(case.queries()), "cache": case.cache, "prefix_table": prefix_table, "prefix_len": 40,
        "block_tables": tables, "seq_lens": suffixes, "stream": rig.stream,
    }  # fmt: skip
    decoder.decode(**good)
    other = KVCache(gpu, CacheLayout(FP8, KV_HEADS, DIM, BLOCK), 2, k_scale=1.0, v_scale=1.0)
    unaligned = gpu.zeros(14, np.uint8)[2:].view(np.int32)
    out_bytes = 2 * 3 * HEADS * DIM
    shared_memory = gpu.zeros(out_bytes // 2, np.uint16)
    for changed, match in (
        ({"cache": other}, "^cache: its layout has .* where the decoder's is"),
        ({"cache": case.cache.layout}, "^cache: got CacheLayout, allowed is a KVCache"),
        ({"prefix_table": unaligned}, "^prefix_table: got .*multiple of 4"),
        ({"prefix_len": unaligned[:1]}, "^prefix_len: got .*multiple of 4"),
        ({"out": shared_memory[: out_bytes // 2].reshape(3, HEADS, DIM),
          "lse": shared_memory[: 6 * HEADS].view(np.float32).reshape(3, HEADS)},
         "^out: its memory, .* is shared with lse, "),
        ({"prefix_len": -1}, "^prefix_len: got -1"),
        ({"prefix_len": 2.0}, "^prefix_len: got 2.0"),
        ({"prefix_len": gpu.zeros(2, np.int32)}, r"^prefix_len: got shape \(2,\), allowed is \(1,\)"),
        ({"prefix_table": 4096}, "^prefix_table: got int"),
        ({"prefix_table": tables}, r"^prefix_table: got shape \(3, 2\)"),
        ({"prefix_table": gpu.zeros(3, np.int64)}, "^prefix_table: got dtype int64"),
        ({"prefix_table": gpu.zeros(6, np.int32)[::2]}, "^prefix_table: got strides"),
        ({"prefix_len": 49}, "^prefix_len: got 49, but the 3 blocks of prefix_table, of 16 .* room for 48"),
        ({"prefix_len": gpu.zeros(1, np.int64)}, "^prefix_len: got dtype int64"),
        ({"prefix_len": True}, "^prefix_len: got True"),
        ({"q": gpu.zeros((4, HEADS, DIM), np.uint16)}, r"^q: got shape \(4, 8, 64\)"),
        ({"q": gpu.zeros((3, HEADS, DIM), np.float32)}, "^q: got dtype float32"),
        ({"out": gpu.zeros((3, HEADS, DIM + 1), np.uint16)[..., :DIM]}, "^out: got strides"),
        ({"out": gpu.zeros((2, HEADS, DIM), np.uint16)}, "^out: got shape"),
        ({"out": gpu.zeros((3, HEADS, DIM), np.float16)}, r"^out: got dtype float16, .*\(BF16 as bits\)"),
        ({"lse": gpu.zeros((HEADS, 3), np.float32)}, r"^lse: got shape \(8, 3\), allowed is \(3, 8\)"),
        ({"lse": gpu.zeros((3, HEADS), np.float64)}, "^lse: got dtype float64"),
        ({"lse": gpu.zeros((3, HEADS, 2), np.float32)[..., 0]}, "^lse: got strides"),
        ({"lse": gpu.zeros((3, HEADS + 1), np.float32)}, "^lse: got shape"),
        ({"seq_lens": gpu.zeros(4, np.int32), "block_tables": gpu.zeros((4, 2), np.int32),
          "q": gpu.zeros((4, HEADS, DIM), np.uint16)}, "^num_seqs: got 4, this decoder takes 0 to 3"),
    ):  # fmt: skip
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=match):
            decoder.decode(**good | changed)
    with pytest.raises(ArgumentTypeError, match=r"^sliding_window: unexpected keyword; a window would have"):
        decoder.decode(**good | {"sliding_window": 5})
    with pytest.raises(ArgumentTypeError, match="cache: got CacheLayout, allowed is a KVCache"):
        CascadeDecoder.for_cache(case.cache.layout, HEADS, 3)  # type: ignore[arg-type]


def test_the_last_token_that_a_table_has_room_for(rig: Rig) -> None:
    case = shared(rig, BF16, 48, [5, 0])
    q = case.queries()
    out, _ = run(case, q, cascade(case))
    assert_matches(out, case.expected(q)[0])


def test_checked_mode_names_the_prefix(rig: Rig) -> None:
    """Not what the decoder inside calls it."""
    case = shared(rig, BF16, 40, [5, 0, 30])
    decoder, q = cascade(case), rig.upload(case.queries())
    _, tables, suffixes = case.on_device()
    lengths = rig.upload(np.array([49], np.int32))
    bad = case.prefix_table.copy()
    bad[1] = BLOCKS
    for prefix, name, index in (
        ((rig.upload(bad), 40), "prefix_table", (1,)),
        ((rig.upload(case.prefix_table), lengths), "prefix_len", (0,)),
    ):
        with (
            checked_mode(),
            pytest.raises(CheckedModeError, match=rf"^{name}\[{', '.join(map(str, index))}\]: got") as caught,
        ):
            decoder.decode(q, case.cache, *prefix, tables, suffixes, stream=rig.stream)
        assert (caught.value.array, caught.value.index) == (name, index)


def test_results_in_each_others_memory_are_found_before_a_launch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in checked mode those in the memory of what is read, whose launches do not write them."""
    case = shared(rig, BF16, 40, [5, 0, 30])
    decoder, cache, gpu = cascade(case), case.cache, rig.gpu
    table, tables, suffixes = case.on_device()
    rows = 3 * HEADS * DIM
    bits = gpu.zeros(rows, np.uint16)
    lse, out = bits[: 6 * HEADS].view(np.float32).reshape(3, HEADS), bits.reshape(3, HEADS, DIM)
    sinks = lse.reshape(-1)[:HEADS]
    pool = cache.v_pool.reshape(-1)[:rows].view(np.uint16).reshape(3, HEADS, DIM)
    lengths = bits[6:12].view(np.int32)[:3]
    good = {
        "q": rig.upload(case.queries()), "cache": cache, "prefix_table": table, "prefix_len": 40,
        "block_tables": tables, "seq_lens": suffixes, "stream": rig.stream,
    }  # fmt: skip
    decoder.decode(**good)

    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(Decoder, "decode_pools", launched)
    with pytest.raises(ArgumentValueError, match=r"^out: its memory, .* is shared with lse, "):
        decoder.decode(**good | {"out": out, "lse": lse})
    for changed, message in (
        ({"out": pool}, "out: .* is shared with cache.v_cache"),
        ({"out": out, "seq_lens": lengths}, "out: .* is shared with seq_lens"),
        ({"lse": lse, "sinks": sinks}, "lse: .* is shared with sinks"),
        ({"lse": lse, "prefix_table": lengths[:1], "prefix_len": 0}, "lse: .* is shared with prefix_table"),
    ):
        with checked_mode(), pytest.raises(CheckedModeError, match=f"^{message}") as caught:
            decoder.decode(**good | changed)
        assert caught.value.array == message[:3]


@pytest.mark.gpu
def test_capture(rig: Rig) -> None:
    """Whole groups and a rest; a replay reads new queries and a shorter prefix."""
    if rig.name != "cupy":
        pytest.skip("needs a GPU")
    import cupy

    case = shared(rig, FP8, 100, [5, 0, 40, 1, 16, 17, 3, 9, 2, 0, 33])
    shorter = dataclasses.replace(
        case, prefix=37, k=[np.delete(k, np.s_[37:100], 0) for k in case.k],
        v=[np.delete(v, np.s_[37:100], 0) for v in case.v],
    )  # fmt: skip
    decoder, stream = cascade(case), cupy.cuda.Stream(non_blocking=True)
    first, then = case.queries(), -case.queries()
    q, out = rig.upload(first), rig.full_bf16(first.shape)
    prefix_lens = rig.upload(np.full(-(-11 // decoder.group_rows), 100, np.int32))
    prefix_table, tables, suffixes = case.on_device()
    arrays = (prefix_table, prefix_lens, tables, suffixes, out)
    rig.gpu.synchronize()
    decoder.decode(q, case.cache, *arrays, stream=stream)
    stream.synchronize()
    assert_matches(rig.download_bf16(out), case.expected(first)[0])
    with stream:
        stream.begin_capture()
        with pytest.raises(
            ArgumentValueError, match=r"^prefix_len: got 99 while the stream is being captured"
        ):
            decoder.decode(q, case.cache, prefix_table, 99, *arrays[2:], stream=stream)
        decoder.decode(q, case.cache, *arrays, stream=stream)
        graph = stream.end_capture()
    q[...] = rig.upload(then)
    prefix_lens.fill(37)
    out.fill(0x7FC0)
    rig.gpu.synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_matches(rig.download_bf16(out), shorter.expected(then)[0])


def test_a_bigger_batch_before_changes_no_bit(rig: Rig) -> None:
    """Rows to spare are those of no earlier call."""
    case, bigger = (shared(rig, NVFP4, 400, [5] * n) for n in (1, 11))
    decoder = CascadeDecoder.for_cache(case.cache, HEADS, 11)
    q = case.queries()
    first = run(case, q, decoder)
    run(bigger, (bigger.queries().astype(np.float32) * 5).astype(q.dtype), decoder)
    again = run(case, q, decoder)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
