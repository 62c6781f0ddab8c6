"""The cache object: what it writes, reads back, copies and swaps, byte for byte as the host packers do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupaged import DevicePtr, KVCache
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat, CacheLayout, gather_tokens, write_tokens
from cupaged.interop import to_device
from tests.kernels.kv_rig import (
    BF,
    BLOCK,
    HEAD_DIM,
    HEAD_SCALES,
    HEADS,
    expected_pools,
    formats,
    layout_of,
    pool_bytes,
    random_tokens,
    raw,
    scale_arrays,
    scales_of,
    write,
)
from tests.poison import with_gaps
from tests.rig import Rig


@formats
@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
@pytest.mark.parametrize("padded", [False, True], ids=["tight", "padded"])
def test_write_and_gather(rig: Rig, fmt: CacheFormat, per_head: bool, padded: bool) -> None:
    if per_head and fmt == BF16:
        pytest.skip("BF16 has no scales")
    layout = layout_of(fmt)
    if padded:
        section = {"data_section_override": layout.data_section_bytes + 32} if fmt == NVFP4 else {}
        layout = layout_of(fmt, **section)
        layout = dataclasses.replace(
            layout, block_stride_override=layout.block_bytes + 48 - layout.block_bytes % 16
        )
    scales = scales_of(fmt, per_head)
    cache = KVCache(rig.gpu, layout, 7, **scales)
    tokens, slots = random_tokens(11), [5, 20, -1, 0, 27, 9, 28, 10, 1000, 3, 12]
    write(rig, cache, tokens, slots)
    for pool, expected in zip(
        (cache.k_pool, cache.v_pool), expected_pools(cache, tokens, slots, scales), strict=True
    ):
        np.testing.assert_array_equal(pool_bytes(rig, pool), expected)
    blocks, length = [6, 1, 99, 2, 5, -1], 22
    for dtype in (np.float32, BF):
        got = cache.gather(blocks, length, stream=rig.stream, dtype=dtype)
        for array, pool, scale in zip(got, (cache.k_pool, cache.v_pool), scale_arrays(scales), strict=True):
            host = rig.download(pool).view(layout.pool_dtype)
            exact = gather_tokens(host, layout, blocks, length, scale=scale)
            assert np.isnan(exact[8:12]).all()
            assert np.isnan(exact[20:]).all()
            assert tuple(array.shape) == (length, HEADS, HEAD_DIM)
            found = rig.download(array).view(dtype)
            np.testing.assert_array_equal(found.astype(np.float32), exact.astype(dtype).astype(np.float32))


@formats
def test_every_stored_code_is_read_back(rig: Rig, fmt: CacheFormat) -> None:
    """Pools of random bytes: every code, NaN among them, and every group scale."""
    layout = CacheLayout(fmt, 2, 128, 16)
    rng = np.random.default_rng(1)
    pools = []
    for _ in range(2):
        bits = rng.integers(0, 256, 9 * layout.block_stride_bytes, np.uint8)
        pools.append(bits.view(layout.pool_dtype).reshape(layout.pool_shape(9)))
    scales = {"k_scale": 0.3, "v_scale": [7.0, 0.01]} if fmt != BF16 else {}
    cache = KVCache.wrap(rig.gpu, layout, rig.upload(pools[0]), rig.upload(pools[1]), **scales)
    blocks = rng.permutation(9).tolist()
    got = cache.gather(rig.upload(np.array(blocks, np.int32)), 140, stream=rig.stream)
    for array, pool, scale in zip(got, pools, scale_arrays(scales), strict=True):
        exact = gather_tokens(pool, layout, blocks, 140, scale=scale)
        np.testing.assert_array_equal(rig.download(array), exact)


@formats
def test_gather_into_given_arrays(rig: Rig, fmt: CacheFormat) -> None:
    scales = scales_of(fmt)
    cache = KVCache(rig.gpu, layout_of(fmt), 4, **scales)
    write(rig, cache, random_tokens(6), [8, 9, 10, 11, 4, 5])
    fresh = cache.gather([2, 1], 6, stream=rig.stream)
    guarded = [rig.gpu.asarray(np.full((8, HEADS, HEAD_DIM), np.nan, np.float32)) for _ in range(2)]
    back = cache.gather([2, 1], 6, guarded[0][1:7], guarded[1][1:7], stream=rig.stream)
    for array, given, whole in zip(fresh, back, guarded, strict=True):
        np.testing.assert_array_equal(rig.download(array), rig.download(given))
        assert np.isnan(rig.download(whole)[[0, 7]]).all()
    mixed = cache.gather([2, 1], 6, guarded[0][1:7], rig.full_bf16((6, HEADS, HEAD_DIM)), stream=rig.stream)
    np.testing.assert_array_equal(rig.download(mixed[0]), rig.download(fresh[0]))
    np.testing.assert_array_equal(rig.download_bf16(mixed[1]), rig.download(fresh[1]).astype(BF))
    for empty in cache.gather([], 0, stream=rig.stream):
        assert tuple(empty.shape) == (0, HEADS, HEAD_DIM)


@formats
def test_strided_sources(rig: Rig, fmt: CacheFormat) -> None:
    """K and V sliced out of packed QKV rows."""
    scales = scales_of(fmt)
    cache, plain = (KVCache(rig.gpu, layout_of(fmt), 4, **scales) for _ in range(2))
    key, value = random_tokens(5)
    row = HEADS * HEAD_DIM
    packed = np.full((5, 4 * row), np.nan, BF)
    packed[:, row : 2 * row], packed[:, 3 * row :] = key.reshape(5, row), value.reshape(5, row)
    device = rig.upload(packed).reshape(5, 4, HEADS, HEAD_DIM)
    slots = rig.upload(np.arange(3, 8))
    cache.write(device[:, 1], device[:, 3], slots, stream=rig.stream)
    write(rig, plain, (key, value), np.arange(3, 8))
    for name in ("k_pool", "v_pool"):
        np.testing.assert_array_equal(
            pool_bytes(rig, getattr(cache, name)), pool_bytes(rig, getattr(plain, name))
        )
    addresses = KVCache(rig.gpu, layout_of(fmt), 4, **scales)
    wide = [rig.upload(with_gaps(array, 2 * row)) for array in (key, value)]
    addresses.write(
        *(DevicePtr(rig.gpu.pointer(array), array.nbytes) for array in wide),
        slots, stream=rig.stream, num_tokens=5, key_stride=2 * row, value_stride=2 * row,
    )  # fmt: skip
    np.testing.assert_array_equal(pool_bytes(rig, addresses.k_pool), pool_bytes(rig, plain.k_pool))
    np.testing.assert_array_equal(pool_bytes(rig, addresses.v_pool), pool_bytes(rig, plain.v_pool))


@pytest.mark.edge("interleaved-pool")
@formats
def test_interleaved_pools(rig: Rig, fmt: CacheFormat) -> None:
    """One allocation [num_blocks, 2, ...]: what is written to K is never in V, and the other way round."""
    layout, scales = layout_of(fmt), scales_of(fmt)
    block = layout.pool_shape(1)[1:]
    pool = rig.gpu.zeros((5, 2, *block), layout.pool_dtype)
    cache = KVCache.wrap_interleaved(rig.gpu, layout, pool, **scales)
    assert cache.num_blocks == 5
    assert cache.layout.block_stride_bytes == 2 * layout.block_stride_bytes
    for which, part in enumerate((cache.k_cache, cache.v_cache)):
        held = 9 * layout.block_stride_bytes  # to the last block's end, and not to the stride's
        assert (part.address, part.nbytes) == (
            rig.gpu.pointer(pool) + which * layout.block_stride_bytes,
            held,
        )
    tokens, slots = random_tokens(6), [0, 19, 7, 8, 2, 99]
    write(rig, cache, tokens, slots)
    plain = KVCache(rig.gpu, layout, 5, **scales)
    write(rig, plain, tokens, slots)
    both = pool_bytes(rig, pool).reshape(5, 2, -1)
    for side, whole in ((0, plain.k_pool), (1, plain.v_pool)):
        np.testing.assert_array_equal(both[:, side], pool_bytes(rig, whole).reshape(5, -1))
    cache.copy_blocks([(4, 3)], stream=rig.stream)
    found = pool_bytes(rig, pool).reshape(5, 2, -1)
    np.testing.assert_array_equal(found[3], both[4])
    np.testing.assert_array_equal(found[[0, 1, 2, 4]], both[[0, 1, 2, 4]])
    got = cache.gather([3], 4, stream=rig.stream)
    expected = plain.gather([4], 4, stream=rig.stream)
    for array, exact in zip(got, expected, strict=True):
        np.testing.assert_array_equal(rig.download(array), rig.download(exact))


@formats
def test_one_layer_of_many(rig: Rig, fmt: CacheFormat) -> None:
    """Pools [num_blocks, num_layers, ...]: a layer's write leaves the others' bytes."""
    layout, scales, layers = layout_of(fmt), scales_of(fmt), 3
    stride = layers * layout.block_stride_bytes
    block = layout.pool_shape(1)[1:]
    pools = [rig.gpu.zeros((5, layers, *block), layout.pool_dtype) for _ in range(2)]
    cache = KVCache.wrap(
        rig.gpu,
        dataclasses.replace(layout, block_stride_override=stride),
        pools[0][:, 1],
        pools[1][:, 1],
        **scales,
    )
    tokens, slots = random_tokens(4), [3, 16, 19, 20]
    write(rig, cache, tokens, slots)
    plain = KVCache(rig.gpu, layout, 5, **scales)
    write(rig, plain, tokens, slots)
    for pool, whole in zip(pools, (plain.k_pool, plain.v_pool), strict=True):
        found = pool_bytes(rig, pool).reshape(5, layers, -1)
        np.testing.assert_array_equal(found[:, 1], pool_bytes(rig, whole).reshape(5, -1))
        assert not found[:, [0, 2]].any()


def heads_first_bytes(layout: CacheLayout, pool: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A tight pool with the rows of each section swapped to ``[num_kv_heads, block_size]``."""
    blocks = pool.reshape(-1, layout.block_stride_bytes)
    swapped, begin = blocks.copy(), 0
    sizes = (layout.format.data_bytes(HEAD_DIM), layout.format.scale_bytes(HEAD_DIM))
    for size in filter(None, sizes):
        end = begin + BLOCK * HEADS * size
        rows = blocks[:, begin:end].reshape(-1, BLOCK, HEADS, size).transpose(0, 2, 1, 3)
        swapped[:, begin:end] = rows.reshape(-1, end - begin)
        begin = end
    return swapped.reshape(-1)


@formats
@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
def test_heads_first(rig: Rig, fmt: CacheFormat, per_head: bool) -> None:
    """The same bytes as tokens first, in the other order; and they are read back the same."""
    if per_head and fmt == BF16:
        pytest.skip("BF16 has no scales")
    scales = scales_of(fmt, per_head)
    plain = KVCache(rig.gpu, layout_of(fmt), 5, **scales)
    cache = KVCache(rig.gpu, layout_of(fmt, heads_first=True), 5, **scales)
    tokens, slots = random_tokens(13), [0, 7, 3, 19, 18, 17, 4, 9, 10, 11, 1, 2, 5]
    for one in (plain, cache):
        write(rig, one, tokens, slots)
    for first, last, array, scale in zip(
        (cache.k_pool, cache.v_pool), (plain.k_pool, plain.v_pool), tokens, scale_arrays(scales), strict=True
    ):
        found = pool_bytes(rig, first)
        np.testing.assert_array_equal(found, heads_first_bytes(plain.layout, pool_bytes(rig, last)))
        host = np.zeros(cache.layout.pool_shape(5), cache.layout.pool_dtype)
        write_tokens(host, cache.layout, array, slots, scale=scale)
        np.testing.assert_array_equal(raw(host), found)
    for got, exact in zip(
        cache.gather([1, 4, 0], 12, stream=rig.stream),
        plain.gather([1, 4, 0], 12, stream=rig.stream),
        strict=True,
    ):
        np.testing.assert_array_equal(rig.download(got), rig.download(exact))
    cache.copy_blocks([(4, 2)], stream=rig.stream)
    moved, _ = cache.gather([2], 4, stream=rig.stream)
    np.testing.assert_array_equal(rig.download(moved), rig.download(exact_of(plain, rig)))
    if fmt != NVFP4:
        assert tuple(cache.k_pool.shape) == (5, HEADS, BLOCK, HEAD_DIM)
        with pytest.raises(ArgumentValueError, match="k_pool: got shape"):
            KVCache.wrap(rig.gpu, layout_of(fmt), cache.k_pool, cache.v_pool, **scales)


def exact_of(cache: KVCache, rig: Rig) -> Any:
    """K of block 4."""
    return cache.gather([4], 4, stream=rig.stream)[0]


def test_scales_by_head_on_the_device(rig: Rig) -> None:
    """A device array is taken as it is; on the emulator NumPy arrays are checked and copied all the same."""
    layout = layout_of(FP8)
    k, v = (rig.gpu.asarray(np.array(values, np.float32)) for values in HEAD_SCALES)
    cache = KVCache(rig.gpu, layout, 3, **scales_of(FP8))
    host = KVCache(rig.gpu, layout, 3, **scales_of(FP8, per_head=True))
    cache.set_scales(k, v)
    for one in (cache, host):
        write(rig, one, random_tokens(9), np.arange(9))
    np.testing.assert_array_equal(pool_bytes(rig, cache.k_pool), pool_bytes(rig, host.k_pool))
    np.testing.assert_array_equal(rig.download(cache.v_scales), np.array(HEAD_SCALES[1], np.float32))
    assert cache.k_scales.dtype == np.float32
    assert cache.k_scale is cache.v_scale is None
    mixed = KVCache(rig.gpu, layout, 3, k_scale=HEAD_SCALES[0], v_scale=0.25)
    assert (mixed.v_scale, mixed.v_scales) == (0.25, None)
    write(rig, mixed, random_tokens(9), np.arange(9))
    np.testing.assert_array_equal(pool_bytes(rig, mixed.k_pool), pool_bytes(rig, host.k_pool))


@pytest.mark.parametrize("fmts", [(FP8, NVFP4), (BF16, FP8), (NVFP4, BF16)], ids=str)
def test_k_and_v_of_different_formats(rig: Rig, fmts: tuple[CacheFormat, CacheFormat]) -> None:
    """Everything that a cache does, with K and V as in two caches of one format each."""
    scales = {name: 0.3 for name, fmt in zip(("k_scale", "v_scale"), fmts, strict=True) if fmt != BF16}
    k_layout, v_layout = (layout_of(fmt) for fmt in fmts)
    cache = KVCache(rig.gpu, k_layout, 6, value_layout=v_layout, **scales)
    both = [{"k_scale": 0.3, "v_scale": 0.3} if fmt != BF16 else {} for fmt in fmts]
    plain = [
        KVCache(rig.gpu, layout, 6, **one) for layout, one in zip((k_layout, v_layout), both, strict=True)
    ]
    tokens, slots = random_tokens(9), [0, 5, 23, 99, 7, -1, 8, 9, 22]
    host = cache.host_blocks(2)
    assert (host.k.shape[1], host.v.shape[1]) == tuple(
        -(-layout.block_bytes // 16) * 16 for layout in (k_layout, v_layout)
    )
    for one in (cache, *plain):
        write(rig, one, tokens, slots)
        one.copy_blocks([(5, 3)], stream=rig.stream)
        store = one.host_blocks(2)
        one.swap_out([(5, 1), (2, 0)], store, stream=rig.stream)
        one.swap_in([(0, 4)], store, stream=rig.stream)
    for name, which in (("k_pool", 0), ("v_pool", 1)):
        np.testing.assert_array_equal(
            pool_bytes(rig, getattr(cache, name)), pool_bytes(rig, getattr(plain[which], name))
        )
    got = cache.gather([3, 1, 4], 12, stream=rig.stream)
    for which, array in enumerate(got):
        exact = plain[which].gather([3, 1, 4], 12, stream=rig.stream)[which]
        np.testing.assert_array_equal(rig.download(array), rig.download(exact))
    with pytest.raises(ArgumentValueError, match="value_layout: its block_size is 8, that of layout is 4"):
        KVCache(rig.gpu, k_layout, 6, value_layout=dataclasses.replace(v_layout, block_size=8))
    with pytest.raises(ArgumentTypeError, match="value_layout: got 'fp8'"):
        KVCache(rig.gpu, k_layout, 6, value_layout="fp8")  # type: ignore[arg-type]


def test_the_second_level_of_nvfp4(rig: Rig) -> None:
    """Values far below what E4M3 scales reach come back; without a second level they are lost."""
    layout = layout_of(NVFP4)
    tiny = [(2.0**-20 * array.astype(np.float32)).astype(BF) for array in random_tokens(5)]
    lost, kept = KVCache(rig.gpu, layout, 2), KVCache(rig.gpu, layout, 2, k_scale=2.0**-20, v_scale=2.0**-20)
    plain = KVCache(rig.gpu, layout, 2)
    for cache, tokens in ((lost, tiny), (kept, tiny), (plain, random_tokens(5))):
        write(rig, cache, (tokens[0], tokens[1]), np.arange(5))
    np.testing.assert_array_equal(pool_bytes(rig, kept.k_pool), pool_bytes(rig, plain.k_pool))
    assert not rig.download(lost.gather([0, 1], 5, stream=rig.stream)[0]).any()
    for array, exact in zip(
        kept.gather([0, 1], 5, stream=rig.stream), plain.gather([0, 1], 5, stream=rig.stream), strict=True
    ):
        np.testing.assert_array_equal(rig.download(array), 2.0**-20 * rig.download(exact))


def test_to_device_copies(rig: Rig) -> None:
    for host in (np.arange(12, dtype=np.int64).reshape(3, 4), np.zeros((0, 5), np.int32), np.float32(3.0)):
        copy = to_device(rig.gpu, host, rig.stream)
        assert rig.download(copy).tolist() == np.asarray(host).tolist()
    source = np.arange(4, dtype=np.int32)
    copy = to_device(rig.gpu, source, rig.stream)
    source[:] = -1
    assert rig.download(copy).tolist() == [0, 1, 2, 3]


def test_an_empty_cache(rig: Rig) -> None:
    cache = KVCache(rig.gpu, layout_of(BF16), 0)
    write(rig, cache, random_tokens(2), [0, 5])
    k, _ = cache.gather([0], 2, stream=rig.stream)
    assert np.isnan(rig.download(k)).all()
    cache.copy_blocks([], stream=rig.stream)
