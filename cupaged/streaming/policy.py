"""Which blocks stay on the GPU.

Every step of a decode reads every block of a sequence once, in the same order. No block is hotter than
another, and a cache that keeps what was used last would throw each block out just before it is needed again.
So the set is fixed: a sequence's first blocks, as many as there is room for, are kept and used in place, and
only the rest is streamed. Each block kept saves its bytes on the link at every step; none is ever replaced.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_room(wanted: Sequence[int], room: int) -> list[int]:
    """Blocks that each sequence may keep, `wanted` at most, together `room` at most.

    Equal shares; what a short sequence leaves goes to the longer ones. The bytes that are saved are the same
    for any sharing: equal ones keep a single sequence from taking all.
    """
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for place, i in enumerate(order):
        given[i] = min(wanted[i], room // (len(order) - place))
        room -= given[i]
    return given
