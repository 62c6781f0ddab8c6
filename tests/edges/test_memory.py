"""Where things lie: block ids far out, strides, interleaved pools, nothing to do."""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat, CacheLayout
from tests.oracle import assert_matches
from tests.paths import PATHS, arguments, call, decoder_of, path_format_pairs, run, run_uploaded
from tests.poison import Options, PagedCase, Shape, random_case
from tests.rig import Rig, bits, upload_case

edge = pytest.mark.edge
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
everywhere = pytest.mark.parametrize(
    ("path", "fmt"), path_format_pairs(), ids=[f"{p}-{f.name}" for p, f in path_format_pairs()]
)

FAR = (131_071, 131_073, 262_147)  # around 2^32 bytes of a pool of 32 KiB blocks, and beyond 2^33
GIB = 1 << 30


def lazy_pool(rig: Rig, layout: CacheLayout, num_blocks: int) -> Any:
    """A pool of which only the pages that are touched take memory (on a GPU: all of it)."""
    shape, dtype = layout.pool_shape(num_blocks), np.dtype(layout.pool_dtype)
    stored = np.dtype(np.uint16) if dtype == ml_dtypes.bfloat16 else dtype
    num_bytes = int(np.prod(shape, dtype=np.int64)) * stored.itemsize
    if rig.name == "emulator":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), stored).reshape(shape)
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 2 * num_bytes + GIB:
        pytest.skip(f"needs {2 * num_bytes / GIB:.0f} GiB of device memory, {free / GIB:.0f} are free")
    return rig.gpu.empty(shape, stored)


def put(rig: Rig, pool: Any, where: int, block: npt.NDArray[Any]) -> None:
    """Copy one block into a pool."""
    bits_of = block.view(np.uint16) if block.dtype == ml_dtypes.bfloat16 else block
    pool[where] = bits_of if rig.name == "emulator" else rig.gpu.asarray(np.ascontiguousarray(bits_of))


@edge("block-id-131071")
@edge("big-memory")
@pytest.mark.big
@formats
def test_blocks_far_out_read_as_block_0_does(rig: Rig, fmt: CacheFormat) -> None:
    """The same tokens at block 0, around 2^31 elements and 2^32 bytes, and beyond: the same bits."""
    layout = CacheLayout(fmt, 8, 128, 16)
    # A quantised block is smaller: as many more of them reach as far.
    factor = 32_768 // layout.block_stride_bytes + (32_768 % layout.block_stride_bytes > 0)
    ids = [0, *(n * factor for n in FAR)]
    source = random_case(fmt, [16], Shape(16, 8, 128, 16), options=Options(spare_blocks=0))
    pools = [lazy_pool(rig, layout, ids[-1] + 1) for _ in range(2)]
    own = int(source.block_tables[0, 0])
    for pool, host in zip(pools, (source.k_pool, source.v_pool), strict=True):
        for block in ids:
            put(rig, pool, block, host[own])
    case = dataclasses.replace(
        source,
        q=np.repeat(source.q, len(ids), axis=0),
        block_tables=np.array(ids, np.int32)[:, None],
        seq_lens=np.full(len(ids), 16, np.int32),
        k_dense=source.k_dense * len(ids),
        v_dense=source.v_dense * len(ids),
    )
    up = upload_case(rig, case)
    for path in PATHS:
        out = run_uploaded(up, path, k_cache=pools[0], v_cache=pools[1], num_blocks=ids[-1] + 1).out
        assert_matches(out, case.expected()[0])
        for row in range(1, len(ids)):
            np.testing.assert_array_equal(bits(out[row]), bits(out[0]))


@edge("block-id-131071")
@edge("big-memory")
@pytest.mark.big
@formats
def test_writes_far_out_land_there_alone(rig: Rig, fmt: CacheFormat) -> None:
    """A slot in block 131,073 of a pool beyond 2^32 bytes; an offset of 32 bits would land 4 GiB below."""
    layout = CacheLayout(fmt, 8, 128, 16)
    factor = 32_768 // layout.block_stride_bytes + (32_768 % layout.block_stride_bytes > 0)
    far = FAR[1] * factor
    pools = [lazy_pool(rig, layout, far + 1) for _ in range(2)]
    wrapped = far - (1 << 32) // layout.block_stride_bytes
    watched = [0, 1, wrapped, wrapped + 1, far - 1]
    blank = np.zeros(layout.pool_shape(1)[1:], np.uint16 if fmt == BF16 else np.uint8)
    for pool in pools:
        for block in (*watched, far):
            put(rig, pool, block, blank)
    token = np.random.default_rng(0).standard_normal((1, 8, 128)).astype(ml_dtypes.bfloat16)
    arrays = {"key": rig.upload(token), "value": rig.upload(token), "k_cache": pools[0], "v_cache": pools[1]}
    call(rig, f"reshape_and_cache_{fmt.name}", **arrays,
         slot_mapping=rig.upload(np.array([far * 16 + 3], np.int64)), num_tokens=1, num_kv_heads=8,
         head_dim=128, block_size=16, k_scale=0.02, v_scale=0.02, key_stride=1024, value_stride=1024,
         cache_stride=layout.cache_stride, block_stride_bytes=layout.block_stride_bytes,
         data_section_bytes=layout.data_section_bytes)  # fmt: skip
    for pool in pools:
        for block in watched:
            assert not rig.download(pool[block]).any(), f"block {block} was written"
        assert rig.download(pool[far]).any()


def interleaved(rig: Rig, case: PagedCase) -> dict[str, Any]:
    """K and V of a block behind each other in one pool: the launchers' arguments for it."""
    layout, blocks = case.layout, case.num_blocks
    bytes_of = [pool.reshape(blocks, -1).view(np.uint8) for pool in (case.k_pool, case.v_pool)]
    item = 2 if layout.format == BF16 else 1
    pool = rig.gpu.asarray(np.stack(bytes_of, axis=1).reshape(-1).view(f"u{item}"))
    stride = 2 * layout.block_stride_bytes
    found: dict[str, Any] = {"k_cache": pool, "v_cache": pool[stride // 2 // item :]}
    return found | {"cache_stride": stride // item, "block_stride_bytes": stride}


# The launchers of BF16 pools take no block stride: they read contiguous pools only.
STRIDED = [(p, f) for p, f in path_format_pairs() if f != BF16 or not p.startswith("s")]


@edge("interleaved-pool")
@pytest.mark.parametrize(("path", "fmt"), STRIDED, ids=[f"{p}-{f.name}" for p, f in STRIDED])
def test_interleaved_pools(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case = random_case(fmt, [1, 100, 37], Shape(4, 2, 64, 16))
    apart = run(rig, case, path).out
    up = upload_case(rig, case)
    given = interleaved(rig, case)
    if path == "decoder":
        layout = dataclasses.replace(case.layout, block_stride_override=given["block_stride_bytes"])
        up.case = dataclasses.replace(case, layout=layout)
        given = {name: given[name] for name in ("k_cache", "v_cache")}
    np.testing.assert_array_equal(bits(run_uploaded(up, path, **given).out), bits(apart))


@edge("q-strides")
@everywhere
def test_queries_inside_packed_qkv(rig: Rig, path: str, fmt: CacheFormat) -> None:
    if path.startswith("tiled"):
        pytest.skip("the tiled step takes contiguous queries")
    plain = random_case(fmt, [70, 3, 16], Shape(32, 8, 128, 16))
    packed = dataclasses.replace(plain, options=dataclasses.replace(plain.options, q_gap=5120 - 32 * 128))
    assert packed.q_stride == 5120
    np.testing.assert_array_equal(bits(run(rig, packed, path).out), bits(run(rig, plain, path).out))


@edge("q-strides")
@pytest.mark.parametrize("path", ["single", "splits2", "decoder"])
@pytest.mark.parametrize("how", ["negative", "zero", "fortran"])
def test_queries_with_strides_that_no_kernel_follows(rig: Rig, path: str, how: str) -> None:
    up = upload_case(rig, random_case(BF16, [70, 3], Shape(4, 2, 64, 16)))
    q = rig.upload(up.case.q)
    if how == "negative":
        q = q[::-1]
    elif how == "zero":
        xp: Any = np if rig.name == "emulator" else __import__("cupy")
        q = xp.broadcast_to(q[:1], q.shape)
    else:
        q = q.swapaxes(1, 2).copy().swapaxes(1, 2)
    with pytest.raises(ArgumentValueError, match="q"):
        run_uploaded(up, path, q=q)


@edge("nothing-to-do")
@formats
def test_a_decoder_with_nothing_to_do(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [5], Shape(8, 2, 64, 16))
    decoder = decoder_of(rig, case)
    empty = rig.gpu.zeros((0, 8, 64), np.uint16)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if fmt == FP8 else {}
    decoder.decode(empty, 0, 0, 0, 0, empty, num_seqs=0, max_blocks_per_seq=0, stream=rig.stream, **scales)
    up = upload_case(rig, dataclasses.replace(case, seq_lens=np.zeros(1, np.int32)))
    out = run_uploaded(up, "decoder").out
    assert not bits(out).any()


@edge("num-seqs-100000")
@pytest.mark.parametrize("path", ["single", "splits2", "decoder"])
@formats
def test_a_hundred_thousand_sequences(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """Sequence i holds i mod 4 tokens of three blocks that all share; on the emulator a tenth of them."""
    count = 10_000 if rig.name == "emulator" else 100_000
    few = random_case(fmt, [0, 1, 2, 3], Shape(2, 1, 64, 16))
    order = np.arange(count) % 4
    case = dataclasses.replace(
        few,
        q=few.q[order],
        block_tables=few.block_tables[order],
        seq_lens=few.seq_lens[order],
        k_dense=tuple(few.k_dense[i] for i in order[:4]),
        v_dense=tuple(few.v_dense[i] for i in order[:4]),
    )
    try:
        out = run(rig, case, path).out
    except ArgumentValueError as error:
        assert path == "decoder"
        assert "max_seqs" in str(error)  # noqa: PT017
        pytest.skip(f"said so: {error}")
    assert_matches(out[:4], few.expected()[0])
    np.testing.assert_array_equal(bits(out), bits(out[:4])[order])


@edge("big-memory")
@pytest.mark.big
@pytest.mark.gpu
def test_outputs_beyond_two_to_the_31_elements(rig: Rig) -> None:
    """q and output of 525,000 sequences x 32 heads x 128: 2^31 elements and more, 4 GiB each."""
    if rig.name == "emulator":
        pytest.skip("4 GiB of queries are for a GPU")
    import cupy

    count, heads, dim = 525_000, 32, 128
    assert count * heads * dim > 2**31
    few = random_case(BF16, [0, 1, 17, 30], Shape(heads, 8, dim, 16))
    small = run(rig, few, "single").out
    up = upload_case(rig, few)
    order = cupy.arange(count) % 4
    q = rig.upload(few.q)[order]
    output = cupy.full((count, heads, dim), 0x7FC0, cupy.uint16)
    named = arguments(up) | {
        "q": q,
        "q_stride": heads * dim,
        "num_seqs": count,
        "block_tables": up.tables[order],
        "seq_lens": up.lengths[order],
        "output": output,
    }
    call(rig, "paged_decode_attn_bf16", **named)
    expected = rig.gpu.asarray(bits(small))[order]
    assert bool((output == expected).all())


@edge("q-strides")
def test_strides_must_be_integers(rig: Rig) -> None:
    up = upload_case(rig, random_case(BF16, [5]))
    for path in ("single", "decoder"):
        with pytest.raises(ArgumentTypeError, match="q_stride"):
            run_uploaded(up, path, q_stride=256.0)
