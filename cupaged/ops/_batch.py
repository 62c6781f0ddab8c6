"""Sizes of a decode launch: checked once for each set of them, and compared with the arrays given.

Nothing here synchronises. Bare addresses are taken at their word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupaged.errors import ArgumentValueError
from cupaged.ops._checks import (
    check_heads,
    check_positive,
    check_row_stride,
    check_rows,
    check_score_scale,
    check_shape,
    check_size,
    remembered,
)
from cupaged.registry.rules import check_head_dim

__all__ = ["DecodeBatch", "decode_batch"]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """What every decode launcher asks of its common arguments. Made by `decode_batch`.

    Attributes:
        outputs: elements of the output, num_seqs * query_tokens * num_q_heads * head_dim.
        others: as the launchers have them.
    """

    max_blocks_per_seq: int
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    q_stride: int
    query_tokens: int
    outputs: int

    def check(
        self, q: Any, block_tables: Any, seq_lens: Any, inv_sqrt_d: Any, table_stride: int | None = None
    ) -> None:
        """The arrays hold what the sizes say, and the softmax scale is one.

        Rows of block_tables are table_stride entries apart; where None, as far as they are long.
        """
        check_score_scale("inv_sqrt_d", inv_sqrt_d)
        if type(q) is type(block_tables) is type(seq_lens) is int:
            return
        self._check_q(q)
        columns = self.max_blocks_per_seq
        table: Any = getattr(block_tables, "shape", ())
        if len(table) == 2 and table[0] > 1 and table[1] != columns:
            raise ArgumentValueError(
                f"max_blocks_per_seq: got {columns}, but block_tables has {table[1]} columns"
            )
        stride = columns if table_stride is None else table_stride
        reach = (self.num_seqs - 1) * stride + columns if self.num_seqs else 0
        check_size("block_tables", block_tables, reach)
        check_size("seq_lens", seq_lens, self.num_seqs)

    def _check_q(self, q: Any) -> None:
        row = (self.num_q_heads, self.head_dim)
        tail = (self.query_tokens, *row) if len(getattr(q, "shape", ())) == 4 else row
        check_shape("q", q, tail)
        tokens = len(tail) == 3
        check_row_stride(
            "q_stride",
            self.q_stride * (self.query_tokens if tokens else 1),
            self.num_q_heads * self.head_dim * (self.query_tokens if tokens else 1),
            self.num_seqs * (1 if tokens else self.query_tokens),
            q,
            "q",
        )


@remembered
def decode_batch(
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_stride: int,
    query_tokens: int = 1,
) -> DecodeBatch:
    """The sizes, checked as far as they alone can be."""
    check_heads(num_q_heads, num_kv_heads)
    check_positive(head_dim=head_dim, block_size=block_size)
    check_head_dim(head_dim)
    check_rows("q_stride", q_stride, num_q_heads * head_dim, num_seqs * query_tokens, None, "q")
    outputs = num_seqs * query_tokens * num_q_heads * head_dim
    return DecodeBatch(
        max_blocks_per_seq,
        num_seqs,
        num_q_heads,
        num_kv_heads,
        head_dim,
        block_size,
        q_stride,
        query_tokens,
        outputs,
    )
