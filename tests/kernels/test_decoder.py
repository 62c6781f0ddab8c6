"""The streaming decode kernels, through `Decoder`, against closed forms and float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from tests import closed_form
from tests.oracle import assert_matches
from tests.paths import decode_case
from tests.poison import Options, PagedCase, Poison, Shape, build_case, random_case
from tests.rig import Rig, bits, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
LENGTHS = (1, 300, 17, 0, 64, 1000, 16)


def _decode(
    rig: Rig, case: PagedCase, decoder: Decoder | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Output and LSE."""
    decoder = decoder or Decoder(rig.gpu, case.layout, case.num_q_heads, max(1, case.num_seqs))
    up = upload_case(rig, case)
    found = decode_case(up, decoder)
    up.assert_pools_untouched()
    assert found.lse is not None
    return found.out, found.lse


def _check(rig: Rig, case: PagedCase) -> None:
    out, lse = case.expected()
    got, got_lse = _decode(rig, case)
    assert_matches(got, out)
    np.testing.assert_allclose(got_lse, lse, atol=3e-4, rtol=1e-5)


@formats
@pytest.mark.parametrize(
    "heads", [(8, 8), (9, 3), (4, 1), (28, 4), (16, 1), (32, 2), (32, 8), (7, 1)], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(rig: Rig, fmt: CacheFormat, heads: tuple[int, int], head_dim: int) -> None:
    _check(rig, random_case(fmt, LENGTHS, Shape(*heads, head_dim, 16)))


@formats
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_heads(rig: Rig, fmt: CacheFormat, heads: tuple[int, int], head_dim: int) -> None:
    _check(rig, random_case(fmt, LENGTHS, Shape(*heads, head_dim, 16)))


@formats
@pytest.mark.parametrize("block_size", [8, 24, 32, 48, 64, 256])
def test_block_sizes(rig: Rig, fmt: CacheFormat, block_size: int) -> None:
    _check(rig, random_case(fmt, LENGTHS, Shape(8, 4, 64, block_size)))


@formats
@pytest.mark.parametrize("poison", [Poison.NAN, Poison.INF], ids=lambda p: p.value)
def test_dead_bytes_change_no_bit(rig: Rig, fmt: CacheFormat, poison: Poison) -> None:
    layout: dict[str, Any] = {"q_gap": 24, "unused_column": -1}
    if fmt != BF16:
        layout["block_padding"] = 64
    if fmt == NVFP4:
        layout["section_padding"] = 32
    results = []
    for fill in (poison, Poison.QUIET):
        case = random_case(fmt, LENGTHS, Shape(8, 2, 64, 16), options=Options(poison=fill, **layout))
        results.append(_decode(rig, case)[0])
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))
    assert_matches(results[0], case.expected()[0])


@formats
@pytest.mark.parametrize("window", [1, 16, 20, 100])
def test_sliding_window(rig: Rig, fmt: CacheFormat, window: int) -> None:
    case = random_case(fmt, [1, window, window + 1, 4 * window + 3, 500], Shape(8, 2, 64, 16), window=window)
    tables = case.block_tables.copy()
    for seq, length in enumerate(case.seq_lens):
        tables[seq, : max(0, int(length) - window) // 16] = -1  # left out: never looked up
    _check(rig, dataclasses.replace(case, block_tables=tables))


@formats
def test_closed_forms(rig: Rig, fmt: CacheFormat) -> None:
    case, expected = closed_form.fixture_u(fmt, [1, 3, 100, 0, 255], Shape(8, 2, 64, 16))
    got, lse = _decode(rig, case)
    assert_matches(got, expected)
    np.testing.assert_allclose(lse, closed_form.lse_of_zero_query(case), atol=1e-5)
    assert not bits(got[3]).any()
    for make in (closed_form.fixture_h, closed_form.fixture_d):
        case, expected = make(fmt, (5, 70), Shape(8, 4, 128, 16))
        assert_matches(_decode(rig, case)[0], expected)
    for lane in (0, 63):
        case, expected = closed_form.fixture_x2(fmt, lane)
        assert_matches(_decode(rig, case)[0], expected)


@formats
@pytest.mark.parametrize("bad", [-1, 0x7FFFFFFF])
def test_block_outside_the_pool_makes_its_row_nan(rig: Rig, fmt: CacheFormat, bad: int) -> None:
    # Finite everywhere, so that another block in its place shows.
    case = random_case(fmt, [400, 400, 33], Shape(8, 2, 64, 16), options=Options(poison=Poison.QUIET))
    tables = case.block_tables.copy()
    tables[1, 7] = bad
    expected = case.expected()[0]
    expected[1] = np.nan
    assert_matches(_decode(rig, dataclasses.replace(case, block_tables=tables))[0], expected)


@formats
def test_length_beyond_the_table_makes_its_row_nan(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [20, 320, 9], Shape(8, 2, 64, 16))
    expected, _ = case.expected()
    for bad in (321, 2**31 - 1, -1):
        lengths = case.seq_lens.copy()
        lengths[0] = bad
        expected[0] = np.nan
        got, lse = _decode(rig, dataclasses.replace(case, seq_lens=lengths))
        assert_matches(got, expected)
        assert np.isnan(lse[0]).all()


def test_fp8_scales(rig: Rig) -> None:
    _check(rig, random_case(FP8, LENGTHS, options=Options(k_scale=0.037, v_scale=0.0021)))


@formats
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**100])
def test_query_magnitude(rig: Rig, fmt: CacheFormat, magnitude: float) -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, 64)) * magnitude
    keys = [rng.standard_normal((250, 2, 64)).astype(np.float32) for _ in range(2)]
    values = [rng.standard_normal((250, 2, 64)).astype(np.float32) for _ in range(2)]
    _check(rig, build_case(fmt, q, keys, values, inv_sqrt_d=0.125 / magnitude))


@formats
def test_one_decoder_serves_many_batches(rig: Rig, fmt: CacheFormat) -> None:
    decoder = None
    for lengths in ([2000], [5, 0, 700], [1] * 9, [64, 64, 64, 64], [2000]):
        case = random_case(fmt, lengths, Shape(8, 2, 64, 16))
        decoder = decoder or Decoder(rig.gpu, case.layout, 8, 16)
        first = _decode(rig, case, decoder)
        assert_matches(first[0], case.expected()[0])
        again = _decode(rig, case, decoder)
        np.testing.assert_array_equal(bits(first[0]), bits(again[0]))


def test_too_many_sequences(rig: Rig) -> None:
    case = random_case(BF16, [5, 6], Shape(8, 2, 64, 16))
    decoder = Decoder(rig.gpu, case.layout, 8, 1)
    with pytest.raises(ArgumentValueError, match="num_seqs: got 2"):
        _decode(rig, case, decoder)


def _refused(rig: Rig, case: PagedCase, match: str, **changes: Any) -> None:
    """A call with these arguments changed raises before it runs."""
    decoder = Decoder(rig.gpu, case.layout, case.num_q_heads, 4)
    up = upload_case(rig, case)
    arguments: dict[str, Any] = {
        "q": rig.upload(case.q),
        "k_cache": up.k.array,
        "v_cache": up.v.array,
        "block_tables": up.tables,
        "seq_lens": up.lengths,
        "output": rig.full_bf16(case.q.shape),
        "num_seqs": case.num_seqs,
        "max_blocks_per_seq": case.max_blocks_per_seq,
        "stream": rig.stream,
    }
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match=match):
        decoder.decode(**{**arguments, **changes})


def test_shapes_that_do_not_belong_together(rig: Rig) -> None:
    case = random_case(BF16, [40, 60], Shape(8, 2, 64, 16))
    _refused(rig, case, "max_blocks_per_seq: got 3, but block_tables has 4 columns", max_blocks_per_seq=3)
    blocks = case.num_blocks
    heads_first = rig.gpu.zeros((blocks, 2, 16, 64), np.uint16)
    _refused(rig, case, r"v_cache: got shape .*allowed is \[n, 16, 2, 64\]", v_cache=heads_first)
    _refused(rig, case, r"q: got shape \(2, 64, 8\)", q=rig.gpu.zeros((2, 64, 8), np.uint16))
    _refused(rig, case, r"lse: got shape \(8, 2\)", lse=rig.gpu.zeros((8, 2), np.float32))
    _refused(rig, case, "num_seqs", num_seqs="2")


def test_scales_are_given_where_the_format_has_them(rig: Rig) -> None:
    fp8, bf16 = (random_case(fmt, [5], Shape(8, 2, 64, 16)) for fmt in (FP8, BF16))
    _refused(rig, fp8, "k_scale: got None; an fp8 cache needs it or k_scales")
    _refused(rig, fp8, "v_scale: got None; an fp8 cache needs it or v_scales", k_scale=1.0)
    _refused(rig, bf16, "v_scale: got 1.0; a bf16 cache has none", v_scale=1.0)


@formats
@pytest.mark.parametrize("block_size", [1, 15])
def test_rows_that_bulk_copies_cannot_fetch(rig: Rig, fmt: CacheFormat, block_size: int) -> None:
    """NVFP4 has 12 bytes of scales for a token of 3 heads: lanes copy them."""
    heads = 4 if fmt == NVFP4 and block_size == 1 else 3
    _check(rig, random_case(fmt, LENGTHS, Shape(heads, heads, 64, block_size)))


def test_a_decoder_of_something_else(rig: Rig) -> None:
    layout = random_case(BF16, [5], Shape(8, 2, 64, 16)).layout
    with pytest.raises(ArgumentTypeError, match="layout: got 'fp8'"):
        Decoder(rig.gpu, "fp8", 8, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="max_seqs"):
        Decoder(rig.gpu, layout, 8, 4.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="max_seqs: got 1048577, allowed is 1 to 1048576"):
        Decoder(rig.gpu, layout, 8, 2**20 + 1)
    Decoder(rig.gpu, layout, np.int64(8), np.int32(4))  # type: ignore[arg-type]


def test_a_bad_softmax_scale_is_named_as_the_caller_knows_it(rig: Rig) -> None:
    case = random_case(BF16, [5], Shape(8, 2, 64, 16))
    _refused(rig, case, "softmax_scale", softmax_scale=float("nan"))


def test_a_pool_without_a_block_is_refused(rig: Rig) -> None:
    case = random_case(BF16, [5], Shape(8, 2, 64, 16))
    _refused(rig, case, "num_blocks: got 0", num_blocks=0)
    _refused(rig, case, "num_blocks: got 0", v_cache=rig.gpu.zeros(100, np.uint16))


def test_every_level_must_fit_the_emulator() -> None:
    """Small batches may have more warps a block than large ones: refused when the decoder is made."""
    gpu = EmulatorBackend(num_sms=70)
    keys, values = (CacheLayout(fmt, 2, 192, 1) for fmt in (FP8, NVFP4))
    with pytest.raises(ArgumentValueError, match=r"num_q_heads, num_kv_heads: got 2, 2, .*resident together"):
        Decoder(gpu, keys, 2, 3, value_layout=values)
