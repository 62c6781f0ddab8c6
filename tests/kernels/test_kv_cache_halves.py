"""What a cache refuses as a whole: K and V both, blocks of another kind, both pools in one array."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr, KVCache
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FP8, NVFP4, CacheFormat
from cupaged.kv.swap import HostBlocks
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


@formats
def test_blocks_of_the_host_are_as_the_caches(rig: Rig, fmt: CacheFormat) -> None:
    """Bytes of another format or order are other values, whether they fit or not."""
    plain = layout_of(fmt)
    cache = KVCache(rig.gpu, plain, 5, **scales_of(fmt))
    other = BF16 if fmt == FP8 else FP8
    changes: tuple[tuple[str, Any, Any], ...] = (
        ("format", other, other.name),
        ("num_kv_heads", HEADS + 1, HEADS + 1),
        ("head_dim", 128, 128),
        ("block_size", 2 * BLOCK, 2 * BLOCK),
        ("heads_first", True, True),
    )
    for field, value, shown in changes:
        layout = dataclasses.replace(plain, **{field: value})
        for layouts, side in (((layout, plain), "K"), ((plain, layout), "V")):
            host = HostBlocks.allocate(rig.gpu, *layouts, 3)
            for swap in (cache.swap_out, cache.swap_in):
                with pytest.raises(
                    ArgumentValueError, match=f"^host: got {side} blocks of {field} {shown}, "
                ):
                    swap([(0, 1)], host, stream=rig.stream)
    apart = dataclasses.replace(plain, block_stride_override=plain.block_stride_bytes + 64)
    cache.swap_out([(0, 1)], KVCache(rig.gpu, apart, 2, **scales_of(fmt)).host_blocks(3), stream=rig.stream)


def test_nothing_is_written_where_v_is_refused(rig: Rig) -> None:
    """K and V of formats of their own are two launches; what is wrong with V's is found before K's."""
    cache = KVCache(rig.gpu, layout_of(BF16), 5, value_layout=layout_of(NVFP4))
    key, value = (rig.upload(array) for array in random_tokens(4))
    slots, row = rig.upload(np.arange(4)), HEADS * HEAD_DIM
    flat = value.reshape(-1)
    address = rig.gpu.pointer(value)
    bad: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (rig.gpu.zeros(value.shape, np.float32), {}, "value: got dtype float32"),
        (rig.gpu.zeros((4, HEAD_DIM, HEADS), value.dtype).transpose(0, 2, 1), {}, "value: got strides"),
        (value, {"value_stride": row + 8}, f"value_stride: got {row + 8}, but value has {row} elements"),
        (value[:3], {"num_tokens": 4}, f"value: reaches over {3 * row} elements, needed are {4 * row}"),
        (address + 2, {}, "value: got 0x.*, its address, in bytes, must be a multiple of 16"),
        (
            address,
            {"value_stride": row + 4},
            f"value_stride: got {row + 4}, its value must be a multiple of 8",
        ),
        (address, {"value_stride": 2**32}, "value_stride: got 4294967296, allowed is 0 to 4294967295"),
        (address, {"value_stride": "3"}, "value_stride: got '3'"),
        (DevicePtr(address, flat.nbytes - 1), {}, f"value: got {flat.nbytes - 1} bytes"),
        (0, {}, r"value: got a null pointer \(address 0\) for 4 tokens"),
    )
    for given, options, message in bad:
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"^{message}"):
            cache.write(key, given, slots, stream=rig.stream, **options)
        assert not pool_bytes(rig, cache.k_pool).any(), message
    cache.write(key, np.uint64(address), slots, stream=rig.stream)
    assert pool_bytes(rig, cache.k_pool).any()
    assert pool_bytes(rig, cache.v_pool).any()


@formats
def test_null_pointers_are_no_tokens(rig: Rig, fmt: CacheFormat) -> None:
    cache = KVCache(rig.gpu, layout_of(fmt), 5, **scales_of(fmt))
    key, value = (rig.upload(array) for array in random_tokens(4))
    slots = rig.upload(np.arange(4))
    for null in (0, DevicePtr(0)):
        for name, rows in (("key", (null, value)), ("value", (key, null)), ("key", (null, null))):
            with pytest.raises(ArgumentValueError, match=f"^{name}: got a null pointer"):
                cache.write(rows[0], rows[1], slots, num_tokens=4, stream=rig.stream)
        cache.write(null, null, 0, num_tokens=0, stream=rig.stream)
    assert not pool_bytes(rig, cache.k_pool).any()
    assert not pool_bytes(rig, cache.v_pool).any()


@formats
def test_nothing_is_gathered_where_out_v_is_refused(rig: Rig, fmt: CacheFormat) -> None:
    cache = KVCache(rig.gpu, layout_of(fmt), 5, **scales_of(fmt))
    write(rig, cache, random_tokens(4), np.arange(4))
    shape = (4, HEADS, HEAD_DIM)
    wide = rig.gpu.zeros((4, HEADS, 2 * HEAD_DIM), np.float32)
    shifted = rig.gpu.zeros(4 * HEADS * HEAD_DIM + 1, np.float32)[1:].reshape(shape)
    for bad, message in ((wide[..., :HEAD_DIM], "got strides"), (shifted, "got 0x.* multiple of 16")):
        for name in ("out_k", "out_v"):
            good = rig.gpu.zeros(shape, np.float32)
            given = {"out_k": good, "out_v": good} | {name: bad}
            with pytest.raises(ArgumentValueError, match=f"^{name}: {message}"):
                cache.gather([0], 4, **given, stream=rig.stream)
            assert not rig.download(good).any()


@formats
def test_an_array_of_both_pools_is_neither(rig: Rig, fmt: CacheFormat) -> None:
    """Not even with the stride that its first axis has: K and V would pass for blocks."""
    plain = layout_of(fmt)
    both = rig.gpu.zeros((2, *plain.pool_shape(6)), plain.pool_dtype)
    whole = dataclasses.replace(plain, block_stride_override=6 * plain.block_stride_bytes)
    other = rig.gpu.zeros(plain.pool_shape(6), plain.pool_dtype)
    for layout in (plain, whole):
        with pytest.raises(
            ArgumentValueError, match=r"^k_pool: got shape \(2, 6, .* pool\[0\] and pool\[1\]"
        ):
            KVCache.wrap(rig.gpu, layout, both, other, **scales_of(fmt))
    assert KVCache.wrap(rig.gpu, plain, both[0], both[1], **scales_of(fmt)).num_blocks == 6
