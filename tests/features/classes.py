"""A small case of each class of `Decoder` kernel, for what runs every kernel in a checker."""

from __future__ import annotations

from cupaged.formats import FORMATS, FP8, NVFP4
from tests.features.batches import Call
from tests.features.setups import Setup

LENGTHS = (1, 150, 17, 0, 64)
SINKS = (0.4, -1.2, 0.1, 2.0, -0.3, 0.7, -2.1, 1.1)
MANY = tuple(150 if seq % 97 == 5 else seq % 3 for seq in range(600))

# All latency levels are compiled, as a user's decoder has them; the batch's room for tokens chooses.
CLASSES: dict[str, tuple[Setup, Call]] = {
    "mixed": (Setup(FP8, NVFP4, heads_first=True, max_seqs=5, level=None), Call(LENGTHS)),
    "query-tokens": (
        Setup(query_tokens=3, soft_cap=2.0, max_seqs=5, level=None),
        Call(LENGTHS, window=40, sinks=SINKS),
    ),
    # Two slices of the heads, whose blocks share the one sequence.
    "slices": (Setup.of(FP8, heads=(32, 32), head_dim=16, max_seqs=1, level=None), Call((700,))),
    # Two slices of the query rows of one KV head.
    "row-slices": (
        Setup(heads=(20, 1), head_dim=16, query_tokens=7, max_seqs=3, level=None),
        Call((200, 0, 3)),
    ),
    # Scales in pieces of 2 bytes, and a slice of an NVFP4 block, which is not one piece.
    "by-lanes": (
        Setup.of(NVFP4, heads=(4, 2), head_dim=16, block_size=1, max_seqs=5, level=None),
        Call(LENGTHS),
    ),
    "joined-slices": (Setup.of(NVFP4, heads=(32, 32), head_dim=16, max_seqs=5, level=None), Call(LENGTHS)),
}
# More sequences than a block's shared memory has room for, most of them one token long.
MANY_CLASS = (Setup(heads=(2, 1), head_dim=16, max_seqs=600, level=None), Call(MANY))
CHUNKED_CLASSES = {
    fmt: (
        Setup.of(fmt, split_tokens=32, max_blocks_per_seq=19, max_seqs=6, level=None),
        Call((1, 300, 17, 0, 64, 130), sinks=SINKS),
    )
    for fmt in FORMATS
}
