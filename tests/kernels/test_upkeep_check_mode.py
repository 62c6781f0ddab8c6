"""The kernels of the cache object and of merging in the emulator's check mode, under every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.errors import KernelFault
from cupaged.formats import FORMATS, CacheFormat
from tests.kernels import test_kv_cache as cache_cases
from tests.kernels import test_kv_cache_moves as move_cases
from tests.kernels import test_merge_states as merge_cases
from tests.kernels.test_check_mode import SCHEDULES, make_rig
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


@pytest.fixture(params=SCHEDULES)
def rig(request: pytest.FixtureRequest) -> Rig:
    """The checking emulator."""
    return make_rig(request.param, seed=3)


@formats
def test_the_cache_object(rig: Rig, fmt: CacheFormat) -> None:
    for padded in (False, True):
        cache_cases.test_write_and_gather(rig, fmt, fmt.name != "bf16", padded)
    cache_cases.test_heads_first(rig, fmt, False)
    cache_cases.test_interleaved_pools(rig, fmt)
    move_cases.test_copied_blocks(rig, fmt)
    move_cases.test_pairs_on_the_device_and_a_tensor_left_out(rig, fmt)
    move_cases.test_swapped_blocks_come_back(rig, fmt)


@merge_cases.KINDS
def test_merging(rig: Rig, source: np.dtype[np.generic], target: np.dtype[np.generic]) -> None:
    merge_cases.test_against_float64(rig, 33, 64, source, target)


def test_merging_in_place(rig: Rig) -> None:
    """Every lane reads the LSEs before one of them is replaced."""
    merge_cases.test_in_place_and_twice(rig)


def test_too_few_blocks_are_found(rig: Rig) -> None:
    """A list of blocks that is an address, and too short: the read beyond it is a fault."""
    cache = cache_cases.KVCache(rig.gpu, cache_cases.layout_of(FORMATS[0]), 4)
    ids = rig.gpu.asarray(np.zeros(2, np.int32))
    with pytest.raises(KernelFault, match="block_ids"):
        cache.gather(rig.gpu.pointer(ids), 9, stream=rig.stream)
