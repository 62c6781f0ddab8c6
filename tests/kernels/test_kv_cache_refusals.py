"""What a cache refuses, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr, KVCache
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat
from tests.kernels.kv_rig import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    formats,
    layout_of,
    pool_bytes,
    random_tokens,
    scales_of,
    write,
)
from tests.rig import Rig


def refusals(rig: Rig, cache: KVCache) -> list[tuple[str, Any]]:
    """Message -> call."""
    key, value = (rig.upload(array) for array in random_tokens(4))
    slots, stream = rig.upload(np.arange(4)), rig.stream
    out = rig.gpu.zeros((4, HEADS, HEAD_DIM), np.float32)
    return [
        ("first axes differ: key 4, value 4, slot_mapping 3", lambda: cache.write(
            key, value, slots[:3], stream=stream)),
        (r"key: got shape \(4, 2, 8\), allowed is \[num_tokens, 3, 64\]", lambda: cache.write(
            rig.gpu.zeros((4, 2, 8), np.uint16), value, slots, stream=stream)),
        (r"value: got shape \(4, 64, 2\)", lambda: cache.write(
            key, rig.gpu.zeros((4, 64, 2), np.uint16), slots, stream=stream)),
        ("num_tokens: got None, and no array", lambda: cache.write(1 << 20, 1 << 20, 1 << 20, stream=stream)),
        ("slot_mapping: got dtype int32", lambda: cache.write(
            key, value, rig.upload(np.arange(4, dtype=np.int32)), stream=stream)),
        ("key: got dtype float32", lambda: cache.write(out, value, slots, stream=stream)),
        ("stream: got None", lambda: cache.write(key, value, slots, stream=None)),
        ("out_k: got shape", lambda: cache.gather([0], 3, out, stream=stream)),
        ("out_v: got int32", lambda: cache.gather(
            [0], 4, out, rig.gpu.zeros(out.shape, np.int32), stream=stream)),
        ("out_v: got int,", lambda: cache.gather([0], 4, out, 4096, stream=stream)),
        ("dtype: got float64", lambda: cache.gather([0], 4, stream=stream, dtype=np.float64)),
        ("block_ids: got 1 elements, needed are 2", lambda: cache.gather([0], 5, stream=stream)),
        ("seq_len: got -1", lambda: cache.gather([0], -1, stream=stream)),
        ("pairs: got 5 for a target, allowed is 0 to 4", lambda: cache.copy_blocks([(0, 5)], stream=stream)),
        ("pairs: got -1 for a source", lambda: cache.copy_blocks([(-1, 0)], stream=stream)),
        ("block 2 is a target twice", lambda: cache.copy_blocks([(0, 2), (1, 2)], stream=stream)),
        ("block 2 is a source and a target", lambda: cache.copy_blocks([(0, 2), (2, 3)], stream=stream)),
        (r"pairs: got shape \(3,\)", lambda: cache.copy_blocks([1, 2, 3], stream=stream)),
        ("pairs: got dtype float64", lambda: cache.copy_blocks([(0.0, 1.0)], stream=stream)),
        ("host: got int", lambda: cache.swap_out([(0, 0)], 3, stream=stream)),  # type: ignore[arg-type]
        ("got 2 for a target", lambda: cache.swap_out([(0, 2)], cache.host_blocks(2), stream=stream)),
    ]  # fmt: skip


@formats
def test_what_a_cache_refuses(rig: Rig, fmt: CacheFormat) -> None:
    cache = KVCache(rig.gpu, layout_of(fmt), 5, **scales_of(fmt))
    before = pool_bytes(rig, cache.k_pool)
    for message, call in refusals(rig, cache):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            call()
    np.testing.assert_array_equal(pool_bytes(rig, cache.k_pool), before)


def test_scales_that_are_refused(rig: Rig) -> None:
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ArgumentValueError, match=rf"{name}: got 1\.0; a bf16 cache has none"):
            KVCache(rig.gpu, layout_of(BF16), 2, **{name: 1.0})
    with pytest.raises(ArgumentValueError, match=r"v_scale is -1\.0"):
        KVCache(rig.gpu, layout_of(NVFP4), 2, v_scale=-1.0)
    layout = layout_of(FP8)
    for bad, message in (
        (0.0, "k_scale is 0.0"),
        ([1.0, 2.0], r"k_scale: got shape \(2,\), allowed are one number and \(3,\)"),
        ([1.0, -2.0, 3.0], r"k_scale\[1\] is .*-2\.0"),
        ([1.0, 2.0, 1e-60], r"k_scale\[2\] is"),
        ([1.0, 2.0, np.inf], r"k_scale\[2\] is"),
        ("1", "k_scale is '1'"),
        (None, "k_scale is None"),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            KVCache(rig.gpu, layout, 2, k_scale=bad, v_scale=1.0)
    cache = KVCache(rig.gpu, layout, 2)
    assert cache.k_scale is cache.v_scale is None
    for call in (
        lambda: write(rig, cache, random_tokens(1), [0]),
        lambda: cache.gather([0], 1, stream=rig.stream),
    ):
        with pytest.raises(ArgumentValueError, match="k_scale: got None, an fp8 cache needs it"):
            call()


def test_pools_that_are_not_what_the_layout_says(rig: Rig) -> None:
    gpu, layout = rig.gpu, layout_of(BF16)
    good = gpu.zeros(layout.pool_shape(4), layout.pool_dtype)
    wide = gpu.zeros((4, 2, *layout.pool_shape(1)[1:]), layout.pool_dtype)
    other = gpu.zeros((4, BLOCK, HEADS + 1, HEAD_DIM), layout.pool_dtype)
    elements = good.size
    for pool, message in (
        (gpu.zeros(good.shape, np.float32), "k_pool: got dtype float32, allowed for bf16"),
        (gpu.zeros(good.shape, np.uint8), "k_pool: got dtype uint8"),
        (
            wide[:, 0],
            r"k_pool: got \d+ bytes between blocks, but the layout says \d+; .*block_stride_override",
        ),
        (other, r"k_pool: got shape \(4, 4, 4, 64\)"),
        (good.transpose(0, 2, 1, 3).reshape(4, -1)[:, :100], r"k_pool: got shape .* have \d+ bytes"),
        (other[:, :, :HEADS], "k_pool: got strides .* must be contiguous"),
        (good[:3], "got 3 and 4 blocks"),
        (good.reshape(-1)[: elements - 1], "got 3 and 4 blocks"),
        (good.reshape(-1)[::2], "a flat pool has no gaps"),
        (1 << 20, "num_blocks: got None, but nothing tells how many blocks k_pool has"),
        (DevicePtr(1 << 20), "num_blocks: got None"),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            KVCache.wrap(gpu, layout, pool, good)
    with pytest.raises(ArgumentValueError, match="num_blocks: got 5, but k_pool holds 4 blocks"):
        KVCache.wrap(gpu, layout, good, good, num_blocks=5)
    with pytest.raises(ArgumentValueError, match=r"k_pool: got address 0x\w+8, it must be a multiple of 16"):
        KVCache.wrap(gpu, layout, good.reshape(-1)[4:], good, num_blocks=3)
    with pytest.raises(ArgumentValueError, match=r"pool: got shape .* allowed is \[num_blocks, 2, \.\.\.\]"):
        KVCache.wrap_interleaved(gpu, layout, good)
    with pytest.raises(ArgumentTypeError, match="layout: got 'bf16'"):
        KVCache(gpu, "bf16", 4)  # type: ignore[arg-type]
    address = gpu.pointer(good)
    assert KVCache.wrap(gpu, layout, address, DevicePtr(address, good.nbytes), num_blocks=4).num_blocks == 4
    assert KVCache.wrap(gpu, layout, good.reshape(-1), good).num_blocks == 4
