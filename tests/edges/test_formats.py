"""What the bytes of a cache stand for, read by every path."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from tests.oracle import E2M1_TABLE, E4M3_TABLE, assert_matches
from tests.paths import PATHS, Decoded, decoder_of, run, run_uploaded
from tests.poison import Options, PagedCase, Shape, build_case, decode_pool, random_case
from tests.rig import Rig, bits, upload_case

edge = pytest.mark.edge
quantised = pytest.mark.parametrize("path", PATHS)
ALL_E2M1 = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), 16)
WITH_LSE = tuple(p for p in PATHS if p != "single")


def lse_of(found: Decoded) -> npt.NDArray[np.float64]:
    """Natural logarithm of the sum of exponentials, from whatever the path shows."""
    if found.lse is not None:
        return found.lse.astype(np.float64)
    assert found.workspace is not None
    m, total = found.workspace[..., -2].astype(np.float64), found.workspace[..., -1].astype(np.float64)
    largest = m.max(axis=-1)
    return np.asarray(largest + np.log((np.exp(m - largest[..., None]) * total).sum(axis=-1)))


@edge("fp8-scales")
@quantised
def test_fp8_scales_belong_to_their_own_pool(rig: Rig, path: str) -> None:
    keys, values = [np.full((9, 2, 64), 2.0, np.float32)], [np.full((9, 2, 64), 3.0, np.float32)]
    options = Options(k_scale=0.5, v_scale=2.0)
    case = build_case(FP8, np.ones((1, 4, 64)), keys, values, inv_sqrt_d=2.0**-7, options=options)
    slot = int(case.block_tables[0, 0])
    assert (case.k_pool[slot, 0, 0, 0], case.v_pool[slot, 0, 0, 0]) == (0x48, 0x3C)
    found = run(rig, case, path)
    assert_matches(found.out, np.full((1, 4, 64), 3.0))
    if path in WITH_LSE:
        np.testing.assert_allclose(lse_of(found), 1.0 + np.log(9.0), rtol=1e-5)


def with_pool_bytes(case: PagedCase, row: npt.NDArray[np.uint8], scales: Any = None) -> PagedCase:
    """The first token of each sequence replaced in both pools: data of every head, NVFP4 scales."""
    layout = case.layout
    for pool in (case.k_pool, case.v_pool):
        flat = pool.reshape(case.num_blocks, -1).view(np.uint8)
        for seq in range(case.num_seqs):
            block = flat[int(case.block_tables[seq, 0])]
            data = row[seq] if row.ndim == 2 else row
            block[: data.size * layout.num_kv_heads] = np.tile(data, layout.num_kv_heads)
            if scales is not None:
                at = layout.data_section_bytes
                own = np.asarray(scales[seq], np.uint8)
                block[at : at + own.size * layout.num_kv_heads] = np.tile(own, layout.num_kv_heads)
    return case


def first_tokens(case: PagedCase) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the oracle reads as K and V of each sequence's first token, ``[num_seqs, heads, head_dim]``."""
    pools = (decode_pool(pool, case.layout) for pool in (case.k_pool, case.v_pool))
    k, v = (pool[case.block_tables[:, 0], 0] for pool in pools)
    return k, v


@edge("all-codes")
@quantised
def test_all_e4m3_codes(rig: Rig, path: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    case = build_case(FP8, np.zeros((1, 1, 256)), *[[np.zeros((1, 1, 256), np.float32)]] * 2)
    with_pool_bytes(case, codes)
    case.k_pool.view(np.uint8)[int(case.block_tables[0, 0]), 0] = 0  # NaN keys would hide the values
    with np.errstate(invalid="ignore"):
        expected = np.array(E4M3_TABLE).astype(ml_dtypes.bfloat16)
    found = run(rig, case, path).out[0, 0]
    nan = np.isnan(np.array(E4M3_TABLE))
    assert nan.sum() == 2
    assert np.isnan(found.astype(np.float32)[nan]).all()
    np.testing.assert_array_equal(found[~nan].astype(np.float32), expected[~nan].astype(np.float32))


def one_hot_queries(dims: int) -> npt.NDArray[np.float64]:
    """q ``[dims / 16, 16, dims]``: sequence s, head h asks for lane 16 s + h."""
    return np.eye(dims).reshape(dims // 16, 16, dims)


@edge("all-codes")
@pytest.mark.parametrize("path", WITH_LSE)
@pytest.mark.parametrize("fmt", [FP8, NVFP4], ids=lambda f: f.name)
def test_all_codes_as_keys(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """With one key and one lane of q at 1, the LSE is the key's value in that lane."""
    zeros = [np.zeros((1, 1, 256), np.float32) for _ in range(16)]
    case = build_case(fmt, one_hot_queries(256), zeros, zeros, inv_sqrt_d=1.0)
    if fmt == FP8:
        codes = np.arange(256, dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        with_pool_bytes(case, codes)
    else:
        with_pool_bytes(case, ALL_E2M1, np.full((16, 16), 0x38))
    keys, _ = first_tokens(case)
    expected = np.einsum("shd,sd->sh", one_hot_queries(256), keys[:, 0])
    np.testing.assert_allclose(lse_of(run(rig, case, path)), expected, rtol=1e-6, atol=1e-6)


@edge("all-codes")
@quantised
def test_all_e2m1_codes_with_all_scales(rig: Rig, path: str) -> None:
    zeros = [np.zeros((1, 1, 256), np.float32) for _ in range(16)]
    case = build_case(NVFP4, np.zeros((16, 1, 256)), zeros, zeros)
    scales = np.arange(256, dtype=np.uint8).reshape(16, 16)
    with_pool_bytes(case, ALL_E2M1, scales)
    flat = case.k_pool.reshape(case.num_blocks, -1)
    flat[case.block_tables[:, 0], case.layout.data_section_bytes :] = 0
    expected = (E2M1_TABLE[None, None, :] * np.array(E4M3_TABLE)[scales][..., None]).reshape(16, 256)
    found = run(rig, case, path).out[:, 0].astype(np.float64)
    nan = np.isnan(expected)
    assert np.isnan(found[nan]).all()
    rounded = expected[~nan].astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(found[~nan], rounded)


def case_of_values(fmt: CacheFormat, row: npt.NDArray[Any], block_size: int = 16, n: int = 1) -> PagedCase:
    """n tokens of zero keys and these values, in both heads."""
    keys = [np.zeros((n, 2, 64), np.float32)]
    values = [np.broadcast_to(np.asarray(row, np.float32), (n, 2, 64)).copy()]
    return build_case(fmt, np.zeros((1, 4, 64)), keys, values, block_size=block_size)


@edge("nvfp4-nan-group")
@quantised
def test_a_nan_spoils_its_group_alone(rig: Rig, path: str) -> None:
    row = np.full(64, 1.5, np.float32)
    row[20] = np.nan
    case = case_of_values(NVFP4, row, n=3)
    found = run(rig, case, path).out.astype(np.float32)
    assert np.isnan(found[..., 16:32]).all()
    assert (found[..., :16] == 1.5).all()
    assert (found[..., 32:] == 1.5).all()


@edge("nvfp4-zeros")
@edge("nvfp4-amax-3000")
@edge("nvfp4-tiny-scale")
@quantised
def test_extreme_groups(rig: Rig, path: str) -> None:
    row = np.zeros(64, np.float32)
    row[16:32] = 3000.0
    row[32:48] = 6 * 2.0**-10  # its scale ties to zero
    row[48:64] = 6 * 2.0**-9
    found = run(rig, case_of_values(NVFP4, row), path).out.astype(np.float64)
    groups = found.reshape(1, 4, 4, 16)
    for group, value in enumerate((0.0, 6 * 448.0, 0.0, 6 * 2.0**-9)):
        assert (groups[:, :, group] == value).all(), group


@edge("nvfp4-division")
@edge("fp8-division")
@quantised
def test_rounding_is_that_of_a_division(rig: Rig, path: str) -> None:
    row = np.zeros(64, np.float32)
    row[:2] = 5.625, 1.171875
    found = run(rig, case_of_values(NVFP4, row), path).out.astype(np.float64)
    assert (found[..., 1] == 0.9375).all()  # code 2, 1.0, times the scale; code 3 would read 1.40625


@edge("nvfp4-group-scales")
@quantised
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_every_group_has_its_own_scale(rig: Rig, path: str, block_size: int) -> None:
    tokens = np.arange(37)[:, None, None]
    heads, groups = np.arange(4)[None, :, None], np.arange(4)[None, None, :]
    keys = (1.5 * 2.0 ** ((3 * tokens + heads + groups) % 8)).repeat(16, axis=2).astype(np.float32)
    values = (1.5 * 2.0 ** ((tokens + 5 * heads + 3 * groups) % 8)).repeat(16, axis=2).astype(np.float32)
    lengths = (1, 5, 16, 37)
    q = np.zeros((4, 4, 64))
    case = build_case(
        NVFP4, q, [keys[:n] for n in lengths], [values[:n] for n in lengths], block_size=block_size
    )
    expected = np.stack([values[:n].mean(axis=0) for n in lengths])
    assert_matches(run(rig, case, path).out, expected)
    np.testing.assert_array_equal(case.k_dense[3], keys)
    if path in WITH_LSE:
        lanes = np.zeros((1, 4, 64))
        lanes[0, np.arange(4), [0, 17, 33, 63]] = 2.0**-5
        one = build_case(NVFP4, lanes, [keys[2:3]], [values[2:3]], block_size=block_size, inv_sqrt_d=1.0)
        wanted = 2.0**-5 * keys[2, np.arange(4), [0, 17, 33, 63]]
        np.testing.assert_allclose(lse_of(run(rig, one, path))[0], wanted, rtol=1e-5)


@edge("fp8-bad-scale")
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-50, 1e300, np.float64(1e-50)])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@quantised
def test_scales_that_are_refused(rig: Rig, path: str, name: str, bad: Any) -> None:
    up = upload_case(rig, random_case(FP8, [5]))
    with pytest.raises(ArgumentValueError, match=f"{name}: got"):
        run_uploaded(up, path, **{name: bad})


@edge("scale-types")
@quantised
def test_scales_in_every_type_are_the_same(rig: Rig, path: str) -> None:
    up = upload_case(rig, random_case(FP8, [70, 3]))
    first = None
    for kind in (float, np.float32, np.float64, np.array):
        out = bits(run_uploaded(up, path, k_scale=kind(0.375), v_scale=kind(0.0625)).out)
        first = out if first is None else first
        np.testing.assert_array_equal(out, first)
    unit = run_uploaded(up, path, k_scale=1.0, v_scale=1.0)
    assert (bits(unit.out) != first).any(), "the scales have an effect"


@edge("query-dtype")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8], ids=lambda d: np.dtype(d).name)
def test_queries_of_another_dtype(rig: Rig, path: str, dtype: Any) -> None:
    if path.startswith("tiled"):
        pytest.skip("tests/test_ops_errors.py refuses them")
    up = upload_case(rig, random_case(BF16, [5]))
    q = rig.gpu.asarray(np.ones(up.case.q.shape, dtype))
    with pytest.raises(ArgumentTypeError, match=rf"q: got dtype {np.dtype(dtype).name}.*bfloat16"):
        run_uploaded(up, path, q=q)


@edge("index-dtypes")
@pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32"])
@pytest.mark.parametrize("path", [p for p in PATHS if not p.startswith("tiled")])
def test_tables_and_lengths_of_another_dtype(rig: Rig, path: str, name: str, dtype: str) -> None:
    up = upload_case(rig, random_case(BF16, [5, 40]))
    array = {"block_tables": up.case.block_tables, "seq_lens": up.case.seq_lens}[name]
    with pytest.raises(ArgumentTypeError, match=f"{name}: got dtype {dtype}"):
        run_uploaded(up, path, **{name: rig.gpu.asarray(np.abs(array).astype(dtype))})


@edge("head-dim-odd")
@edge("head-dim-family")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", [7, 8, 46, 48, 72, 80, 96, 100, 112])
def test_head_dims_of_a_decoder(rig: Rig, fmt: CacheFormat, head_dim: int) -> None:
    """Refused with a message, or right: never a fault."""
    try:
        layout = CacheLayout(fmt, 2, head_dim, 16)
        Decoder(rig.gpu, layout, 4, 4)
    except ArgumentValueError as error:
        assert f"{head_dim}" in str(error)  # noqa: PT017
        assert "head_dim" in str(error)  # noqa: PT017
        return
    case = random_case(fmt, [70, 3], Shape(4, 2, head_dim, 16))
    assert_matches(run(rig, case, "decoder").out, case.expected()[0])


@edge("head-dim-family")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("path", PATHS)
def test_a_pool_that_starts_two_bytes_in(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """Refused before the launch, and the device works on."""
    up = upload_case(rig, random_case(fmt, [40, 3]))
    for name in ("k_cache", "v_cache"):
        with pytest.raises(ArgumentValueError, match="multiple of 16"):
            run_uploaded(up, path, **{name: rig.gpu.pointer(getattr(up, name[0]).array) + 2})
    assert_matches(run_uploaded(up, path).out, up.case.expected()[0])


@edge("query-dtype")
def test_decoders_take_bf16_queries_as_bits_or_typed(rig: Rig) -> None:
    case = random_case(BF16, [40, 3])
    first = run(rig, case, "decoder").out
    typed = dataclasses.replace(case, q=case.q.copy())
    np.testing.assert_array_equal(bits(run(rig, typed, "decoder").out), bits(first))
    assert decoder_of(rig, case) is decoder_of(rig, typed)


@edge("fixture-h")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_query_reaches_its_head_alone(rig: Rig, path: str, fmt: CacheFormat, bad: float) -> None:
    case = random_case(fmt, [40, 300], Shape(8, 2, 64, 16))
    q = case.q.copy()
    q[1, 2, 7] = bad
    found = run(rig, dataclasses.replace(case, q=q), path).out
    assert np.isnan(found[1, 2].astype(np.float32)).all()
    expected = case.expected()[0]
    expected[1, 2] = np.nan
    assert_matches(found, expected)
