"""Single pass, split-K, reduction, writers and the gather over every head_dim, ratio and number of heads.

The emulator compiles a sample; `test_sweeps.py` has the rest.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cupaged import KVCache
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout, gather_tokens, write_tokens
from tests.features.setups import Setup
from tests.features.test_shapes import HEAD_DIMS
from tests.oracle import assert_matches
from tests.poison import Options, Shape, random_case
from tests.rig import Rig, run_decode, upload_case

LENGTHS = (1, 15, 16, 17, 0, 33, 300)
BLOCK_SIZES = (1, 3, 8, 16, 48)


def launcher_layout(fmt: CacheFormat, shape: Shape) -> CacheLayout:
    """As the launchers ask for it: scales at a multiple of 16 bytes."""
    sizes = {"head_dim": shape.head_dim, "block_size": shape.block_size}
    return Setup.of(fmt, heads=(shape.num_q_heads, shape.num_kv_heads), **sizes).layouts()[0]


def check_launchers(rig: Rig, fmt: CacheFormat, shape: Shape, window: int = 0) -> None:
    """Single pass, one split, several, more than there are tokens, against float64."""
    layout = launcher_layout(fmt, shape)
    tight = dataclasses.replace(layout, data_section_override=None)
    options = Options(section_padding=layout.data_section_bytes - tight.data_section_bytes)
    case = random_case(fmt, LENGTHS, shape, window=window, options=options)
    expected = case.expected()[0]
    up = upload_case(rig, case)
    for splits in (0, 1, 3, 40):
        assert_matches(run_decode(up, splits), expected)
    up.assert_pools_untouched()


def check_cache(rig: Rig, setup: Setup, count: int = 50) -> None:
    """Written by the device and by the host, the pools are the same bytes; and are read back the same."""
    heads, dim = setup.heads[1], setup.head_dim
    layouts = setup.layouts()
    rng = np.random.default_rng(4)
    tokens = [rng.standard_normal((count, heads, dim)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    blocks = -(-count // setup.block_size) + 2
    slots = rng.permutation(blocks * setup.block_size)[:count].astype(np.int64)
    slots[::7] = -1
    scales = [0.013 if layout.format == FP8 else 1.0 for layout in layouts]
    given = [scale if layout.format == FP8 else None for scale, layout in zip(scales, layouts, strict=True)]
    cache = KVCache(rig.gpu, layouts[0], blocks, value_layout=layouts[1], k_scale=given[0], v_scale=given[1])
    cache.write(rig.upload(tokens[0]), rig.upload(tokens[1]), rig.upload(slots), stream=rig.stream)
    table = rng.permutation(blocks).astype(np.int32)
    read = cache.gather(rig.upload(table), blocks * setup.block_size, stream=rig.stream)
    for which, pool in enumerate((cache.k_pool, cache.v_pool)):
        layout = layouts[which]
        host = np.zeros(layout.pool_shape(blocks), layout.pool_dtype)
        write_tokens(host, layout, tokens[which], slots, scale=scales[which])
        found = rig.download(pool).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(found, host.reshape(-1).view(np.uint8))
        back = gather_tokens(host, layout, table, blocks * setup.block_size, scale=scales[which])
        np.testing.assert_array_equal(rig.download(read[which]), back)


@pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [(NVFP4, 16), (BF16, 48), (FP8, 80), (NVFP4, 112), (FP8, 208), (BF16, 240)],
    ids=lambda x: x.name if isinstance(x, CacheFormat) else str(x),
)
def test_head_dims(rig: Rig, fmt: CacheFormat, head_dim: int) -> None:
    check_launchers(rig, fmt, Shape(4, 2, head_dim, 16))
    check_launchers(rig, fmt, Shape(4, 2, head_dim, 16), window=19)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [(BF16, Shape(33, 1, 32, 12)), (FP8, Shape(128, 1, 32, 3)), (NVFP4, Shape(7, 1, 32, 100))],
    ids=lambda x: x.name if isinstance(x, CacheFormat) else f"{x.num_q_heads}",
)
def test_ratios(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    check_launchers(rig, fmt, shape)


@pytest.mark.parametrize(
    ("fmt", "heads"), [(BF16, 71), (FP8, 17), (NVFP4, 12)], ids=lambda x: getattr(x, "name", str(x))
)
def test_kv_heads(rig: Rig, fmt: CacheFormat, heads: int) -> None:
    check_launchers(rig, fmt, Shape(heads, heads, 32, 16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cache_head_dims(rig: Rig, head_dim: int) -> None:
    """Formats and block sizes take turns."""
    index = head_dim // 16
    for heads_first in (False, True):
        size = BLOCK_SIZES[(index // 3 + 2 * heads_first) % 5]
        setup = Setup.of(
            FORMATS[index % 3], heads=(3, 3), head_dim=head_dim, block_size=size, heads_first=heads_first
        )
        check_cache(rig, setup)
