"""The writers against the host packers, byte for byte."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import ops
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout, write_tokens
from tests.poison import Guarded, with_gaps
from tests.rig import Rig, launch_arguments

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
POOL_FILL = 0x5A


def _write(
    rig: Rig,
    layout: CacheLayout,
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    slots: npt.NDArray[np.int64],
    *,
    num_blocks: int,
    stride: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Bytes of both pools after the device's write; guards are checked."""
    row = layout.num_kv_heads * layout.head_dim
    stride = row if stride is None else stride
    pools = []
    for _ in range(2):
        guarded = Guarded.allocate(layout.pool_shape(num_blocks), layout.pool_dtype)
        guarded.array.view(np.uint8)[...] = POOL_FILL
        pools.append(rig.upload_guarded(guarded))
    name = f"reshape_and_cache_{layout.format.name}"
    own = launch_arguments(name, layout, scales)
    getattr(ops, name)(
        rig.gpu,
        rig.kernel(name),
        rig.upload(with_gaps(key, stride)),
        rig.upload(with_gaps(value, stride)),
        pools[0].array,
        pools[1].array,
        rig.upload(slots),
        len(key),
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        *own.scales,
        stride,
        stride,
        *own.strides,
        rig.stream,
        num_blocks=num_blocks,
    )
    for pool in pools:
        rig.assert_guards_intact(pool)
    found = [rig.download(pool.array).reshape(-1).view(np.uint8) for pool in pools]
    return found[0], found[1]


def _expect(
    layout: CacheLayout, tokens: npt.NDArray[Any], slots: npt.NDArray[np.int64], num_blocks: int, scale: float
) -> npt.NDArray[np.uint8]:
    pool = np.full(layout.pool_shape(num_blocks), 0, layout.pool_dtype)
    pool.view(np.uint8)[...] = POOL_FILL
    write_tokens(pool, layout, tokens, slots, scale=scale)
    return pool.reshape(-1).view(np.uint8)


def _check(
    rig: Rig,
    layout: CacheLayout,
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    slots: npt.NDArray[np.int64],
    **options: Any,
) -> None:
    scales = options.get("scales", (1.0, 1.0))
    found = _write(rig, layout, key, value, slots, **options)
    for pool, tokens, scale in zip(found, (key, value), scales, strict=True):
        expected = _expect(layout, tokens, slots, options["num_blocks"], scale)
        np.testing.assert_array_equal(pool, expected)


def _every_bf16(head_dim: int, num_kv_heads: int, seed: int) -> npt.NDArray[Any]:
    """All 65,536 BF16 patterns in random order, as tokens."""
    patterns = np.random.default_rng(seed).permutation(np.arange(65536, dtype=np.uint16))
    return patterns.view(ml_dtypes.bfloat16).reshape(-1, num_kv_heads, head_dim)


@formats
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_bf16_pattern(rig: Rig, fmt: CacheFormat, head_dim: int) -> None:
    num_kv_heads = 2
    usable = 65536 // (num_kv_heads * head_dim) * num_kv_heads * head_dim
    key = _every_bf16(256, 1, 1).reshape(-1)[:usable].reshape(-1, num_kv_heads, head_dim)
    value = _every_bf16(256, 1, 2).reshape(-1)[:usable].reshape(-1, num_kv_heads, head_dim)
    layout = CacheLayout(fmt, num_kv_heads, head_dim, 16)
    num_blocks = len(key) // 16 + 1
    slots = np.random.default_rng(3).permutation(num_blocks * 16)[: len(key)].astype(np.int64)
    scales = (0.3, 0.84210527) if fmt.needs_scale else (1.0, 1.0)
    _check(rig, layout, key, value, slots, num_blocks=num_blocks, scales=scales)


@formats
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_shapes(rig: Rig, fmt: CacheFormat, block_size: int, num_kv_heads: int) -> None:
    rng = np.random.default_rng(4)
    key, value = (rng.standard_normal((21, num_kv_heads, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    layout = CacheLayout(fmt, num_kv_heads, 64, block_size)
    num_blocks = 2 + 40 // block_size
    slots = rng.permutation(num_blocks * block_size)[:21].astype(np.int64)
    _check(rig, layout, key, value, slots, num_blocks=num_blocks)


@formats
def test_magnitudes_of_every_scale(rig: Rig, fmt: CacheFormat) -> None:
    """Groups whose largest values run over the exponents, so that every group scale is met."""
    rng = np.random.default_rng(5)
    wide = rng.standard_normal((64, 2, 64)) * np.exp2(rng.integers(-30, 14, (64, 2, 4)).repeat(16, axis=2))
    key, value = wide[:32].astype(ml_dtypes.bfloat16), wide[32:].astype(ml_dtypes.bfloat16)
    layout = CacheLayout(fmt, 2, 64, 16)
    _check(rig, layout, key, value, np.arange(32, dtype=np.int64), num_blocks=2)


@formats
def test_slots_that_must_not_be_written(rig: Rig, fmt: CacheFormat) -> None:
    rng = np.random.default_rng(6)
    key, value = (rng.standard_normal((8, 2, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    layout = CacheLayout(fmt, 2, 64, 16)
    slots = np.array([0, -1, 17, -(2**40), 3 * 16, 2**33, 99 * 16, 2**62], np.int64)
    _check(rig, layout, key, value, slots, num_blocks=3)


@formats
def test_padded_sources_and_pools(rig: Rig, fmt: CacheFormat) -> None:
    rng = np.random.default_rng(7)
    key, value = (rng.standard_normal((10, 2, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    layout = CacheLayout(
        fmt,
        2,
        64,
        16,
        block_stride_override=None if fmt == BF16 else 16 * 2 * 64 + 512,
        data_section_override=16 * 2 * 32 + 64 if fmt == NVFP4 else None,
    )
    slots = rng.permutation(48)[:10].astype(np.int64)
    _check(rig, layout, key, value, slots, num_blocks=3, stride=5 * 64 + 64)


def _one_group(rig: Rig, fmt: CacheFormat, group: list[float], scale: float = 1.0) -> npt.NDArray[np.uint8]:
    """Bytes of a slot whose first 16 values are the group."""
    tokens = np.zeros((1, 1, 64), np.float32)
    tokens[0, 0, : len(group)] = group
    layout = CacheLayout(fmt, 1, 64, 1)
    bf16 = tokens.astype(ml_dtypes.bfloat16)
    slots = np.zeros(1, np.int64)
    return _write(rig, layout, bf16, bf16, slots, num_blocks=1, scales=(scale, scale))[0]


def test_e4m3_saturates(rig: Rig) -> None:
    # BF16 has no 465: 466 is the next value above 464.
    got = _one_group(rig, FP8, [448, 464, 466, 1000, -1000, np.inf, np.nan, -np.inf])
    assert got[:8].tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F, 0xFE]


def test_e4m3_divides(rig: Rig) -> None:
    assert _one_group(rig, FP8, [1.0], scale=0.84210527)[0] == 0x3A
    assert _one_group(rig, FP8, [0.00439453125], scale=0.3)[0] == 0x07


def test_nvfp4_groups(rig: Rig) -> None:
    scales = slice(32, 36)
    got = _one_group(rig, NVFP4, [5.625, 1.171875])
    assert got[0] >> 4 == 2, "a division; a reciprocal gives 3"
    got = _one_group(rig, NVFP4, [1.0, np.nan, 3.0])
    assert got[scales][0] == 0x7F
    assert not got[:8].any()
    got = _one_group(rig, NVFP4, [3000.0, -3000.0])
    assert got[scales][0] == 0x7E
    assert got[0] == 0xF7
    got = _one_group(rig, NVFP4, [6 * 2.0**-10])
    assert got[scales][0] == 0
    assert not got[:8].any()
    got = _one_group(rig, NVFP4, [6 * 2.0**-9])
    assert got[scales][0] == 0x01
    assert got[0] == 7
    got = _one_group(rig, NVFP4, [0.0] * 16)
    assert not got[:8].any()
    assert got[scales][0] == 0


@formats
def test_no_tokens(rig: Rig, fmt: CacheFormat) -> None:
    empty = np.zeros((0, 2, 64), ml_dtypes.bfloat16)
    layout = CacheLayout(fmt, 2, 64, 16)
    found = _write(rig, layout, empty, empty, np.zeros(0, np.int64), num_blocks=1)
    assert all((pool == POOL_FILL).all() for pool in found)
