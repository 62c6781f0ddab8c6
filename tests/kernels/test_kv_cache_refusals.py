"""What a cache refuses, before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupaged import DevicePtr, KVCache
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat, CacheLayout
from cupaged.kv.scales import Scale
from cupaged.kv.tensors import _format_arguments
from tests.kernels.kv_rig import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    formats,
    layout_of,
    pool_bytes,
    random_tokens,
    scales_of,
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
        ("dtype: got nothing, allowed", lambda: cache.gather([0], 4, stream=stream, dtype="nothing")),
        ("num_blocks: got -1, allowed is 0 or more", lambda: cache.host_blocks(-1)),
        ("num_blocks: got '1'", lambda: cache.host_blocks("1")),  # type: ignore[arg-type]
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
    with pytest.raises(ArgumentValueError, match=r"^v_scale: got -1\.0"):
        KVCache(rig.gpu, layout_of(NVFP4), 2, v_scale=-1.0)
    layout = layout_of(FP8)
    for bad, message in (
        (0.0, "^k_scale: got 0.0"),
        ([1.0, 2.0], r"k_scale: got shape \(2,\), allowed are one number and \(3,\)"),
        ([1.0, -2.0, 3.0], r"^k_scale\[1\]: got .*-2\.0"),
        ([1.0, 2.0, 1e-60], r"^k_scale\[2\]: got"),
        ([1.0, 2.0, np.inf], r"^k_scale\[2\]: got"),
        ("1", "^k_scale: got '1'"),
        (None, "k_scale: got None, an fp8 cache needs it"),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            KVCache(rig.gpu, layout, 2, k_scale=bad, v_scale=1.0)
    pool = rig.gpu.zeros(layout.pool_shape(2), np.uint8)
    cache = KVCache(rig.gpu, layout, 2, k_scale=0.5, v_scale=0.25)
    for call in (
        lambda: KVCache(rig.gpu, layout, 2),
        lambda: KVCache(rig.gpu, layout_of(NVFP4), 2, value_layout=layout),
        lambda: KVCache.wrap(rig.gpu, layout, pool, pool, k_scale=1.0),
        lambda: cache.set_scales(0.125, None),
    ):
        with pytest.raises(ArgumentValueError, match=r"[kv]_scale: got None, an fp8 cache needs it"):
            call()
    assert (cache.k_scale, cache.v_scale) == (0.5, 0.25)


def test_layouts_that_no_kernel_takes(rig: Rig) -> None:
    """Refused where the cache is made, with what is allowed."""
    for fmt in FORMATS:
        plain = layout_of(fmt)
        scales = scales_of(fmt)
        for layout, message in (
            (dataclasses.replace(plain, head_dim=272), "its head_dim: got 272, allowed are 16, 32, .*, 256"),
            (dataclasses.replace(plain, block_size=257), "its block_size: got 257, allowed is 1 to 256"),
            (
                dataclasses.replace(plain, block_stride_override=plain.block_bytes + 8),
                rf"its block_stride_bytes is {plain.block_bytes + 8}, which must be a multiple of 16: "
                rf"CacheLayout\(..., block_stride_override={plain.block_bytes + 16}\)",
            ),
        ):
            with pytest.raises(ArgumentValueError, match=f"^layout: {message}"):
                KVCache(rig.gpu, layout, 2, **scales)
            with pytest.raises(ArgumentValueError, match=f"^layout: {message}"):
                KVCache.wrap(rig.gpu, layout, 1 << 20, 1 << 20, num_blocks=2, **scales)
            with pytest.raises(ArgumentValueError, match=f"^(layout|value_layout): {message}"):
                KVCache(rig.gpu, plain, 2, value_layout=layout, **scales)
    odd = CacheLayout(NVFP4, 3, 16, 1)
    with pytest.raises(
        ArgumentValueError, match=r"^layout: its data_section_bytes is 24, .* data_section_override=32\)"
    ):
        KVCache(rig.gpu, odd, 2)
    cache = KVCache(rig.gpu, dataclasses.replace(odd, data_section_override=32), 2)
    key = rig.upload(np.full((1, 3, 16), 0x40C0, np.uint16))  # 6.0, which the format holds exactly
    cache.write(key, key, rig.upload(np.array([1])), stream=rig.stream)
    assert (rig.download(cache.gather([1], 1, stream=rig.stream)[0]) == 6.0).all()
    with pytest.raises(ArgumentTypeError, match="heads_first: got 'no'"):
        CacheLayout(BF16, 2, 64, 16, heads_first="no")  # type: ignore[arg-type]


def test_block_ids_that_are_none(rig: Rig) -> None:
    cache, upload = KVCache(rig.gpu, layout_of(BF16), 5), rig.upload
    given: tuple[tuple[Any, str], ...] = (
        ([0.0, 1.0], "block_ids: got dtype float64, allowed are integers"),
        ([True, False], "block_ids: got dtype bool"),
        ([True, 1], "block_ids: got a bool, allowed are integers"),
        (["0", "1"], "block_ids: got dtype <U1"),
        ([[0], [1]], r"block_ids: got shape \(2, 1\), allowed is one axis"),
        ([[0], [1, 2]], "block_ids: .*inhomogeneous"),
        ([0, 2**31], "block_ids: got 2147483648, allowed are 32-bit integers"),
        ([0, 2**70], "block_ids: got dtype object"),
        (iter([0, 1]), "got (a )?list_iterator, allowed"),
        ({0, 1}, "got (a )?set, allowed"),
        (upload(np.zeros((2, 1), np.int32)), r"block_ids: got shape \(2, 1\)"),
        (upload(np.zeros(2, np.int64)), "block_ids: got dtype int64, allowed: int32"),
    )
    for ids, message in given:
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"^{message}|: {message}"):
            cache.gather(ids, 5, stream=rig.stream)
    for pairs, message in (
        (iter([(0, 1)]), "got (a )?list_iterator, allowed"),
        ([(True, False)], "pairs: got dtype bool"),
        ([(True, 2)], "pairs: got a bool"),
        ([(0, 1), (2,)], "pairs: .*inhomogeneous"),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            cache.copy_blocks(pairs, stream=rig.stream)


def test_results_that_share_memory(rig: Rig) -> None:
    """One would be written over the other, or over the cache."""
    cache = KVCache(rig.gpu, layout_of(BF16), 5)
    both = rig.gpu.zeros((9, HEADS, HEAD_DIM), np.float32)
    pool, v_pool = (
        array.view(np.uint16).reshape(-1)[: 4 * HEADS * HEAD_DIM].reshape(4, HEADS, HEAD_DIM)
        for array in (cache.k_pool, cache.v_pool)
    )
    for out_k, out_v, message in (
        (both[:4], both[:4], "out_k: its memory, .* is shared with out_v"),
        (both[:4], both[3:7], "out_k: its memory, .* is shared with out_v"),
        (pool, both[:4], "out_k: its memory, .* is shared with k_pool"),
        (both[:4], pool, "out_v: its memory, .* is shared with k_pool"),
        (v_pool, both[:4], "out_k: its memory, .* is shared with v_pool"),
        (both[:4], v_pool, "out_v: its memory, .* is shared with v_pool"),
    ):
        with pytest.raises(ArgumentValueError, match=f"^{message}"):
            cache.gather([0], 4, out_k, out_v, stream=rig.stream)
    cache.gather([0], 4, both[:4], both[4:8], stream=rig.stream)


def test_a_format_that_has_no_writer_is_no_other() -> None:
    layout = CacheLayout(CacheFormat("fp6", np.dtype(np.uint8), 2), 1, 16, 16)
    with pytest.raises(KeyError, match="fp6"):
        _format_arguments(layout, Scale(1.0), Scale(1.0))


def test_pools_without_blocks(rig: Rig) -> None:
    """Their strides say nothing: some libraries have 0 for all of them."""
    layout = layout_of(BF16)
    bits = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), layout.pool_shape(0), (0,) * 4)
    pool = bits if rig.name == "emulator" else rig.gpu.zeros(layout.pool_shape(0), np.uint16)
    cache = KVCache.wrap(rig.gpu, layout, pool, pool)  # where there are no blocks, none is shared
    assert cache.num_blocks == 0
    key, value = (rig.upload(array) for array in random_tokens(2))
    cache.write(key, value, rig.upload(np.array([0, -1])), stream=rig.stream)
    assert np.isnan(rig.download(cache.gather([0], 2, stream=rig.stream)[0])).all()


def test_pools_that_are_not_what_the_layout_says(rig: Rig) -> None:
    gpu, layout = rig.gpu, layout_of(BF16)
    good = gpu.zeros(layout.pool_shape(4), layout.pool_dtype)
    wide = gpu.zeros((4, 2, *layout.pool_shape(1)[1:]), layout.pool_dtype)
    other = gpu.zeros((4, BLOCK, HEADS + 1, HEAD_DIM), layout.pool_dtype)
    elements, values = good.size, gpu.zeros(layout.pool_shape(4), layout.pool_dtype)
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
        (None, "^k_pool: got NoneType"),
    ):
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            KVCache.wrap(gpu, layout, pool, values)
    with pytest.raises(ArgumentValueError, match="got 4 and 3 blocks"):
        KVCache.wrap(gpu, layout, good, values[:3])
    with pytest.raises(ArgumentValueError, match="num_blocks: got 5, but k_pool holds 4 blocks"):
        KVCache.wrap(gpu, layout, good, values, num_blocks=5)
    with pytest.raises(ArgumentValueError, match=r"k_pool: got address 0x\w+8, it must be a multiple of 16"):
        KVCache.wrap(gpu, layout, good.reshape(-1)[4:], values, num_blocks=3)
    with pytest.raises(ArgumentValueError, match=r"pool: got shape .* allowed is \[num_blocks, 2, \.\.\.\]"):
        KVCache.wrap_interleaved(gpu, layout, good)
    with pytest.raises(ArgumentTypeError, match="layout: got 'bf16'"):
        KVCache(gpu, "bf16", 4)  # type: ignore[arg-type]
    address = gpu.pointer(good)
    sized = DevicePtr(gpu.pointer(values), values.nbytes)
    assert KVCache.wrap(gpu, layout, address, sized, num_blocks=4).num_blocks == 4
    assert KVCache.wrap(gpu, layout, good.reshape(-1), values).num_blocks == 4


@formats
def test_pools_whose_blocks_share_memory(rig: Rig, fmt: CacheFormat) -> None:
    """One pool for both, or two that reach into each other; K and V may lie in turns, blocks or sections."""
    gpu, plain = rig.gpu, layout_of(fmt)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if fmt == FP8 else {}
    stride, itemsize = plain.block_stride_bytes, plain.pool_dtype.itemsize
    raw = gpu.zeros(8 * stride // itemsize, plain.pool_dtype)
    address = gpu.pointer(raw)

    def wrap(offset: int, k: CacheLayout = plain, v: CacheLayout = plain) -> None:
        cache = KVCache.wrap(
            gpu, k, address, address + offset, value_layout=v, num_blocks=4 if k == plain else 2, **scales
        )
        assert cache.num_blocks in (2, 4)

    def refuse(offset: int, k: CacheLayout = plain, v: CacheLayout = plain) -> None:
        with pytest.raises(ArgumentValueError, match=r"^k_pool, v_pool: got .* whose blocks share memory"):
            wrap(offset, k, v)

    for offset in (0, 16, stride, 3 * stride, 4 * stride - 16):
        refuse(offset)
    wrap(4 * stride)
    with pytest.raises(ArgumentValueError, match="share memory"):
        KVCache.wrap(gpu, plain, raw, raw, **scales)
    turns, wider = (dataclasses.replace(plain, block_stride_override=n * stride) for n in (2, 3))
    for offset in (0, 16, stride - 16, stride + 16, 2 * stride, 3 * stride - 16):
        refuse(offset, turns, turns)
    wrap(stride, turns, turns)
    wrap(3 * stride, turns, turns)
    wrap(stride, turns, wider)  # K at 0 and 2 strides, V at 1 and 4
    refuse(stride + 16, turns, wider)
    refuse(stride, wider, turns)  # K at 0 and 3, V at 1 and 3


def test_sections_that_lie_in_turns(rig: Rig) -> None:
    """A block of K's values, V's values, K's scales and V's scales."""
    plain = layout_of(NVFP4)
    data, scales = plain.data_section_bytes, plain.block_bytes - plain.data_section_bytes
    assert (data % 16, scales % 16) == (0, 0)
    k, v = (
        dataclasses.replace(plain, data_section_override=section, block_stride_override=2 * (data + scales))
        for section in (2 * data, data + scales)
    )
    pool = rig.gpu.zeros(3 * k.block_stride_bytes, np.uint8)
    cache = KVCache.wrap(rig.gpu, k, pool, pool[data:], value_layout=v, num_blocks=2)
    written = random_tokens(8)
    given = [rig.upload(array) for array in (*written, np.arange(8))]
    cache.write(*given, stream=rig.stream)
    plain_cache = KVCache(rig.gpu, plain, 2)
    plain_cache.write(*given, stream=rig.stream)
    for found, wanted in zip(
        cache.gather([0, 1], 8, stream=rig.stream),
        plain_cache.gather([0, 1], 8, stream=rig.stream),
        strict=True,
    ):
        np.testing.assert_array_equal(rig.download(found), rig.download(wanted))
    with pytest.raises(ArgumentValueError, match="share memory"):  # V's scales in K's next values
        KVCache.wrap(rig.gpu, k, pool, pool[data:], num_blocks=2)
