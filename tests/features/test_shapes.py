"""Head dims, ratios, KV heads and block sizes of `Decoder`, K and V in any formats.

Here each size is compiled once, the formats taking turns; `test_sweeps.py` has all of them on a GPU.
"""

from __future__ import annotations

import pytest

from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, NVFP4, CacheFormat
from cupaged.registry.rules import SUPPORTED_HEAD_DIMS
from tests.features.batches import Call, check, zero_query
from tests.features.setups import PAIRS, Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
HEAD_DIMS = tuple(range(16, 257, 16))
RATIOS = (1, 3, 7, 16, 33, 64, 128)
KV_HEADS = (1, 2, 3, 5, 8, 12, 17, 32, 71)
BLOCK_SIZES = (1, 2, 3, 5, 7, 12, 24, 100, 255, 256)
# One stage and its neighbours, whatever its tiles; a sequence that many blocks share.
BORDERS = (15, 16, 17, 31, 33, 63, 64, 65, 0, 1, 127, 129, 700)


def _turn(index: int) -> CacheFormat:
    return FORMATS[index % 3]


def test_the_head_dims_are_the_multiples_of_16() -> None:
    assert SUPPORTED_HEAD_DIMS == HEAD_DIMS


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dim(rig: Rig, head_dim: int) -> None:
    """Over all pairs of formats in turn, in every second one with several query tokens."""
    index = head_dim // 16 - 1
    key, value = PAIRS[(4 * index) % 9]
    setup = Setup(key=key, value=value, head_dim=head_dim, heads=(4, 2))
    check(rig, setup, Call(lengths=BORDERS))
    check(rig, setup, Call(lengths=(250, 3), window=37, sinks=(0.5, -1.0, 2.0, 0.0)))
    zero_query(setup, Call(lengths=(5, 70)), "dims").check(rig)


@formats
@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_head_dim_that_leaves_lanes_idle(rig: Rig, fmt: CacheFormat, head_dim: int) -> None:
    check(rig, Setup.of(fmt, head_dim=head_dim, heads=(4, 2)), Call(lengths=BORDERS))


@formats
@pytest.mark.parametrize("head_dim", [0, 8, 24, 100, 257, 272, 512])
def test_other_head_dims_are_refused(rig: Rig, fmt: CacheFormat, head_dim: int) -> None:
    if (head_dim in (8, 24, 100) and fmt == NVFP4) or head_dim in (0, 257):
        match = "head_dim"  # no layout has it
    else:
        match = rf"head_dim: got {head_dim}, allowed are {', '.join(map(str, HEAD_DIMS))}"
    with pytest.raises(ArgumentValueError, match=match):
        Setup.of(fmt, head_dim=head_dim).decoder(rig)


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratio(rig: Rig, ratio: int) -> None:
    key, value = PAIRS[(4 * RATIOS.index(ratio) + 2) % 9]
    setup = Setup(key=key, value=value, heads=(2 * ratio, 2), head_dim=32)
    check(rig, setup, Call(lengths=(1, 90, 0, 700)))
    zero_query(setup, Call(lengths=(5, 70)), "heads").check(rig)


@pytest.mark.parametrize("heads", KV_HEADS)
def test_kv_heads(rig: Rig, heads: int) -> None:
    index = KV_HEADS.index(heads)
    setup = Setup.of(_turn(index), heads=(heads, heads), head_dim=32)
    check(rig, setup, Call(lengths=(1, 90, 0, 400)))
    check(rig, setup, Call(lengths=(33,), window=9))
    zero_query(setup, Call(lengths=(5, 70)), "heads").check(rig)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_size(rig: Rig, block_size: int) -> None:
    key, value = PAIRS[(4 * BLOCK_SIZES.index(block_size) + 1) % 9]
    setup = Setup(key=key, value=value, heads=(4, 2), head_dim=32, block_size=block_size)
    lengths = (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 300, 0)
    check(rig, setup, Call(lengths=lengths))
    check(rig, setup, Call(lengths=lengths, window=block_size + 1))


@pytest.mark.parametrize("block_size", [257, 1024])
def test_larger_blocks_are_refused(rig: Rig, block_size: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"block_size: got {block_size}, allowed is 1 to 256"):
        Setup(block_size=block_size).decoder(rig)


@pytest.mark.parametrize(
    ("heads", "match"),
    [
        ((3, 2), "got 3, 2; num_q_heads must be a positive multiple"),
        ((0, 2), "got 0, 2"),
        ((129, 1), r"got 129, 1 \(ratio 129\); allowed are ratios of 1 to 128"),
        ((512, 2), r"ratio 256"),
    ],
    ids=str,
)
def test_other_ratios_are_refused(rig: Rig, heads: tuple[int, int], match: str) -> None:
    with pytest.raises(ArgumentValueError, match=match):
        Setup(heads=heads).decoder(rig)


@formats
def test_mean_of_zero_query(rig: Rig, fmt: CacheFormat) -> None:
    """Fixture U with windows, by formula."""
    setup = Setup.of(fmt)
    for window, lengths in ((0, (1, 15, 16, 17, 33, 127, 129, 255, 0)), (4, (20, 3, 4, 5, 250))):
        result = zero_query(setup, Call(lengths=lengths, window=window)).check(rig)
        if fmt == BF16 and window:
            assert result.out[0, 0, 0, 0] == 18.5
