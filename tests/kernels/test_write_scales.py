"""What the quantising writers divide: every BF16 value by scales of every kind, as the host packs it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import ops
from cupaged.formats import FP8, NVFP4, CacheFormat, CacheLayout, write_tokens
from tests.rig import Rig

HEAD_DIM, TOKENS = 256, 256  # of each KV head, which has all 65,536 patterns
quantised = pytest.mark.parametrize("fmt", [FP8, NVFP4], ids=lambda fmt: fmt.name)

_BOUNDS = (2.0**-60, 2.0**60)  # between them the kernels divide by multiplications
_LARGEST = float(np.finfo(np.float32).max)


def _neighbours(values: npt.ArrayLike) -> list[np.float32]:
    """The values as float32, and the floats next to them."""
    exact = np.asarray(values, np.float32)
    return [*exact, *np.nextafter(exact, np.float32(0)), *np.nextafter(exact, np.float32(np.inf))]


# A few ulp beside few significant bits, quotients come closest to halfway between two floats.
NEAR_TIES = _neighbours([1 + k / 8 for k in range(8)])
TINY = [2.0**-149, 3 * 2.0**-149, 2.0**-126, 1e-30, 1e-21]
EXTREMES = [*_neighbours(_BOUNDS), *TINY, 1e19, 1e30, 2.0**127, _LARGEST]
RANDOM = [*np.exp2(np.random.default_rng(1).uniform(-12, 6, 24))]


def _patterns_in_groups() -> npt.NDArray[np.uint16]:
    """All BF16 patterns; in a group of 16, magnitudes within 2^8 of each other and both signs."""
    rng = np.random.default_rng(2)
    magnitudes = rng.permuted(np.arange(0x8000, dtype=np.uint16).reshape(-1, 1024), axis=1).reshape(-1, 8)
    groups = np.concatenate([magnitudes, magnitudes | np.uint16(0x8000)], axis=1)
    return rng.permuted(groups, axis=1)


def _every_value(num_kv_heads: int) -> npt.NDArray[Any]:
    rows = _patterns_in_groups().reshape(TOKENS, 1, HEAD_DIM)
    return np.repeat(rows, num_kv_heads, axis=1).view(ml_dtypes.bfloat16)


@quantised
@pytest.mark.parametrize("scales", [NEAR_TIES, EXTREMES, RANDOM], ids=["near_ties", "extremes", "random"])
def test_every_value_by_every_scale(rig: Rig, fmt: CacheFormat, scales: list[float]) -> None:
    by_head = np.array(scales, np.float32)
    heads = len(by_head)
    layout = CacheLayout(fmt, heads, HEAD_DIM, 16)
    tokens, slots = _every_value(heads), np.arange(TOKENS, dtype=np.int64)
    expected = np.zeros(layout.pool_shape(TOKENS // 16), layout.pool_dtype)
    write_tokens(expected, layout, tokens, slots, scale=by_head)

    pool, unwritten = (rig.gpu.zeros(layout.pool_shape(TOKENS // 16), np.uint8) for _ in range(2))
    before = (1.0, 1.0) if fmt == FP8 else ()
    strides = (layout.cache_stride,) if fmt == FP8 else (layout.block_stride_bytes, layout.data_section_bytes)
    name, row, device_scales = f"reshape_and_cache_{fmt.name}", heads * HEAD_DIM, rig.upload(by_head)
    getattr(ops, name)(
        rig.gpu, rig.kernel(name), rig.upload(tokens), 0, pool, unwritten, rig.upload(slots), TOKENS, heads,
        HEAD_DIM, 16, *before, row, row, *strides, rig.stream,
        k_scales=device_scales, v_scales=device_scales, num_blocks=TOKENS // 16,
    )  # fmt: skip
    wrong = rig.download(pool).view(np.uint8) != expected.view(np.uint8)
    assert not wrong.any(), f"{wrong.sum()} bytes differ, in blocks {np.unique(np.nonzero(wrong)[0])}"
    assert not rig.download(unwritten).any()
