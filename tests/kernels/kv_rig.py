"""A small `KVCache` under test: its layout, tokens, and what the host packers write."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import KVCache
from cupaged.formats import BF16, FORMATS, NVFP4, CacheFormat, CacheLayout, write_tokens
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
BF = ml_dtypes.bfloat16
HEADS, HEAD_DIM, BLOCK = 3, 64, 4
HEAD_SCALES = ([0.013, 0.3, 2.0], [0.07, 1.0, 0.84210527])


def layout_of(fmt: CacheFormat, **changed: Any) -> CacheLayout:
    return CacheLayout(fmt, HEADS, HEAD_DIM, BLOCK, **changed)


def scales_of(fmt: CacheFormat, per_head: bool = False) -> dict[str, Any]:
    if fmt == BF16 or (fmt == NVFP4 and not per_head):
        return {}  # NVFP4's second level is 1 by default
    k, v = HEAD_SCALES if per_head else (0.013, 0.07)
    return {"k_scale": k, "v_scale": v}


def scale_arrays(scales: dict[str, Any]) -> tuple[Any, Any]:
    """For the host packers."""
    k, v = (np.array(scales[name]) if name in scales else 1.0 for name in ("k_scale", "v_scale"))
    return k, v


def random_tokens(count: int, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((count, HEADS, HEAD_DIM)).astype(BF) for _ in range(2))
    return key, value


def raw(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write(rig: Rig, cache: KVCache, tokens: tuple[Any, Any], slots: npt.ArrayLike) -> None:
    key, value = (rig.upload(array) for array in tokens)
    cache.write(key, value, rig.upload(np.array(slots, np.int64)), stream=rig.stream)


def expected_pools(
    cache: KVCache, tokens: tuple[Any, Any], slots: npt.ArrayLike, scales: dict[str, Any]
) -> list[npt.NDArray[np.uint8]]:
    """Both pools as the host packers write them into zeros."""
    pools = []
    for array, scale in zip(tokens, scale_arrays(scales), strict=True):
        pool = np.zeros(cache.layout.pool_shape(cache.num_blocks), cache.layout.pool_dtype)
        write_tokens(pool, cache.layout, array, slots, scale=scale)
        pools.append(raw(pool))
    return pools


def pool_bytes(rig: Rig, pool: Any) -> npt.NDArray[np.uint8]:
    return raw(rig.download(pool))
