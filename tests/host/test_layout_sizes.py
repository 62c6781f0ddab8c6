"""Sizes of layouts: whatever kind of integer they come as, they are ints and do not overflow."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from cupaged.errors import ArgumentTypeError
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout, paged_strides, scratch_strides


def test_layouts_of_numpys_integers_do_not_overflow() -> None:
    plain = CacheLayout(BF16, 8, 128, 32, 2**17)
    layout = CacheLayout(BF16, np.int16(8), np.uint8(128), np.int16(32), np.int32(2**17))  # type: ignore[arg-type]
    assert layout == plain
    assert (layout.block_bytes, layout.cache_stride) == (65536, 65536)
    assert {type(getattr(layout, f.name)) for f in dataclasses.fields(layout)} == {
        CacheFormat, int, bool, type(None)
    }  # fmt: skip
    assert json.dumps([layout.num_kv_heads, layout.block_stride_override, *layout.pool_shape(np.int8(3))])  # type: ignore[arg-type]
    nvfp4 = CacheLayout(NVFP4, np.int8(2), np.int8(64), np.int8(16), None, np.int16(1040))  # type: ignore[arg-type]
    assert type(nvfp4.data_section_override) is int
    assert nvfp4.block_bytes == 1040 + 128
    assert paged_strides(np.int8(8), np.int8(64), np.int8(16)).blk == 8192  # type: ignore[arg-type]
    assert scratch_strides(np.int8(8), np.int8(64), np.int8(16)).blk == 16384  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="block_size: got '16'"):
        paged_strides(8, 64, "16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "blocks"), [(0, 0), (1, 0), (127, 0), (128, 1), (307, 1), (308, 2), (488, 3)]
)
def test_blocks_in_so_many_bytes(nbytes: int, blocks: int) -> None:
    """128 bytes each, 180 apart; the last needs no gap behind it."""
    assert CacheLayout(FP8, 1, 8, 16, 180).blocks_in(nbytes) == blocks
