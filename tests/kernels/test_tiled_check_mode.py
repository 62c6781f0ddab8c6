"""The streaming kernels in the emulator's check mode, under every schedule."""

from __future__ import annotations

import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.formats import FORMATS, CacheFormat
from tests.kernels import test_tiled_formats as cases
from tests.oracle import assert_matches
from tests.poison import Shape
from tests.rig import Rig
from tests.streaming.contexts import decode, make_decoder, open_all, pinned_store, random_context

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


@pytest.fixture(params=("fifo", "reverse", "random"))
def rig(request: pytest.FixtureRequest) -> Rig:
    """The checking emulator under every schedule."""
    return Rig(EmulatorBackend(check="full", schedule=request.param, seed=7))


@formats
@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(9, 1, 128, 8), Shape(72, 1, 64)], ids=str)
def test_steps(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    cases.test_against_float64(rig, fmt, 3, shape)


@formats
def test_splits_and_their_merge(rig: Rig, fmt: CacheFormat) -> None:
    cases.test_splits(rig, fmt, 5)


@formats
def test_the_decoder(rig: Rig, fmt: CacheFormat) -> None:
    context = random_context(fmt, [70, 20])
    decoder = make_decoder(rig, context, tile_blocks=2, resident_blocks=1)
    stores = [pinned_store(rig, context, seq) for seq in range(2)]
    assert_matches(decode(rig, decoder, context, open_all(decoder, stores)), context.expected())
