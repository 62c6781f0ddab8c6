"""A launch that ends in the middle, as only the emulator's do, must leave nothing behind."""

from __future__ import annotations

import pytest

from cupaged import EmulatorBackend
from cupaged.errors import KernelFault
from tests.features.batches import Call, make_batch
from tests.features.setups import Setup
from tests.rig import Rig

SETUPS = (Setup(), Setup(split_tokens=48, max_blocks_per_seq=64))


@pytest.mark.edge("faulted-launch")
@pytest.mark.parametrize("setup", SETUPS, ids=["planned", "chunked"])
def test_the_next_call_is_right(setup: Setup) -> None:
    """Four blocks share a sequence, and wait for each other by a counter that no launch sets back.

    Here the second block counts itself in for the first sequence and then writes the second one's row, for
    which there is no room. Three times that, and the counter would say that nobody is to be waited for.
    """
    rig = Rig(EmulatorBackend(check="full", schedule="reverse"))  # the second block runs before the first
    decoder = setup.decoder(rig)
    shared, faulty = (make_batch(setup, Call(lengths=lengths)) for lengths in ((300,), (300, 10, 700)))
    expected = shared.check(rig, decoder)
    arguments = faulty.arguments(rig)
    row = rig.full_bf16(faulty.q.shape[1:])
    short = rig.gpu.pointer(row)  # an address has no size that checks could know
    for _ in range(3):
        with pytest.raises(KernelFault, match="outside every buffer"):
            decoder.decode(**{**arguments, "output": short})
    rig.gpu.schedule = "fifo"
    shared.check(rig, decoder).assert_same_bits(expected)
    faulty.check(rig, decoder)
