"""Memory in pieces of one size at one distance, as blocks lie in a pool, and whether two such share any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Run", "meet"]


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of memory.

    Attributes:
        begin: address of the first.
        nbytes: of each.
        count: of them; 1 where it is not known.
        stride: bytes from the begin of one to that of the next.
    """

    begin: int
    nbytes: int
    count: int = 1
    stride: int = 0

    @property
    def end(self) -> int:
        """Address behind the last piece; `begin` where there is none."""
        if self.count < 1 or self.nbytes < 1:
            return self.begin
        return self.begin + (self.count - 1) * self.stride + self.nbytes


def meet(first: Sequence[Run], second: Sequence[Run]) -> bool:
    """Whether any byte is in both; what lies between pieces is in neither."""
    return any(_meet(a, b) for a in first for b in second)


def _meet(a: Run, b: Run) -> bool:
    if a.begin >= b.end or b.begin >= a.end or a.begin == a.end or b.begin == b.end:
        return False
    a, b = _distinct(a), _distinct(b)
    if a.count > b.count:
        a, b = b, a
    if a.count == 1 or a.stride == b.stride:
        return bool(_at(a, b, a.begin, a.count))
    begins = a.begin + a.stride * np.arange(a.count, dtype=np.int64)  # each by itself
    return bool(np.any(_at(a, b, begins, 1)))


def _distinct(run: Run) -> Run:
    return run if run.stride else Run(run.begin, run.nbytes)


def _at(a: Run, b: Run, begin: Any, count: int) -> Any:
    """Whether `count` pieces of `a` from `begin` on, as far apart as those of `b`, meet `b`.

    Piece i of a and piece j of b share a byte where m = i - j is a whole number with
    distance - a.nbytes < m * stride < distance + b.nbytes.
    """
    distance, stride = b.begin - begin, b.stride or 1
    low = np.maximum((distance - a.nbytes) // stride + 1, 1 - b.count)
    high = np.minimum(-(-(distance + b.nbytes) // stride) - 1, count - 1)
    return low <= high
