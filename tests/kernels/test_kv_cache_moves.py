"""Blocks of a cache that are copied, swapped out and in, and shared by forked sequences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupaged import BlockAllocator, KVCache
from cupaged.formats import NVFP4, CacheFormat, CacheLayout, gather_tokens, write_tokens
from cupaged.ops.blocks import copy_cache_blocks
from cupaged.tables import sequence_tables, token_slots
from tests.kernels.kv_rig import (
    BF,
    BLOCK,
    HEAD_DIM,
    HEADS,
    formats,
    layout_of,
    pool_bytes,
    random_tokens,
    scale_arrays,
    scales_of,
    write,
)
from tests.rig import Rig


@formats
def test_copied_blocks(rig: Rig, fmt: CacheFormat) -> None:
    """Whole blocks, and of padded ones nothing that is not theirs."""
    layout = layout_of(fmt)
    if fmt == NVFP4:
        layout = dataclasses.replace(layout, data_section_override=layout.data_section_bytes + 48)
    layout = dataclasses.replace(
        layout, block_stride_override=layout.block_bytes + 32 + -layout.block_bytes % 16
    )
    rng = np.random.default_rng(3)
    pools = [rng.integers(0, 256, (9, layout.block_stride_bytes), np.uint8) for _ in range(2)]
    device = [rig.upload(pool.view(layout.pool_dtype)) for pool in pools]
    cache = KVCache.wrap(rig.gpu, layout, *device, **scales_of(fmt))
    pairs = [(0, 8), (0, 3), (7, 1)]
    cache.copy_blocks(pairs, stream=rig.stream)
    cache.copy_blocks(np.array([[4, 5]]), stream=rig.stream)
    used = np.zeros(layout.block_stride_bytes, bool)
    data = BLOCK * HEADS * layout.format.data_bytes(HEAD_DIM)
    used[:data] = True
    if fmt == NVFP4:
        section = layout.data_section_bytes
        used[section : section + BLOCK * HEADS * HEAD_DIM // 16] = True
    for pool, found in zip(pools, device, strict=True):
        expected = pool.copy()
        for source, target in (*pairs, (4, 5)):
            expected[target, used] = pool[source, used]
        np.testing.assert_array_equal(pool_bytes(rig, found).reshape(9, -1), expected)


@formats
def test_pairs_on_the_device_and_a_tensor_left_out(rig: Rig, fmt: CacheFormat) -> None:
    """The launcher: pairs with ids outside are left out, and so is K where its source is null."""
    layout = layout_of(fmt)
    size = layout.block_stride_bytes
    rng = np.random.default_rng(4)
    pools = [rng.integers(0, 256, (4, size), np.uint8) for _ in range(2)]
    k, v = (rig.upload(pool) for pool in pools)
    pairs = rig.upload(np.array([[0, 1], [-1, 2], [3, 4], [2**30, 2], [4, 2], [3, -1]], np.int32))
    for k_source, copied in ((0, (False, True)), (k, (True, True))):
        copy_cache_blocks(
            rig.gpu, rig.kernel("cache_blocks", "copy_cache_blocks"), k_source, v, k, v, pairs, 6,
            BLOCK * HEADS * fmt.data_bytes(HEAD_DIM), BLOCK * HEADS * fmt.scale_bytes(HEAD_DIM),
            size, layout.data_section_bytes, size, layout.data_section_bytes, 4, 4, rig.stream,
        )  # fmt: skip
        for pool, found, there in zip(pools, (k, v), copied, strict=True):
            expected = pool[[0, 0, 2, 3]] if there else pool
            np.testing.assert_array_equal(rig.download(found), expected)


@formats
def test_swapped_blocks_come_back(rig: Rig, fmt: CacheFormat) -> None:
    scales = scales_of(fmt)
    layout = layout_of(fmt)
    stride = layout.block_bytes + 16 + -layout.block_bytes % 16
    cache = KVCache(rig.gpu, dataclasses.replace(layout, block_stride_override=stride), 6, **scales)
    write(rig, cache, random_tokens(24), np.arange(24))
    before = [rig.download(array) for array in cache.gather([2, 5, 0], 12, stream=rig.stream)]
    host = cache.host_blocks(4)
    assert host.k.shape == host.v.shape == (4, host.layout.block_stride_bytes)
    cache.swap_out([(2, 3), (5, 0), (0, 1)], host, stream=rig.stream)
    rig.gpu.synchronize()
    assert host.k[[0, 1, 3]].any(axis=1).all()
    assert not host.k[2].any()
    assert not host.v[2].any()
    held = gather_tokens(
        host.k.view(layout.pool_dtype), host.layout, [3, 0, 1], 12, scale=scale_arrays(scales)[0]
    )
    np.testing.assert_array_equal(held, before[0])
    write(rig, cache, random_tokens(24, seed=9), np.arange(24))
    cache.swap_in([(3, 1), (0, 4), (1, 3)], host, stream=rig.stream)
    for array, exact in zip(cache.gather([1, 4, 3], 12, stream=rig.stream), before, strict=True):
        np.testing.assert_array_equal(rig.download(array), exact)


@pytest.mark.parametrize(
    "layout",
    [
        CacheLayout(NVFP4, 3, 64, 4, data_section_override=432, block_stride_override=1024),
        CacheLayout(NVFP4, 3, 16, 1, data_section_override=32, block_stride_override=48),
    ],
    ids=["gap behind the values", "24 bytes of values"],
)
def test_scales_come_back_from_where_the_host_has_them(rig: Rig, layout: CacheLayout) -> None:
    """On the host sections are tight but for 16 bytes, whatever gap the cache has, and read as its layout
    says."""
    cache, size = KVCache(rig.gpu, layout, 3), layout.block_size
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((3 * size, 3, layout.head_dim)).astype(BF) for _ in range(2))
    write(rig, cache, (key, value), np.arange(3 * size))
    before = [rig.download(array) for array in cache.gather([1], size, stream=rig.stream)]
    host = cache.host_blocks(2)
    cache.swap_out([(1, 1)], host, stream=rig.stream)
    cache.swap_in([(1, 2)], host, stream=rig.stream)
    for array, stored, exact in zip(
        cache.gather([2], size, stream=rig.stream), (host.k, host.v), before, strict=True
    ):
        np.testing.assert_array_equal(rig.download(array), exact)
        np.testing.assert_array_equal(gather_tokens(stored, host.layout, [1], size), exact)


@formats
def test_forked_sequences_keep_their_own_tokens(rig: Rig, fmt: CacheFormat) -> None:
    """Allocator and cache together: copy-on-write, then both read what they wrote."""
    scales = scales_of(fmt)
    allocator, cache = BlockAllocator(8, BLOCK), KVCache(rig.gpu, layout_of(fmt), 8, **scales)
    first = allocator.allocate(6)
    prompt = random_tokens(6)
    write(rig, cache, prompt, token_slots(sequence_tables([first])[0], [0], [6], BLOCK))
    second = allocator.fork(first)
    appended = allocator.append_each([first, second])
    assert len(appended.copies) == 1
    cache.copy_blocks(appended.copies, stream=rig.stream)
    new = random_tokens(2, seed=5)
    write(rig, cache, new, appended.slots)
    for sequence, which in ((first, 0), (second, 1)):
        got = cache.gather(sequence.blocks, 7, stream=rig.stream)
        for array, old, fresh, scale in zip(got, prompt, new, scale_arrays(scales), strict=True):
            tokens = np.concatenate([old, fresh[which : which + 1]])
            pool = np.zeros(cache.layout.pool_shape(2), cache.layout.pool_dtype)
            write_tokens(pool, cache.layout, tokens, np.arange(7), scale=scale)
            np.testing.assert_array_equal(
                rig.download(array), gather_tokens(pool, cache.layout, [0, 1], 7, scale=scale)
            )
