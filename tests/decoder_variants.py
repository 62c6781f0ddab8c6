"""What a `Decoder` can be asked for beside one query token over one format: cases with float64 results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.decode import Decoder
from cupaged.formats import BF16, FP8, CacheFormat, CacheLayout, gather_tokens, write_tokens
from tests.oracle import F64, assert_matches
from tests.rig import BF16_NAN, Rig, bits

_SCALES = {"k_scale": 0.0171, "v_scale": 0.0123}  # of FP8 caches


@dataclass(frozen=True)
class Variant:
    """One kind of decoder with a batch for it.

    Attributes:
        key, value: cache formats.
        lengths: tokens of each sequence.
        heads: query and KV heads.
        heads_first: order of a block's rows.
        query_tokens: tokens of each sequence that a call decodes.
        causal: none of them sees those after it.
        soft_cap: as for `Decoder`.
        sinks: whether each head has a sink.
        window: newest tokens attended, 0 = all.
        max_seqs: of the decoder; the batch's size by default.
        options: what else `Decoder` is made with.
    """

    key: CacheFormat = BF16
    value: CacheFormat = BF16
    lengths: tuple[int, ...] = (1, 150, 17, 0, 64)
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    block_size: int = 16
    heads_first: bool = False
    query_tokens: int = 1
    causal: bool = True
    soft_cap: float | None = None
    sinks: bool = False
    window: int = 0
    max_seqs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rig: Rig, *, launches: int = 1) -> None:
        """Decode, and compare with float64; each of several launches must give the same bits."""
        batch = _Batch(self)
        decoder = Decoder(
            rig.gpu,
            batch.layouts[0],
            self.heads[0],
            self.max_seqs or len(self.lengths),
            value_layout=batch.layouts[1],
            query_tokens=self.query_tokens,
            causal=self.causal,
            soft_cap=self.soft_cap,
            **self.options,
        )
        results = [batch.decode(rig, decoder) for _ in range(launches)]
        for out, lse in results:
            np.testing.assert_array_equal(bits(out), bits(results[0][0]))
            np.testing.assert_array_equal(lse, results[0][1])
        expected, expected_lse = batch.expected()
        assert_matches(results[0][0], expected)
        np.testing.assert_allclose(results[0][1], expected_lse, atol=3e-4, rtol=1e-5)


class _Batch:
    """Random tokens in pools on the host."""

    def __init__(self, variant: Variant) -> None:
        self.variant = v = variant
        self.layouts = tuple(
            CacheLayout(fmt, v.heads[1], v.head_dim, v.block_size, heads_first=v.heads_first)
            for fmt in (v.key, v.value)
        )
        rng = np.random.default_rng(5)
        counts = [-(-n // v.block_size) for n in v.lengths]
        ids = rng.permutation(sum(counts) + 1).astype(np.int32)
        self.tables = np.full((len(v.lengths), max(counts)), -1, np.int32)
        for row, (begin, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
            self.tables[row, :count] = ids[begin : begin + count]
        scales = [
            factor if layout.format == FP8 else 1.0
            for factor, layout in zip(_SCALES.values(), self.layouts, strict=True)
        ]
        self.pools, self.dense = [], []
        for layout, scale in zip(self.layouts, scales, strict=True):
            pool = np.full(layout.pool_shape(len(ids)), 0xFF, np.uint8)  # NaN, or the largest value
            if layout.format == BF16:
                pool = np.full(layout.pool_shape(len(ids)), BF16_NAN, np.uint16).view(ml_dtypes.bfloat16)
            for row, length in enumerate(v.lengths):
                at = np.arange(length)
                blocks = self.tables[row, at // v.block_size].astype(np.int64)
                tokens = rng.standard_normal((length, v.heads[1], v.head_dim)).astype(ml_dtypes.bfloat16)
                write_tokens(pool, layout, tokens, blocks * v.block_size + at % v.block_size, scale=scale)
            self.pools.append(pool)
            self.dense.append(
                [
                    gather_tokens(pool, layout, self.tables[row], n, scale=scale).astype(np.float64)
                    for row, n in enumerate(v.lengths)
                ]
            )
        shape = (len(v.lengths), v.query_tokens, v.heads[0], v.head_dim)
        self.q = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        self.sinks = rng.standard_normal(v.heads[0]).astype(np.float32) if v.sinks else None

    def decode(self, rig: Rig, decoder: Decoder) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Output ``[num_seqs * query_tokens, num_q_heads, head_dim]`` and its LSE."""
        v = self.variant
        output = rig.full_bf16(self.q.shape)
        lse = rig.gpu.asarray(np.full(self.q.shape[:3], np.nan, np.float32))
        names = [name for name, layout in zip(_SCALES, self.layouts, strict=True) if layout.format == FP8]
        decoder.decode(
            rig.upload(self.q),
            *(rig.upload(pool) for pool in self.pools),
            rig.upload(self.tables),
            rig.upload(np.array(v.lengths, np.int32)),
            output,
            num_seqs=len(v.lengths),
            max_blocks_per_seq=self.tables.shape[1],
            stream=rig.stream,
            lse=lse,
            sliding_window=v.window,
            sinks=None if self.sinks is None else rig.upload(self.sinks),
            **{name: _SCALES[name] for name in names},
        )
        rows = (-1, *self.q.shape[2:])
        return rig.download_bf16(output).reshape(rows), rig.download(lse).reshape(rows[:2])

    def expected(self) -> tuple[F64, F64]:
        """The same in float64."""
        v = self.variant
        outs, lses = np.zeros(self.q.shape), np.full(self.q.shape[:3], -np.inf)
        ratio = v.heads[0] // v.heads[1]
        for seq, length in enumerate(v.lengths):
            k, value = (np.repeat(dense[seq], ratio, axis=1) for dense in self.dense)
            for token in range(v.query_tokens):
                end = max(0, length - (v.query_tokens - 1 - token)) if v.causal else length
                begin = max(0, end - v.window) if v.window else 0
                q = self.q[seq, token].astype(np.float64)
                scores = np.einsum("hd,thd->ht", q, k[begin:end]) / np.sqrt(v.head_dim)
                if v.soft_cap is not None:
                    scores = v.soft_cap * np.tanh(scores / v.soft_cap)
                if self.sinks is not None:
                    scores = np.concatenate([scores, self.sinks.astype(np.float64)[:, None]], axis=1)
                if not scores.shape[1]:
                    continue
                largest = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - largest)
                total = weights.sum(axis=1, keepdims=True)
                lses[seq, token] = (largest + np.log(total))[:, 0]
                shares = (weights / total)[:, : end - begin]
                outs[seq, token] = np.einsum("ht,thd->hd", shares, value[begin:end])
        return outs.reshape(-1, *outs.shape[2:]), lses.reshape(-1, lses.shape[2])
