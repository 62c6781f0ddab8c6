"""NVFP4: E2M1 values, two a byte, with one E4M3 scale for each group of 16 along head_dim."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats.bf16 import as_float32
from cupaged.formats.fp8 import decode_e4m3, encode_e4m3

E2M1_MAX = 6.0
NVFP4_GROUP = 16

_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)


def encode_e2m1(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """E2M1 codes 0 to 15 of values of any shape, one a byte.

    Rounds to nearest even and saturates at +-6, infinities too; the sign survives, that of zero too.

    Raises:
        ArgumentTypeError: a dtype that is not allowed, see `as_float32`.
        ArgumentValueError: a NaN, for which E2M1 has no code.
    """
    wide = as_float32("values", values)
    if np.isnan(wide).any():
        raise ArgumentValueError("values: got a NaN, for which E2M1 has no code; allowed are numbers")
    bounded: npt.NDArray[np.float32] = np.clip(wide, -E2M1_MAX, E2M1_MAX)
    return bounded.astype(_E2M1).view(np.uint8)


def decode_e2m1(codes: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Float32 values of E2M1 codes 0 to 15, one a byte (uint8), of any shape; exact.

    Raises:
        ArgumentTypeError: not uint8.
        ArgumentValueError: a code above 15.
    """
    array = _as_uint8("codes", codes)
    if array.size and int(array.max()) > 15:
        raise ArgumentValueError(f"codes: got {int(array.max())}, allowed are 0 to 15")
    values: npt.NDArray[np.float32] = array.view(_E2M1).astype(np.float32)
    return values


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes ``[..., n]`` below 16 to bytes ``[..., n / 2]``, the first of a pair in the low nibble."""
    packed: npt.NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes ``[..., n / 2]`` to codes ``[..., n]``; the inverse of `pack_nibbles`."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & np.uint8(0x0F)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def quantize_nvfp4(values: npt.ArrayLike) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Quantise groups of 16 along the last axis.

    A group's scale is E4M3(absmax / 6), its elements are E2M1(x / decoded scale), both true float32
    divisions. The scale saturates at 448 (0x7E). Where it decodes to 0 all codes are 0. A NaN in a
    group gives scale 0x7F and codes 0, so that the whole group reads NaN.

    Args:
        values: ``[..., head_dim]``, head_dim a multiple of 16; see `as_float32` for dtypes.

    Returns:
        Packed codes uint8 ``[..., head_dim / 2]`` and E4M3 scales uint8 ``[..., head_dim / 16]``.

    Raises:
        ArgumentTypeError: a dtype that is not allowed.
        ArgumentValueError: head_dim is not a positive multiple of 16.
    """
    wide = as_float32("values", values)
    head_dim = wide.shape[-1] if wide.ndim else 0
    if head_dim == 0 or head_dim % NVFP4_GROUP:
        raise ArgumentValueError(f"head_dim: got {head_dim}, allowed for nvfp4 are positive multiples of 16")
    groups = wide.reshape(*wide.shape[:-1], head_dim // NVFP4_GROUP, NVFP4_GROUP)
    absmax = np.abs(groups).max(axis=-1)  # [..., head_dim / 16]; a NaN anywhere in the group wins
    with np.errstate(under="ignore", invalid="ignore"):
        # abs once more: a reduction may hand back a NaN of either sign, and the scale's is positive
        scales = encode_e4m3(np.abs(absmax / np.float32(E2M1_MAX)))
    divisors = decode_e4m3(scales)[..., None]
    live = divisors > 0  # false for scale 0 and for a NaN scale
    with np.errstate(under="ignore", over="ignore"):
        elements = np.where(live, groups, np.float32(0)) / np.where(live, divisors, np.float32(1))
    return pack_nibbles(encode_e2m1(elements).reshape(wide.shape)), scales


def dequantize_nvfp4(packed: npt.ArrayLike, scales: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Float32 values ``[..., head_dim]`` of `quantize_nvfp4`'s two arrays; exact.

    Args:
        packed: uint8 ``[..., head_dim / 2]``.
        scales: E4M3 codes, uint8 ``[..., head_dim / 16]``.

    Raises:
        ArgumentTypeError: not uint8.
        ArgumentValueError: the two shapes do not belong together.
    """
    codes = unpack_nibbles(_as_uint8("packed", packed))
    scale_bytes = _as_uint8("scales", scales)
    expected = (*codes.shape[:-1], codes.shape[-1] // NVFP4_GROUP)
    if codes.shape[-1] % NVFP4_GROUP or scale_bytes.shape != expected:
        raise ArgumentValueError(
            f"scales: got shape {scale_bytes.shape}, allowed for {codes.shape[-1]} values a row, which must "
            f"be a multiple of 16, is {expected}"
        )
    groups = decode_e2m1(codes).reshape(*expected, NVFP4_GROUP)
    return (groups * decode_e4m3(scale_bytes)[..., None]).reshape(codes.shape)


def _as_uint8(name: str, array: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    result = np.asarray(array)
    if result.dtype != np.uint8:
        raise ArgumentTypeError(f"{name}: got dtype {result.dtype}, allowed is uint8")
    return result
