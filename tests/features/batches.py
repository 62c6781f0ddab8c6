"""Batches for everything that a `Decoder` can be asked for, with float64 results.

A `Setup` is one kind of decoder, a `Batch` one call of it. Every byte that no live token owns is poison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.decode import Decoder
from cupaged.formats import BF16, FP8, CacheLayout, write_tokens
from tests import oracle
from tests.features.setups import Setup
from tests.oracle import F64
from tests.paths import HOST_DTYPES, decode_guarded
from tests.poison import Guarded, decode_pool
from tests.rig import DeviceGuarded, Rig, bits

LSE_ATOL, LSE_RTOL = 3e-4, 1e-5
NAN_BYTE = 0xFF  # NaN in BF16, FP8 and as the scale of an NVFP4 group
LENGTHS = (1, 150, 17, 0, 64, 16)
_NATURAL_SCALES = {FP8: (0.0171, 0.0123)}  # for normally distributed K and V


class Scales(NamedTuple):
    """Dequantisation scales of a call: for all heads, and by head on top of them."""

    k_scale: float | None = None
    v_scale: float | None = None
    k_scales: npt.NDArray[np.float32] | None = None
    v_scales: npt.NDArray[np.float32] | None = None

    def of_heads(self, which: int, heads: int) -> F64:
        """``[num_kv_heads]``, what K (0) or V (1) is multiplied by."""
        one, each = self[which], self[which + 2]
        factor = 1.0 if one is None else float(np.float32(one))
        return np.full(heads, factor) * (1.0 if each is None else each.astype(np.float64))


@dataclass(frozen=True)
class Call:
    """What a call adds to its setup; the defaults are those of `Decoder.decode`.

    Attributes:
        q_gap: elements of NaN behind each query token of q, as where it is sliced out of a packed QKV.
        extra_columns: of the table, beyond the longest sequence; never looked up.
        seed: of tokens, queries and block ids.
        poison: byte of everything that no live token owns.
        q_magnitude: factor on q, which the softmax scale takes back.
        others: as `Decoder.decode` has them.
    """

    lengths: tuple[int, ...] = LENGTHS
    window: int = 0
    softmax_scale: float | None = None
    sinks: tuple[float, ...] | None = None
    scales: Scales | None = None
    q_gap: int = 0
    extra_columns: int = 0
    seed: int = 5
    poison: int = NAN_BYTE
    q_magnitude: float = 1.0


@dataclass
class Result:
    """Of one call: out ``[num_seqs, query_tokens, num_q_heads, head_dim]``, lse without the last axis."""

    out: npt.NDArray[Any]
    lse: npt.NDArray[np.float32]

    def assert_same_bits(self, other: Result) -> None:
        np.testing.assert_array_equal(bits(self.out), bits(other.out))
        np.testing.assert_array_equal(self.lse.view(np.uint32), other.lse.view(np.uint32))

    def assert_near(self, out: F64, lse: F64) -> None:
        """Within the suite's tolerances of float64; zeros of rows that attend to nothing are exact."""
        got = self.out.astype(np.float64)
        rows = (-1, *got.shape[2:])
        oracle.assert_values_match(got.reshape(rows), out.reshape(rows))
        assert not got[out == 0.0][np.isneginf(np.broadcast_to(lse[..., None], out.shape)[out == 0.0])].any()
        np.testing.assert_allclose(self.lse, lse, atol=LSE_ATOL, rtol=LSE_RTOL)


@dataclass
class Batch:
    """Tokens in pools on the host.

    Attributes:
        q: ``[num_seqs, query_tokens, num_q_heads, head_dim]`` of the setup's q_dtype.
        storage: one or two guarded byte arrays that hold the pools.
        offsets: bytes into its storage where the K and the V pool begin.
        tables: int32 ``[num_seqs, max_blocks_per_seq]``.
        seq_lens: int32 ``[num_seqs]``.
        dense: K and V of each sequence as the oracle reads them, float64 ``[n, num_kv_heads, head_dim]``.
    """

    setup: Setup
    call: Call
    q: npt.NDArray[Any]
    storage: tuple[Guarded, ...]
    offsets: tuple[int, int]
    tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    dense: tuple[list[F64], list[F64]] = field(repr=False)

    @property
    def num_blocks(self) -> int:
        return self.storage[0].array.size // self.setup.layouts()[0].block_stride_bytes

    def expected(self) -> tuple[F64, F64]:
        """Float64 out and LSE."""
        setup, call = self.setup, self.call
        scale = call.softmax_scale or setup.head_dim**-0.5 / call.q_magnitude
        results = [
            oracle.query_tokens_float64(
                self.q[seq].astype(np.float64),
                self.dense[0][seq],
                self.dense[1][seq],
                float(np.float32(scale)),
                window=call.window,
                causal=setup.causal,
                soft_cap=setup.soft_cap,
                sinks=None if call.sinks is None else np.array(call.sinks, np.float32),
            )
            for seq in range(len(self.q))
        ]
        return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])

    def arguments(self, rig: Rig) -> dict[str, Any]:
        """Of `Decoder.decode`, but for the outputs."""
        setup, call = self.setup, self.call
        pools = _upload_pools(rig, self)
        scales = call.scales or default_scales(setup)
        arguments: dict[str, Any] = {
            "q": rig.upload(self._q_storage()),
            "k_cache": pools[0],
            "v_cache": pools[1],
            "block_tables": rig.upload(self.tables),
            "seq_lens": rig.upload(self.seq_lens),
            "num_seqs": len(self.q),
            "max_blocks_per_seq": self.tables.shape[1],
            "stream": rig.stream,
            "sliding_window": call.window,
            "num_blocks": self.num_blocks,
        }
        if call.q_gap:
            arguments["q_stride"] = setup.heads[0] * setup.head_dim + call.q_gap
        if call.q_magnitude != 1.0:
            arguments["softmax_scale"] = setup.head_dim**-0.5 / call.q_magnitude
        if call.softmax_scale is not None:
            arguments["softmax_scale"] = call.softmax_scale
        if call.sinks is not None:
            arguments["sinks"] = rig.upload(np.array(call.sinks, np.float32))
        for name, value in scales._asdict().items():
            if value is not None:
                arguments[name] = rig.upload(value) if isinstance(value, np.ndarray) else value
        return arguments

    def run(self, rig: Rig, decoder: Decoder | None = None, **changed: Any) -> Result:
        """Decode into guarded outputs full of NaN."""
        decoder = decoder or self.setup.decoder(rig)
        arguments = {**self.arguments(rig), **changed}
        found = decode_guarded(rig, decoder, self.q.shape, arguments, self.setup.q_dtype)
        assert found.lse is not None
        return Result(found.out, found.lse)

    def check(self, rig: Rig, decoder: Decoder | None = None) -> Result:
        """Decode and compare with float64."""
        result = self.run(rig, decoder)
        result.assert_near(*self.expected())
        return result

    def check_twice(self, rig: Rig) -> Result:
        """As `check`; a second launch gives the same bits, so the first left its counters as they were."""
        result = self.check(rig)
        self.run(rig).assert_same_bits(result)
        return result

    def _q_storage(self) -> npt.NDArray[Any]:
        if not self.call.q_gap:
            return self.q
        rows = self.q.reshape(-1, self.setup.heads[0] * self.setup.head_dim)
        wide = np.full((len(rows), rows.shape[1] + self.call.q_gap), np.nan, np.float32).astype(rows.dtype)
        wide[:, : rows.shape[1]] = rows
        return wide.reshape(-1)


def default_scales(setup: Setup) -> Scales:
    """Those that FP8 pools need for normally distributed tokens, none for others."""
    k, _ = _NATURAL_SCALES.get(setup.key, (None, None))
    _, v = _NATURAL_SCALES.get(setup.value, (None, None))
    return Scales(k, v)


def make_batch(
    setup: Setup,
    call: Call | None = None,
    *,
    q: npt.ArrayLike | None = None,
    keys: Sequence[npt.NDArray[Any]] | None = None,
    values: Sequence[npt.NDArray[Any]] | None = None,
) -> Batch:
    """Tokens at random blocks of poisoned pools.

    Args:
        setup: kind of decoder.
        call: what is asked of it.
        q: ``[num_seqs, query_tokens, num_q_heads, head_dim]``; None: normally distributed.
        keys, values: per sequence ``[n, num_kv_heads, head_dim]``; None: normally distributed.
    """
    call = call or Call()
    rng = np.random.default_rng(call.seed)
    shape = (len(call.lengths), setup.query_tokens, setup.heads[0], setup.head_dim)
    query = rng.standard_normal(shape) * call.q_magnitude if q is None else np.asarray(q)
    tokens = [
        [_random_tokens(rng, n, setup) for n in call.lengths] if given is None else given
        for given in (keys, values)
    ]
    tables, num_blocks = _tables(rng, setup, call)
    storage, offsets = _poisoned(setup, num_blocks, call.poison)
    scales = call.scales or default_scales(setup)
    dense = []
    slots = _slots(tables, call.lengths, setup.block_size)
    for which, layout in enumerate(setup.layouts()):
        pool = _pool_view(storage[which % len(storage)].array, offsets[which], layout)
        factors = scales.of_heads(which, setup.heads[1])
        scale = 1.0 if layout.format == BF16 else factors.astype(np.float32)
        write_tokens(pool, layout, np.concatenate(tokens[which]), slots, scale=scale)
        decoded = _oracle_view(pool, layout) * factors[:, None]
        rows = decoded.reshape(-1, *decoded.shape[2:])[slots]
        dense.append(np.split(rows, np.cumsum(call.lengths)[:-1]))
    return Batch(
        setup,
        call,
        query.astype(HOST_DTYPES[setup.q_dtype]),
        storage,
        offsets,
        tables,
        np.array(call.lengths, np.int32),
        (dense[0], dense[1]),
    )


def check(rig: Rig, setup: Setup, call: Call | None = None) -> Result:
    """Random tokens against float64."""
    return make_batch(setup, call).check(rig)


class Closed(NamedTuple):
    """A batch with its results by formula."""

    batch: Batch
    out: F64
    lse: F64

    def check(self, rig: Rig) -> Result:
        result = self.batch.run(rig)
        result.assert_near(self.out, self.lse)
        return result


def zero_query(setup: Setup, call: Call, tags: str = "tokens") -> Closed:
    """q = 0 over random keys: the mean of what is attended, and its ln; a sink counts e^sink more tokens.

    Args:
        setup: kind of decoder.
        call: what is asked of it; scales are 1 where they are needed.
        tags: what V is made of: "tokens" (fixture U: V[t] = t + 1, or 1.5 * 2^(t mod 4) where that is not
            exact), "heads" (H: 1.5 * 2^(h mod 8) for KV head h), or "dims" (D: d for BF16, otherwise E2M1
            values with a scale of its own for each group).
    """
    ones = Scales(*(1.0 if fmt == FP8 else None for fmt in (setup.key, setup.value)))
    call = dataclasses.replace(call, scales=call.scales or ones)
    values = [_tagged(setup, n, tags, max(call.lengths) <= 255) for n in call.lengths]
    q = np.zeros((len(values), setup.query_tokens, setup.heads[0], setup.head_dim))
    batch = make_batch(setup, call, q=q, values=values)
    extra = np.zeros(setup.heads[0]) if call.sinks is None else np.exp(np.array(call.sinks, np.float32))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for seq, token in np.ndindex(q.shape[:2]):
        begin, end = attended(setup, call, seq, token)
        total = end - begin + extra
        sums = np.repeat(values[seq][begin:end].sum(axis=0), setup.heads[0] // setup.heads[1], axis=0)
        out[seq, token] = sums / np.where(total == 0, 1.0, total)[:, None]
        with np.errstate(divide="ignore"):
            lse[seq, token] = np.log(total)
    return Closed(batch, out, lse)


def attended(setup: Setup, call: Call, seq: int, token: int) -> tuple[int, int]:
    """Tokens of a sequence that one query token sees: [begin, end)."""
    newer = setup.query_tokens - 1 - token if setup.causal else 0
    end = max(0, call.lengths[seq] - newer)
    return max(0, end - call.window) if call.window else 0, end


def _tagged(setup: Setup, n: int, tags: str, short: bool) -> F64:
    """V ``[n, num_kv_heads, head_dim]``, exact in its format."""
    t, head, dim = np.arange(n), np.arange(setup.heads[1]), np.arange(setup.head_dim)
    exact = setup.value == BF16
    if tags == "tokens":
        found = (t + 1.0 if exact and short else 1.5 * 2.0 ** (t % 4))[:, None, None]
    elif tags == "heads":
        found = 1.5 * 2.0 ** (head % 8)[None, :, None]
    else:
        found = (dim * 1.0 if exact else oracle.E2M1_TABLE[dim % 16] * 2.0 ** (dim // 16 % 7))[None, None]
    return np.broadcast_to(found, (n, setup.heads[1], setup.head_dim)).copy()


def _random_tokens(rng: np.random.Generator, n: int, setup: Setup) -> npt.NDArray[Any]:
    size = (n, setup.heads[1], setup.head_dim)
    return rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)


def _tables(rng: np.random.Generator, setup: Setup, call: Call) -> tuple[npt.NDArray[np.int32], int]:
    """Random blocks; block 0 and a few more belong to nobody."""
    counts = [-(-n // setup.block_size) for n in call.lengths]
    num_blocks = 1 + sum(counts) + 2
    free = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)
    tables = np.full((len(counts), max([1, *counts]) + call.extra_columns), 0x7FFFFFFF, np.int32)
    for row, (begin, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
        tables[row, :count] = free[begin : begin + count]
    return tables, num_blocks


def _poisoned(setup: Setup, num_blocks: int, poison: int) -> tuple[tuple[Guarded, ...], tuple[int, int]]:
    layouts = setup.layouts()
    sizes = [num_blocks * layout.block_stride_bytes for layout in layouts]
    offsets = (0, 0)
    if setup.pools == "interleaved":
        sizes, offsets = sizes[:1], (0, layouts[0].block_stride_bytes // 2)
    elif setup.pools == "layer":
        key, value = (layout.block_stride_bytes // 3 for layout in layouts)
        offsets = (key, value)
    storage = tuple(Guarded.allocate((size,), np.uint8) for size in sizes)
    for guarded in storage:
        guarded.array[...] = poison
    return storage, offsets


def _pool_view(array: Any, offset: int, layout: CacheLayout) -> Any:
    """Of bytes on the host: the pool that begins there, flat."""
    return array[offset:].view(layout.pool_dtype)


def _oracle_view(pool: npt.NDArray[Any], layout: CacheLayout) -> F64:
    """Float64 ``[num_blocks, block_size, num_kv_heads, head_dim]``, the last block's padding made up."""
    missing = -pool.size % layout.cache_stride
    whole = np.concatenate([pool, np.zeros(missing, pool.dtype)])
    return decode_pool(whole, layout)


def _slots(tables: npt.NDArray[np.int32], lengths: Sequence[int], block_size: int) -> npt.NDArray[np.int64]:
    """Of all tokens, sequence after sequence."""
    counts = np.array(lengths, np.int64)
    seq = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return tables[seq, at // block_size].astype(np.int64) * block_size + at % block_size


def _upload_pools(rig: Rig, batch: Batch) -> tuple[Any, Any]:
    """The two pools on the device: shaped where they are tight, as a caller would have them."""
    uploaded: list[DeviceGuarded] = [rig.upload_guarded(storage) for storage in batch.storage]
    pools = []
    for which, layout in enumerate(batch.setup.layouts()):
        flat = uploaded[which % len(uploaded)].array[batch.offsets[which] :]
        pool = flat.view(np.uint16) if layout.format == BF16 else flat
        shape = layout.pool_shape(batch.num_blocks)
        pools.append(pool.reshape(shape) if math.prod(shape) == pool.size else pool)
    return pools[0], pools[1]
