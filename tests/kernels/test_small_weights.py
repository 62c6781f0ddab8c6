"""How small a weight may be before it counts as nothing, as the pages say it."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest

from cupaged import KVCache
from cupaged.decode import Decoder
from cupaged.formats import FP8, NVFP4, CacheFormat, CacheLayout
from tests.rig import Rig
from tools.import_graph import ROOT

TOLD = {
    "README.md": r"loses bits, below 2\^-(\d+) it counts\s+as nothing",
    "docs/numerics.md": r"weights below 2\^-(\d+) of the row's largest, FP8 and NVFP4 \| count as nothing",
    "docs/kernels.md": r"coarser down to 2\^-(\d+), and zero below",
}


def smallest_weight() -> int:
    """The power of two, below 1, that all pages name."""
    found = {page: re.findall(pattern, (ROOT / page).read_text()) for page, pattern in TOLD.items()}
    powers = {int(power) for (power,) in found.values()}
    assert len(powers) == 1, found
    return powers.pop()


@pytest.mark.parametrize("fmt", [FP8, NVFP4], ids=lambda fmt: fmt.name)
def test_weights_count_down_to_what_the_pages_say(rig: Rig, fmt: CacheFormat) -> None:
    """Two tokens: one of far larger score and a V of zero, one whose V comes out times its weight."""
    power = smallest_weight()
    cache = KVCache(rig.gpu, CacheLayout(fmt, 1, 16, 16), 1, k_scale=1.0, v_scale=1.0)
    k, v = (np.zeros((2, 1, 16), ml_dtypes.bfloat16) for _ in "kv")
    k[1, 0, 0], v[1] = -6.0, 6.0  # of which NVFP4 holds both: scale 1, code 6
    cache.write(rig.upload(k), rig.upload(v), rig.upload(np.arange(2)), stream=rig.stream)
    decoder = Decoder.for_cache(cache, 1, 1)
    assert _output(rig, decoder, cache, power) == 6.0 * 2.0**-power
    assert _output(rig, decoder, cache, power + 1.25) == 0.0


def _output(rig: Rig, decoder: Decoder, cache: KVCache, below: float) -> float:
    """A dim of the row where the second token's score is so many powers of two below the first's."""
    q = np.zeros((1, 1, 16), ml_dtypes.bfloat16)
    q[0, 0, 0] = 1.0
    tables, lengths = np.zeros((1, 1), np.int32), np.array([2], np.int32)
    out, scale = rig.full_bf16((1, 1, 16)), below * math.log(2) / 6
    inputs = (rig.upload(q), cache, rig.upload(tables), rig.upload(lengths), out)
    decoder.decode(*inputs, stream=rig.stream, softmax_scale=scale)
    return float(rig.download_bf16(out)[0, 0, 3])
