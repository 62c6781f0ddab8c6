"""Encoding and decoding: every code, every tie of the edge-case table, and properties."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import (
    checked_scale,
    decode_bf16,
    decode_e2m1,
    decode_e4m3,
    dequantize_nvfp4,
    encode_bf16,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    quantize_nvfp4,
    unpack_nibbles,
)
from tests.host.slow_formats import slow_e2m1, slow_e4m3, slow_nvfp4_group
from tests.oracle import E2M1_TABLE, E4M3_TABLE, decode_bf16_float64

ALL_CODES = np.arange(256, dtype=np.uint8)
floats32 = st.floats(width=32, allow_nan=False)
# Values around what the formats hold: most of the float32 range only saturates or rounds to zero.
near = st.floats(min_value=-600, max_value=600, width=32)
groups = hnp.arrays(np.float32, 16, elements=st.one_of(near, st.floats(width=32)))


def float32(*values: float) -> Any:
    return np.array(values, np.float32)


class TestE4M3:
    def test_all_codes_decode_as_the_table_and_ml_dtypes(self) -> None:
        decoded = decode_e4m3(ALL_CODES)
        np.testing.assert_array_equal(decoded, E4M3_TABLE)
        np.testing.assert_array_equal(decoded, ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
        np.testing.assert_array_equal(np.signbit(decoded), ALL_CODES >= 128)

    def test_float8_arrays_decode_too(self) -> None:
        np.testing.assert_array_equal(decode_e4m3(ALL_CODES.view(ml_dtypes.float8_e4m3fn)), E4M3_TABLE)

    def test_every_code_survives_a_round_trip(self) -> None:
        np.testing.assert_array_equal(encode_e4m3(decode_e4m3(ALL_CODES)), ALL_CODES)

    def test_every_midpoint_goes_to_the_even_code(self) -> None:
        magnitudes = E4M3_TABLE[:127]
        middles = ((magnitudes[:-1] + magnitudes[1:]) / 2).astype(np.float32)
        even = np.arange(126) + np.arange(126) % 2
        np.testing.assert_array_equal(encode_e4m3(middles), even)
        np.testing.assert_array_equal(encode_e4m3(np.nextafter(middles, np.float32(0))), np.arange(126))
        np.testing.assert_array_equal(encode_e4m3(np.nextafter(middles, np.float32(999))), np.arange(1, 127))

    def test_saturates_and_keeps_nan(self) -> None:
        values = float32(448, 464, 465, 1000, -1000, math.inf, -math.inf, math.nan)
        assert encode_e4m3(values).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F]

    @pytest.mark.parametrize("scale", [1.0, 0.3, 3e38])
    def test_nan_keeps_its_sign(self, scale: float) -> None:
        bits = np.array([0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFF80_0001], np.uint32)
        assert encode_e4m3(bits.view(np.float32), scale).tolist() == [0x7F, 0xFF, 0x7F, 0xFF]

    def test_quotient_overflow_saturates(self) -> None:
        assert encode_e4m3(float32(3e38, -3e38), 1e-30).tolist() == [0x7E, 0xFE]

    def test_scale_divides(self) -> None:
        assert encode_e4m3(float32(2.0), 0.5).tolist() == [0x48]
        assert encode_e4m3(float32(3.0), 2.0).tolist() == [0x3C]
        assert decode_e4m3(np.array([0x3C], np.uint8), 2.0).tolist() == [3.0]

    @pytest.mark.parametrize(
        ("value", "scale", "code"), [(1.0, 0.84210527, 0x3A), (0.00439453125, 0.3, 0x07)]
    )
    def test_quotient_is_rounded_to_float32_first(self, value: float, scale: float, code: int) -> None:
        assert encode_e4m3(float32(value), scale).tolist() == [code]

    def test_keeps_signed_zero_and_shape(self) -> None:
        assert encode_e4m3(np.array([[0.0, -0.0]], ml_dtypes.bfloat16)).tolist() == [[0x00, 0x80]]
        assert encode_e4m3(np.zeros((0, 4), np.float32)).shape == (0, 4)

    def test_rejects_other_dtypes(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^values: got dtype int32.*bfloat16"):
            encode_e4m3(np.zeros(3, np.int32))
        with pytest.raises(ArgumentTypeError, match=r"^codes: got dtype int8"):
            decode_e4m3(np.zeros(3, np.int8))

    @given(
        hnp.arrays(np.float32, 32, elements=st.one_of(near, st.floats(width=32))),
        st.floats(min_value=2.0**-140, max_value=2.0**99, width=32),
    )
    def test_equals_the_slow_encoder(self, values: Any, scale: float) -> None:
        assert encode_e4m3(values, scale).tolist() == [slow_e4m3(float(x), scale) for x in values]

    @given(floats32, floats32, st.floats(min_value=2.0**-20, max_value=1e6, width=32))
    def test_is_monotonic(self, a: float, b: float, scale: float) -> None:
        low, high = decode_e4m3(encode_e4m3(float32(min(a, b), max(a, b)), scale))
        assert low <= high


class TestE2M1:
    def test_all_codes_decode_as_the_table_and_ml_dtypes(self) -> None:
        codes = ALL_CODES[:16]
        decoded = decode_e2m1(codes)
        np.testing.assert_array_equal(decoded, E2M1_TABLE)
        np.testing.assert_array_equal(decoded, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        np.testing.assert_array_equal(np.signbit(decoded), codes >= 8)
        np.testing.assert_array_equal(encode_e2m1(decoded), codes)

    def test_ties_saturation_and_signed_zero(self) -> None:
        values = float32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, math.inf, -math.inf, -0.0, -0.1)
        assert encode_e2m1(values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 15, 8, 8]

    def test_has_no_code_for_nan(self) -> None:
        with pytest.raises(ArgumentValueError, match="NaN"):
            encode_e2m1(float32(1.0, math.nan))

    def test_rejects_codes_above_15_and_other_dtypes(self) -> None:
        with pytest.raises(ArgumentValueError, match="codes: got 16"):
            decode_e2m1(np.array([3, 16], np.uint8))
        with pytest.raises(ArgumentTypeError, match=r"^codes: got dtype int64"):
            decode_e2m1(np.array([3]))

    @given(st.one_of(near, floats32, st.floats(min_value=-7, max_value=7, width=32)))
    def test_equals_the_slow_encoder(self, value: float) -> None:
        assert encode_e2m1(float32(value)).tolist() == [slow_e2m1(value)]

    @given(floats32, floats32)
    def test_is_monotonic(self, a: float, b: float) -> None:
        low, high = decode_e2m1(encode_e2m1(float32(min(a, b), max(a, b))))
        assert low <= high

    def test_nibbles_put_the_first_value_low(self) -> None:
        assert pack_nibbles(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
        np.testing.assert_array_equal(pack_nibbles(unpack_nibbles(ALL_CODES)), ALL_CODES)


def padded(*values: float) -> Any:
    """One group that begins with the values given."""
    return float32(*values, *[0.0] * (16 - len(values)))


class TestNvfp4:
    def test_divides_by_the_decoded_scale_instead_of_multiplying_by_its_reciprocal(self) -> None:
        packed, scales = quantize_nvfp4(padded(5.625, 1.171875))
        assert decode_e4m3(scales).tolist() == [0.9375]
        assert packed[0] == 0x27  # 6 * 0.9375 low, code 2 high

    def test_scale_is_a_division_by_six(self) -> None:
        below_a_tie = np.nextafter(np.float32(6 * 0.59375), np.float32(0))
        assert quantize_nvfp4(padded(below_a_tie))[1].tolist() == [0x31]
        assert encode_e4m3(below_a_tie[None] * np.float32(1 / 6)).tolist() == [0x32]

    def test_nan_marks_the_whole_group(self) -> None:
        for nan in (math.nan, -math.nan):
            packed, scales = quantize_nvfp4(np.concatenate([padded(3.0, nan, math.inf), padded(6.0)]))
            assert scales.tolist() == [0x7F, 0x38]
            assert not packed[:8].any()
            values = dequantize_nvfp4(packed, scales)
            assert np.isnan(values[:16]).all()
            assert values[16:].tolist() == [6.0] + [0.0] * 15

    @pytest.mark.parametrize("zero", [0.0, -0.0])
    def test_zeros(self, zero: float) -> None:
        packed, scales = quantize_nvfp4(np.full(16, zero, np.float32))
        assert not packed.any()
        assert scales.tolist() == [0]
        assert not dequantize_nvfp4(packed, scales).any()

    @pytest.mark.parametrize("amax", [2689.0, 3000.0, 3e38, math.inf])
    def test_scale_saturates(self, amax: float) -> None:
        packed, scales = quantize_nvfp4(padded(amax, -amax))
        assert scales.tolist() == [0x7E]
        assert packed[0] == 0xF7
        assert dequantize_nvfp4(packed, scales)[:2].tolist() == [2688.0, -2688.0]

    def test_smallest_scales(self) -> None:
        packed, scales = quantize_nvfp4(padded(6 * 2.0**-10, -1.0 * 2.0**-10))
        assert (scales.tolist(), packed.tolist()) == ([0], [0] * 8)
        packed, scales = quantize_nvfp4(padded(6 * 2.0**-9))
        assert scales.tolist() == [0x01]
        assert dequantize_nvfp4(packed, scales)[0] == 6 * 2.0**-9

    def test_smallest_float32_gives_zero_without_a_warning(self) -> None:
        with np.errstate(all="raise"):
            packed, scales = quantize_nvfp4(padded(1e-45))
        assert (scales.tolist(), packed.tolist()) == ([0], [0] * 8)

    def test_every_product_of_code_and_scale_is_exact(self) -> None:
        codes = np.arange(16, dtype=np.uint8)
        packed = np.broadcast_to(pack_nibbles(codes), (256, 8)).copy()
        decoded = dequantize_nvfp4(packed, ALL_CODES[:, None])
        np.testing.assert_array_equal(decoded, E4M3_TABLE[:, None] * E2M1_TABLE)
        np.testing.assert_array_equal(decode_bf16_float64(encode_bf16(decoded)), decoded)

    def test_rejects_bad_shapes_and_dtypes(self) -> None:
        for shape in [(2, 24), (2, 0), (8,), ()]:
            with pytest.raises(ArgumentValueError, match="head_dim"):
                quantize_nvfp4(np.zeros(shape, np.float32))
        with pytest.raises(ArgumentValueError, match=r"^scales: got shape"):
            dequantize_nvfp4(np.zeros((2, 8), np.uint8), np.zeros((2, 2), np.uint8))
        with pytest.raises(ArgumentTypeError, match=r"^scales: got dtype float32"):
            dequantize_nvfp4(np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.float32))

    @given(groups)
    def test_equals_the_slow_quantiser(self, group: Any) -> None:
        packed, scales = quantize_nvfp4(group)
        codes, scale = slow_nvfp4_group([float(x) for x in group])
        assert unpack_nibbles(packed).tolist() == codes
        assert scales.tolist() == [scale]

    @given(hnp.arrays(np.float32, (3, 2, 32), elements=near))
    def test_groups_are_independent(self, values: Any) -> None:
        packed, scales = quantize_nvfp4(values)
        assert (packed.shape, scales.shape) == ((3, 2, 16), (3, 2, 2))
        for index in np.ndindex(3, 2, 2):
            begin = 16 * index[2]
            one_packed, one_scale = quantize_nvfp4(values[index[0], index[1], begin : begin + 16])
            np.testing.assert_array_equal(packed[index[:2]][begin // 2 : begin // 2 + 8], one_packed)
            assert scales[index] == one_scale[0]

    @given(st.integers(0x01, 0x7E), hnp.arrays(np.uint8, 15, elements=st.integers(0, 15)))
    def test_representable_groups_come_back_exactly(self, scale: int, codes: Any) -> None:
        group = (E2M1_TABLE[np.append(codes, 7)] * E4M3_TABLE[scale]).astype(np.float32)
        np.testing.assert_array_equal(dequantize_nvfp4(*quantize_nvfp4(group)), group)

    @given(hnp.arrays(np.float32, 16, elements=st.floats(min_value=-2688, max_value=2688, width=32)))
    def test_error_is_bounded_by_the_scale(self, group: Any) -> None:
        packed, scales = quantize_nvfp4(group)
        scale = float(decode_e4m3(scales)[0])
        # Half of the widest gap between codes (4 to 6) is one scale; rounding the scale itself to E4M3
        # may put the largest element up to 6/16 of a scale beyond 6, or 2^-10 * 6 where it is subnormal.
        allowed = scale * 1.0 + 6 * 2.0**-10
        assert np.abs(dequantize_nvfp4(packed, scales) - group).max() <= allowed


class TestBf16:
    def test_all_patterns_round_trip(self) -> None:
        bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
        decoded = decode_bf16(bits)
        np.testing.assert_array_equal(decoded, decode_bf16_float64(bits))
        numbers = ~np.isnan(decoded)
        np.testing.assert_array_equal(encode_bf16(decoded)[numbers], bits[numbers])
        np.testing.assert_array_equal(encode_bf16(bits.view(ml_dtypes.bfloat16)), bits)

    def test_ties_overflow_and_nan(self) -> None:
        bits = np.array(
            [0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x7F7F_FFFF, 0x7F80_0001, 0xFFC0_0000], np.uint32
        )
        expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFC0]
        assert encode_bf16(bits.view(np.float32)).tolist() == expected

    def test_rejects_other_dtypes(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^values: got dtype int16"):
            encode_bf16(np.zeros(2, np.int16))
        with pytest.raises(ArgumentTypeError, match=r"^bits: got dtype float32"):
            decode_bf16(np.zeros(2, np.float32))

    @given(floats32)
    def test_is_a_nearest_value(self, value: float) -> None:
        code = int(encode_bf16(float32(value))[0])
        around = [c for c in (code - 1, code, code + 1) if 0 <= c < 0x1_0000]
        values = decode_bf16_float64(np.array(around, np.uint16))
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.where(np.isfinite(values), np.abs(values - value), np.inf)
        if math.isfinite(float(values[around.index(code)])):
            assert distances[around.index(code)] == distances.min()
        else:
            assert abs(value) >= 2.0**127 * (2 - 2.0**-8)


class TestCheckedScale:
    @pytest.mark.parametrize(
        "value", [0.1, np.float32(0.1), np.float64(0.1), np.array(0.1), np.array(0.1, "f4")]
    )
    def test_kinds_of_number_are_equal(self, value: object) -> None:
        assert checked_scale("k_scale", value) == float(np.float32(0.1))
        expected = encode_e4m3(float32(1.0), 0.1)
        assert expected.tolist() != encode_e4m3(float32(1.0)).tolist()
        np.testing.assert_array_equal(encode_e4m3(float32(1.0), value), expected)

    @pytest.mark.parametrize("value", [3, np.int32(3), ml_dtypes.bfloat16(3), np.float16(3)])
    def test_other_reals(self, value: object) -> None:
        assert checked_scale("k_scale", value) == 3.0

    @pytest.mark.parametrize(
        "value",
        [
            0,
            0.0,
            -0.0,
            -1.0,
            math.nan,
            math.inf,
            -math.inf,
            1e-50,
            1e300,
            pytest.param(10**400, id="10**400"),
            np.array(0.0),
        ],
    )
    def test_values_that_are_no_scale(self, value: object) -> None:
        with pytest.raises(ArgumentValueError, match=r"^k_scale: got .*finite and > 0"):
            checked_scale("k_scale", value)

    @pytest.mark.parametrize(
        "value", [True, np.True_, None, "1", np.str_("1"), 1j, np.complex64(1), np.array([1.0]), [1.0]]
    )
    def test_types_that_are_no_number(self, value: object) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^v_scale: got"):
            checked_scale("v_scale", value)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_random_bit_patterns_equal_the_slow_encoders(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    assert encode_e4m3(values).tolist() == [slow_e4m3(float(x), 1.0) for x in values]
