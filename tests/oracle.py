"""Float64 oracle of paged decode attention. Imports nothing of cupaged: it must not share its faults.

Dense arrays of one sequence: q ``[num_q_heads, head_dim]``, k and v ``[n, num_kv_heads, head_dim]``.
LSE is in natural logarithm: ln(sum of e^(q.k * scale)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

# ---- decoders, by table ------------------------------------------------------------------------


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3_TABLE: F64 = np.array([_e4m3_value(code) for code in range(256)])
E2M1_TABLE: F64 = np.array([s * x for s in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


def decode_bf16_float64(bits: npt.NDArray[Any]) -> F64:
    """uint16 patterns or bfloat16, any shape, to float64."""
    wide = bits.view(np.uint16).astype("<u4") << 16
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return np.frombuffer(wide.tobytes(), "<f4").reshape(bits.shape).astype(np.float64)


def decode_bf16_pool(
    pool: npt.NDArray[Any], num_kv_heads: int, head_dim: int, block_size: int, cache_stride: int
) -> F64:
    """BF16 pool, ``cache_stride`` elements between blocks.

    Returns ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """
    used = block_size * num_kv_heads * head_dim
    blocks = decode_bf16_float64(pool).reshape(-1, cache_stride)[:, :used]
    return blocks.reshape(-1, block_size, num_kv_heads, head_dim)


def decode_fp8_pool(
    pool: npt.NDArray[Any],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_stride: int,
    scale: float,
) -> F64:
    """FP8 pool, ``cache_stride`` bytes between blocks, times the float32 rounding of ``scale``.

    Returns ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    """
    elements = block_size * num_kv_heads * head_dim
    rows = _block_rows(pool, cache_stride, elements)
    return E4M3_TABLE[rows].reshape(-1, block_size, num_kv_heads, head_dim) * float(np.float32(scale))


def decode_nvfp4_pool(
    pool: npt.NDArray[Any],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride_bytes: int,
    data_section_bytes: int,
) -> F64:
    """NVFP4 pool to ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    rows_per_block = block_size * num_kv_heads
    data_bytes, scale_bytes = rows_per_block * head_dim // 2, rows_per_block * head_dim // 16
    blocks = _block_rows(pool, block_stride_bytes, data_section_bytes + scale_bytes)
    data = blocks[:, :data_bytes].astype(np.int64)
    pairs = np.stack([E2M1_TABLE[data % 16], E2M1_TABLE[data // 16]], axis=-1)
    values = pairs.reshape(len(blocks), -1, 16)  # [num_blocks, groups, 16]
    scales = E4M3_TABLE[blocks[:, data_section_bytes:]]
    return (values * scales[..., None]).reshape(-1, block_size, num_kv_heads, head_dim)


def _block_rows(pool: npt.NDArray[Any], stride: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    raw = np.frombuffer(pool.tobytes(), np.uint8)
    count = max(0, (raw.size - block_bytes) // stride + 1)
    rows = [raw[b * stride : b * stride + block_bytes] for b in range(count)]
    return np.stack(rows) if rows else np.zeros((0, block_bytes), np.uint8)


# ---- attention ---------------------------------------------------------------------------------


def attention_float64(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float, window: int = 0
) -> tuple[F64, F64]:
    """Attention of one query over the last ``window`` (0 = all) of its keys.

    Returns:
        out ``[num_q_heads, head_dim]`` and lse ``[num_q_heads]``; no key at all gives 0 and -inf.
    """
    keys, values = np.asarray(k, np.float64), np.asarray(v, np.float64)
    begin = max(0, len(keys) - window) if window else 0
    o, m, total = partial_float64(q, keys[begin:], values[begin:], scale)
    return _normalised(o, m, total)


def partial_float64(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float
) -> tuple[F64, F64, F64]:
    """One split: o ``[num_q_heads, head_dim]``, m and l ``[num_q_heads]``; an empty one is (0, -inf, 0)."""
    query, keys, values = (np.asarray(a, np.float64) for a in (q, k, v))
    num_q_heads, num_kv_heads = query.shape[0], keys.shape[1]
    assert num_q_heads % num_kv_heads == 0
    o = np.zeros(query.shape)
    m = np.full(num_q_heads, -np.inf)
    total = np.zeros(num_q_heads)
    if len(keys) == 0:
        return o, m, total
    for head in range(num_q_heads):
        kv_head = head // (num_q_heads // num_kv_heads)
        with np.errstate(all="ignore"):
            scores = keys[:, kv_head] @ query[head] * scale
            m[head] = scores.max()
            weights = np.exp(scores - m[head])
            total[head] = weights.sum()
            o[head] = weights @ values[:, kv_head]
    return o, m, total


def query_tokens_float64(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: float,
    *,
    window: int = 0,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: npt.ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Attention of several query tokens of one sequence.

    Args:
        q: ``[query_tokens, num_q_heads, head_dim]``.
        k, v: ``[n, num_kv_heads, head_dim]``, the query tokens' own keys included.
        scale: factor on q.k.
        window: newest keys attended, counted from each query token; 0 = all.
        causal: the last query token is the sequence's newest token and none sees those after it; False: all
            see the whole sequence.
        soft_cap: scores become cap * tanh(score / cap).
        sinks: ``[num_q_heads]``, a further score of each head, which has no value.

    Returns:
        out like q and lse ``[query_tokens, num_q_heads]``; one that sees nothing has 0 and its sink or -inf.
    """
    queries, keys, values = (np.asarray(a, np.float64) for a in (q, k, v))
    out, lse = np.zeros(queries.shape), np.empty(queries.shape[:2])
    for token, query in enumerate(queries):
        end = max(0, len(keys) - (len(queries) - 1 - token)) if causal else len(keys)
        begin = max(0, end - window) if window else 0
        heads, ratio = keys.shape[1], queries.shape[1] // keys.shape[1]
        with np.errstate(all="ignore"):
            scores = query.reshape(heads, ratio, -1) @ keys[begin:end].transpose(1, 2, 0) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
        o, lse[token] = _softmax_with_sinks(scores.reshape(len(query), end - begin), sinks)
        with np.errstate(all="ignore"):
            weighted = o.reshape(heads, ratio, end - begin) @ values[begin:end].transpose(1, 0, 2)
        out[token] = weighted.reshape(query.shape)
    return out, lse


def _softmax_with_sinks(scores: F64, sinks: npt.ArrayLike | None) -> tuple[F64, F64]:
    """Weights like scores ``[rows, n]``, and the LSE of each row; the sinks count in both sums."""
    extra = np.full((len(scores), 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None]
    everything = np.concatenate([scores, extra], axis=1)
    largest = everything.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        weights = np.where(everything == -np.inf, 0.0, np.exp(everything - largest))
        total = weights.sum(axis=1, keepdims=True)
        shares = weights / np.where(total == 0, 1.0, total)
        lse = np.where(total == 0, -np.inf, largest + np.log(np.where(total == 0, 1.0, total)))
    return shares[:, :-1], lse[:, 0]


def decode_float64(
    q: npt.ArrayLike,
    k_pool: F64,
    v_pool: F64,
    block_tables: npt.NDArray[Any],
    seq_lens: npt.NDArray[Any],
    scale: float,
    window: int = 0,
) -> tuple[F64, F64]:
    """Paged decode attention of a batch.

    Args:
        q: ``[num_seqs, num_q_heads, head_dim]``.
        k_pool: dequantised ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        v_pool: likewise.
        block_tables: ``[num_seqs, max_blocks_per_seq]``.
        seq_lens: ``[num_seqs]``.
        scale: factor on q.k.
        window: newest keys attended, 0 = all.

    Returns:
        out ``[num_seqs, num_q_heads, head_dim]`` and lse ``[num_seqs, num_q_heads]``. A sequence that
        attends to a block outside the pool, or past its table's width, is NaN.
    """
    queries = np.asarray(q, np.float64)
    out, lse = np.empty(queries.shape), np.empty(queries.shape[:2])
    for seq, length in enumerate(int(n) for n in seq_lens):
        begin = max(0, length - window) if window else 0
        tokens = [_locate(block_tables[seq], t, k_pool.shape) for t in range(begin, length)]
        if None in tokens:
            out[seq], lse[seq] = np.nan, np.nan
            continue
        where = np.array(tokens, np.int64).reshape(-1, 2)
        k, v = k_pool[where[:, 0], where[:, 1]], v_pool[where[:, 0], where[:, 1]]
        out[seq], lse[seq] = attention_float64(queries[seq], k, v, scale)
    return out, lse


def _locate(table: npt.NDArray[Any], token: int, pool_shape: tuple[int, ...]) -> tuple[int, int] | None:
    column, offset = divmod(token, pool_shape[1])
    if column >= len(table) or not 0 <= int(table[column]) < pool_shape[0]:
        return None
    return int(table[column]), offset


# ---- splits and merging ------------------------------------------------------------------------


def split_ranges(seq_len: int, num_splits: int, window: int = 0, align: int = 1) -> list[tuple[int, int]]:
    """One allowed cut of the attended range into ``num_splits`` contiguous (begin, end) token ranges.

    Inner cuts are multiples of ``align``; surplus splits are empty.
    """
    first = max(0, seq_len - window) if window else 0
    first_unit, last_unit = first // align, -(-seq_len // align)
    per_split = -(-(last_unit - first_unit) // num_splits)
    cuts = [(first_unit + i * per_split) * align for i in range(num_splits + 1)]
    bounded = [min(max(cut, first), seq_len) for cut in cuts]
    return list(itertools.pairwise(bounded))


def workspace_float64(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float, ranges: Sequence[tuple[int, int]]
) -> F64:
    """Split-K workspace of one sequence, ``[num_q_heads, num_splits, head_dim + 2]`` = o, m, l."""
    keys, values = np.asarray(k), np.asarray(v)
    parts = [partial_float64(q, keys[b:e], values[b:e], scale) for b, e in ranges]
    rows = [np.concatenate([o, m[:, None], total[:, None]], axis=1) for o, m, total in parts]
    return np.stack(rows, axis=1)


def merge_float64(workspace: npt.ArrayLike) -> tuple[F64, F64]:
    """Merge splits: ``[..., num_splits, head_dim + 2]`` to out ``[..., head_dim]`` and lse ``[...]``."""
    parts = np.asarray(workspace, np.float64)
    o, m, total = parts[..., :-2], parts[..., -2], parts[..., -1]
    reference = m.max(axis=-1)
    with np.errstate(invalid="ignore"):
        weights = np.where(m == -np.inf, 0.0, np.exp(m - reference[..., None]))
    return _normalised((weights[..., None] * o).sum(axis=-2), reference, (weights * total).sum(axis=-1))


def merge_lse_float64(
    out_a: npt.ArrayLike, lse_a: npt.ArrayLike, out_b: npt.ArrayLike, lse_b: npt.ArrayLike
) -> tuple[F64, F64]:
    """Merge two normalised states: out ``[..., head_dim]``, lse ``[...]``; an empty one has LSE -inf."""
    outs = np.stack(
        np.broadcast_arrays(np.asarray(out_a, np.float64), np.asarray(out_b, np.float64)), axis=-2
    )
    lses = np.stack(
        np.broadcast_arrays(np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)), axis=-1
    )
    # A NaN state is no empty one: it must come through.
    full = (lses != -np.inf).astype(np.float64)
    return merge_float64(
        np.concatenate([np.where(full[..., None] > 0, outs, 0.0), lses[..., None], full[..., None]], axis=-1)
    )


def _normalised(o: F64, m: F64, total: F64) -> tuple[F64, F64]:
    empty = total == 0
    with np.errstate(all="ignore"):
        out = np.where(empty[..., None], 0.0, o / np.where(empty, 1.0, total)[..., None])
        return out, np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, total)))


# ---- comparison --------------------------------------------------------------------------------

MAX_RELATIVE_L2 = 5e-3
MAX_ULPS = 2.0


def bf16_ulp(magnitude: npt.ArrayLike) -> F64:
    """Distance between neighbouring BF16 values at a magnitude; 0 at 0, where only 0 is right."""
    size = np.abs(np.asarray(magnitude, np.float64))
    _, exponent = np.frexp(size)
    return np.where(size == 0, 0.0, np.ldexp(1.0, np.maximum(exponent, -125) - 8))


def assert_matches(out_bf16: npt.NDArray[Any], expected: npt.ArrayLike) -> None:
    """Compare an output with the oracle's.

    NaN and infinities must be where the oracle has them. The rest: relative L2 of every sequence at most
    5e-3, and every element within 2 BF16 ulp of the largest |expected| of its row (sequence and head).

    Args:
        out_bf16: bfloat16 or uint16 ``[num_seqs, num_q_heads, head_dim]``.
        expected: float64 of that shape.

    Raises:
        AssertionError: naming the worst index and both values there.
    """
    assert_values_match(decode_bf16_float64(np.ascontiguousarray(out_bf16)), expected)


def assert_values_match(got: F64, expected: npt.ArrayLike) -> None:
    """`assert_matches` of an output that is float64 already."""
    want = np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    finite = np.isfinite(want)
    special_differs = np.where(finite, ~np.isfinite(got), ~_same_special(got, want))
    if special_differs.any():
        where = tuple(int(i) for i in np.argwhere(special_differs)[0])
        raise AssertionError(
            f"{int(special_differs.sum())} of {want.size} elements differ in NaN or infinity, first at "
            f"{where}: got {got[where]!r}, expected {want[where]!r}"
        )
    known, error = (
        np.where(finite, want, 0.0),
        np.abs(np.where(finite, got - np.where(finite, want, 0.0), 0.0)),
    )
    _assert_ulps(got, want, known, error)
    _assert_relative_l2(known, error)


def _same_special(got: F64, want: F64) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = (np.isnan(got) & np.isnan(want)) | (got == want)
    return same


def _assert_ulps(got: F64, want: F64, known: F64, error: F64) -> None:
    if not want.size:
        return
    allowed = MAX_ULPS * bf16_ulp(np.abs(known).max(axis=-1, keepdims=True))
    excess = error - allowed
    if (excess > 0).any():
        worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))
        raise AssertionError(
            f"{int((excess > 0).sum())} of {want.size} elements are off by more than {MAX_ULPS} BF16 ulp of "
            f"their row, worst at {worst}: got {got[worst]!r}, expected {want[worst]!r}, "
            f"allowed +-{float(allowed[worst[:-1]][0])!r}"
        )


def _assert_relative_l2(known: F64, error: F64) -> None:
    norms, differences = (
        np.linalg.norm(x.reshape(len(x), math.prod(x.shape[1:])), axis=1) for x in (known, error)
    )
    too_far = np.flatnonzero(differences > MAX_RELATIVE_L2 * norms)
    if too_far.size:
        seq = int(too_far[0])
        worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(error[seq])), error[seq].shape))
        raise AssertionError(
            f"sequence {seq}: L2 error {differences[seq]:.3e} against norm {norms[seq]:.3e} exceeds "
            f"{MAX_RELATIVE_L2}; worst at {(seq, *worst)}, off by {float(error[(seq, *worst)])!r}"
        )
