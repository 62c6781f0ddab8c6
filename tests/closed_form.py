"""Cases whose right output follows from a formula, for every cache format.

Each function returns a poisoned `PagedCase` and the exact float64 ``[num_seqs, num_q_heads, head_dim]``.
All values survive quantisation exactly, so that the formula holds for the stored cache: they come from
`exact_values`, the one place here that knows the formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.formats import CacheFormat
from tests.oracle import E2M1_TABLE, F64
from tests.poison import Options, PagedCase, Poison, Shape, build_case

Values = Callable[[int, Shape], F64]  # (n, shape) -> V [n, num_kv_heads, head_dim]


@dataclass(frozen=True)
class ExactValues:
    """What a format stores exactly with the scale 1.

    Attributes:
        ladder: eight increasing values above 0, each also where it is the same in all lanes; the fifth is at
            least 16.
        lanes: 16 values for a row's lanes in turn.
        group_factors: what these may be multiplied by from one 16 lanes to the next, in turn.
        pair: one value alone in its row, at least 3 to tell; and one that is the same in all lanes.
        counts: integers from 0 to this one are exact, alone and in any row; 0 if that is not so.
    """

    ladder: F64
    lanes: F64
    group_factors: F64
    pair: tuple[float, float]
    counts: int = 0


_LADDER: F64 = 1.5 * 2.0 ** np.arange(8)
_FACTORS: F64 = 2.0 ** np.arange(7)
_EXACT = {
    "bf16": ExactValues(_LADDER, E2M1_TABLE, _FACTORS, (4.0, 1.0), counts=255),
    "fp8": ExactValues(_LADDER, E2M1_TABLE, _FACTORS, (4.0, 1.0)),
    # Group scales, absmax / 6, that are powers of two.
    "nvfp4": ExactValues(_LADDER, E2M1_TABLE, _FACTORS, (3.0, 1.5)),
}


def exact_values(fmt: CacheFormat) -> ExactValues:
    """Of a format; one that has none here yet fails by name."""
    assert fmt.name in _EXACT, f"say in tests/closed_form.py what {fmt.name} stores exactly"
    return _EXACT[fmt.name]


def fixture_u(
    fmt: CacheFormat,
    seq_lens: Sequence[int],
    shape: Shape | None = None,
    *,
    window: int = 0,
    options: Options | None = None,
) -> tuple[PagedCase, F64]:
    """q = 0, V[t] = t + 1: the mean of what is attended, (n + 1) / 2 without a window.

    Where t + 1 is not exact (quantised formats, and BF16 past n = 255) V[t] = ladder[t mod 4]: 1.5, 3, 6, 12.
    """
    exact = exact_values(fmt)
    counts_up = max([1, *seq_lens]) <= exact.counts

    def tokens(n: int) -> F64:
        t = np.arange(n, dtype=np.float64)
        return t + 1 if counts_up else exact.ladder[np.arange(n) % 4]

    def values(n: int, sizes: Shape) -> F64:
        return np.broadcast_to(tokens(n)[:, None, None], (n, sizes.num_kv_heads, sizes.head_dim)).copy()

    case = _zero_query_case(fmt, seq_lens, shape, values, window, options)
    means = [float(tokens(n)[_first(n, window) :].mean()) if n else 0.0 for n in seq_lens]
    return case, np.broadcast_to(np.array(means)[:, None, None], case.q.shape).copy()


def lse_of_zero_query(case: PagedCase) -> F64:
    """LSE ``[num_seqs, num_q_heads]`` of a case with q = 0: ln of the keys attended, -inf for none."""
    attended = [int(n) - _first(int(n), case.window) for n in case.seq_lens]
    lse = np.array([math.log(n) if n else -math.inf for n in attended])
    return np.broadcast_to(lse[:, None], case.q.shape[:2]).copy()


def fixture_h(
    fmt: CacheFormat,
    seq_lens: Sequence[int] = (5,),
    shape: Shape | None = None,
    *,
    options: Options | None = None,
) -> tuple[PagedCase, F64]:
    """q = 0, V of KV head h = h + 1 (quantised: 1.5 * 2^h): query head i reads floor(i / (Hq / Hkv))."""
    sizes = shape or Shape()
    exact, heads = exact_values(fmt), np.arange(sizes.num_kv_heads)
    counts_up = sizes.num_kv_heads <= exact.counts
    assert counts_up or sizes.num_kv_heads <= len(exact.ladder), "more heads than values"
    tags = heads + 1.0 if counts_up else exact.ladder[heads]

    def values(n: int, sizes: Shape) -> F64:
        return np.broadcast_to(tags[:, None], (n, sizes.num_kv_heads, sizes.head_dim)).copy()

    case = _zero_query_case(fmt, seq_lens, sizes, values, 0, options)
    by_query_head = tags[np.arange(sizes.num_q_heads) // (sizes.num_q_heads // sizes.num_kv_heads)]
    return case, _where_live(case, by_query_head[:, None])


def fixture_d(
    fmt: CacheFormat,
    seq_lens: Sequence[int] = (5,),
    shape: Shape | None = None,
    *,
    options: Options | None = None,
) -> tuple[PagedCase, F64]:
    """q = 0, V in lane d = tag(d): out[d] = tag(d).

    BF16: tag(d) = d. Quantised: the E2M1 value of code d mod 16, times 2^(g mod 7) for group g = d // 16,
    so that neighbouring groups have scales of their own.
    """
    lanes, exact = np.arange((shape or Shape()).head_dim), exact_values(fmt)
    factors = exact.group_factors[lanes // 16 % len(exact.group_factors)]
    tags = lanes.astype(np.float64) if len(lanes) <= exact.counts + 1 else exact.lanes[lanes % 16] * factors

    def values(n: int, sizes: Shape) -> F64:
        return np.broadcast_to(tags, (n, sizes.num_kv_heads, sizes.head_dim)).copy()

    case = _zero_query_case(fmt, seq_lens, shape, values, 0, options)
    return case, _where_live(case, tags)


def fixture_x2(
    fmt: CacheFormat, lane: int, shape: Shape | None = None, *, options: Options | None = None
) -> tuple[PagedCase, F64]:
    """n = 2, K = 0 then c in one lane, q = 1 in that lane, factor 1, V = 0 then v: v / (1 + e^-c).

    c = 4, v = 1 (0.98201); NVFP4 c = 3, v = 1.5.
    """
    sizes = shape or Shape()
    c, v = exact_values(fmt).pair
    q = np.zeros((1, sizes.num_q_heads, sizes.head_dim))
    q[..., lane] = 1.0
    keys = np.zeros((2, sizes.num_kv_heads, sizes.head_dim), np.float32)
    values = np.zeros_like(keys)
    keys[1, :, lane], values[1] = c, v
    case = build_case(fmt, q, [keys], [values], block_size=sizes.block_size, inv_sqrt_d=1.0, options=options)
    return case, np.full(case.q.shape, v / (1.0 + math.exp(-c)))


def fixture_ends(
    fmt: CacheFormat,
    seq_lens: Sequence[int],
    shape: Shape | None = None,
    *,
    window: int = 0,
    options: Options | None = None,
) -> tuple[PagedCase, F64]:
    """Only the first and the last attended token count: the mean of their values, whatever n.

    K = 24 (the ladder's fifth) in one lane for those two and for the token before the first attended one,
    whose V is larger; q = 1 in that lane and the factor 1, so that all others weigh e^-24. V = 1.5 (the
    ladder's first) for the first, 3 for the last (and for a token that is both).
    """
    sizes, ladder = shape or Shape(), exact_values(fmt).ladder
    score, far = ladder[4], ladder[7]
    lane = 5
    q = np.zeros((len(seq_lens), sizes.num_q_heads, sizes.head_dim))
    q[..., lane] = 1.0
    keys, values, expected = [], [], []
    for n in seq_lens:
        key = np.zeros((n, sizes.num_kv_heads, sizes.head_dim), np.float32)
        value = np.zeros_like(key)
        first = _first(n, window)
        if n:
            key[[first, n - 1], :, lane] = score
            value[first], value[n - 1] = ladder[0], ladder[1]
        if first > 0:
            key[first - 1, :, lane], value[first - 1] = score, far
        keys.append(key)
        values.append(value)
        expected.append(0.0 if n == 0 else ladder[1] if first == n - 1 else (ladder[0] + ladder[1]) / 2)
    case = build_case(
        fmt, q, keys, values, block_size=sizes.block_size, inv_sqrt_d=1.0, window=window, options=options
    )
    return case, np.broadcast_to(np.array(expected)[:, None, None], case.q.shape).copy()


def fixture_p(
    fmt: CacheFormat, poison: Poison = Poison.NAN, shape: Shape | None = None
) -> tuple[PagedCase, F64]:
    """U with n = [1, 3] and tails of poison: BF16 1.0 and 2.0, quantised 1.5 and 3.5.

    Every other fixture is poisoned too; built again with `Poison.QUIET` it must give the same bits.
    """
    return fixture_u(fmt, [1, 3], shape, options=Options(poison=poison, unused_column=-1, q_gap=24))


def _zero_query_case(
    fmt: CacheFormat,
    seq_lens: Sequence[int],
    shape: Shape | None,
    values: Values,
    window: int,
    options: Options | None,
) -> PagedCase:
    """q = 0 over random finite keys, which therefore must not matter."""
    sizes = shape or Shape()
    rng = np.random.default_rng(7)
    keys = [rng.standard_normal((n, sizes.num_kv_heads, sizes.head_dim)).astype(np.float32) for n in seq_lens]
    q = np.zeros((len(seq_lens), sizes.num_q_heads, sizes.head_dim))
    tokens: list[npt.NDArray[Any]] = [values(n, sizes) for n in seq_lens]
    return build_case(fmt, q, keys, tokens, block_size=sizes.block_size, window=window, options=options)


def _first(n: int, window: int) -> int:
    return max(0, n - window) if window else 0


def _where_live(case: PagedCase, row: F64) -> F64:
    """``row`` for every sequence that has keys, 0 for the others."""
    live = (case.seq_lens > 0).astype(np.float64)[:, None, None]
    return np.broadcast_to(live * row, case.q.shape).copy()
