"""One sequence of a streaming decoder: its store, the blocks on the GPU, and its tail."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupaged.streaming.store import BlockStore


@dataclass(eq=False)
class StreamedSequence:
    """Made by `StreamingDecoder.open`.

    Attributes:
        store: the complete blocks.
        tail_record: record of the decoder's GPU pool that holds the tail.
        tail_tokens: tokens in it, fewer than block_size.
        kept_tokens: how many of these the store has kept as its tail.
        resident: records of the GPU pool that hold the first blocks of the store.
        closed: whether the decoder has given it up.
    """

    store: BlockStore
    tail_record: int
    tail_tokens: int = 0
    kept_tokens: int = 0
    resident: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self.store.num_blocks * self.store.layout.block_size + self.tail_tokens

    @property
    def streamed(self) -> tuple[int, int]:
        """Blocks that are not on the GPU: first and end."""
        return len(self.resident), self.store.num_blocks
