"""Every cell of the support matrix: what is declared works, on each backend, and what is not raises."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupaged import KVCache, decode_kernels, ops
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, CacheFormat, CacheLayout
from cupaged.registry import limits_of_capability
from cupaged.registry.ring import RingProblem, ring_shape
from cupaged.streaming import PinnedStore, StreamingDecoder, Tail, encode_records
from cupaged.support import BACKENDS, FEATURES, PATHS, Feature, Path, is_supported, matrix, targets
from tests.oracle import F64
from tests.rig import LaunchArguments, Rig, launch_arguments, reduction

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 8
LENGTHS = np.array([20, 3, 33], np.int32)
TABLES = np.array([[5, 2, -1], [0, -1, -1], [7, 1, 4]], np.int32)
ONE_ROW = np.array([[7, 1, 4]] * 3, np.int32)
FEATURE = {feature.name: feature for feature in FEATURES}
PATH = {path.name: path for path in PATHS}
EXACT = np.array([0.5, 1, 1.5, 2, 3, 4, 6])  # what E2M1 holds, and so all formats with one of ...
SCALES = {"k_scale": 0.5, "v_scale": 0.25}  # ... these: integers would hold multiples


@pytest.fixture(autouse=True)
def one_latency_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for small batches are another test's; here they would only be compiled."""
    monkeypatch.setattr(decode_kernels, "latency_levels", lambda spec, limits: (0,) * 4)


@dataclass
class Wish:
    """A decode with one feature over one cache format."""

    feature: str
    fmt: CacheFormat
    tables: npt.NDArray[np.int32] = field(default_factory=lambda: TABLES)
    tokens: int = 1
    scale: float = DIM**-0.5
    window: int = 0
    sinks: npt.NDArray[np.float32] | None = None
    cap: float | None = None
    causal: bool = True
    q_dtype: Any = ml_dtypes.bfloat16

    @property
    def layout(self) -> CacheLayout:
        fields: dict[str, Any] = {"heads_first": self.feature == "heads_first"}
        if self.feature == "block_stride":
            plain = CacheLayout(self.fmt, KV_HEADS, DIM, BLOCK)
            fields["block_stride_override"] = plain.block_stride_bytes + 64
        return CacheLayout(self.fmt, KV_HEADS, DIM, BLOCK, **fields)

    @property
    def value_layout(self) -> CacheLayout:
        if self.feature != "value_format":
            return self.layout
        other = FORMATS[(FORMATS.index(self.fmt) + 1) % len(FORMATS)]
        return CacheLayout(other, KV_HEADS, DIM, BLOCK)

    @property
    def scales(self) -> dict[str, Any]:
        """Of the cache: `SCALES`, in which everything stays exact."""
        by_name: dict[str, Any] = {"k_scale": None, "v_scale": None}
        for name, layout in (("k_scale", self.layout), ("v_scale", self.value_layout)):
            if layout.format.needs_scale or self.feature == "tensor_scales":
                by_name[name] = SCALES[name]
            if self.feature == "head_scales":
                by_name[name] = np.array([*SCALES.values()], np.float32)
        return by_name


def wish(feature: Feature, fmt: CacheFormat) -> Wish:
    """The feature, asked for."""
    rng = np.random.default_rng(1)
    asked: dict[str, dict[str, Any]] = {
        "softmax_scale": {"scale": 0.31},
        "sliding_window": {"window": 5},
        "sinks": {"sinks": rng.standard_normal(HEADS).astype(np.float32)},
        "soft_cap": {"cap": 1.5},
        "query_tokens": {"tokens": 2},
        "not_causal": {"tokens": 2, "causal": False},
        "float16": {"q_dtype": np.float16},
        "table_stride": {"tables": ONE_ROW},
    }
    return Wish(feature.name, fmt, **asked.get(feature.name, {}))


@dataclass
class Problem:
    """Tokens that every format holds exactly, queries, and what attention over them is."""

    rig: Rig
    wish: Wish
    key: npt.NDArray[Any] = field(init=False)
    value: npt.NDArray[Any] = field(init=False)
    q: npt.NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (BLOCKS * BLOCK, KV_HEADS, DIM)

        def draw() -> npt.NDArray[Any]:
            values: npt.NDArray[Any] = EXACT[rng.integers(0, len(EXACT), shape)] * rng.choice(
                [-1.0, 1.0], shape
            )
            values[..., ::16] = 6.0  # the largest of each NVFP4 group, whose scale is then 1
            rounded: npt.NDArray[Any] = values.astype(ml_dtypes.bfloat16)
            return rounded

        self.key, self.value = draw(), draw()
        tokens = (self.wish.tokens,) if self.wish.tokens > 1 else ()
        self.q = (0.5 * rng.standard_normal((3, *tokens, HEADS, DIM))).astype(self.wish.q_dtype)

    def cache(self) -> KVCache:
        """All blocks written: slot s holds token s."""
        wish, rig = self.wish, self.rig
        cache = KVCache(rig.gpu, wish.layout, BLOCKS, value_layout=wish.value_layout, **wish.scales)
        slots = rig.upload(np.arange(BLOCKS * BLOCK))
        cache.write(self.rows(self.key), self.rows(self.value), slots, stream=rig.stream)
        return cache

    def rows(self, array: npt.NDArray[Any]) -> Any:
        """On the device; with NaN between rows where gaps are asked for."""
        if self.wish.feature != "q_stride":
            return self.rig.upload(array)
        wide = np.full((len(array), array.shape[1] + 1, DIM), np.nan, array.dtype)
        wide[:, :-1] = array
        return self.rig.upload(wide)[:, :-1]

    def expected(self) -> tuple[F64, F64]:
        """Output ``[3, tokens, HEADS, DIM]`` and LSE, in float64."""
        wish = self.wish
        q = self.q.reshape(3, wish.tokens, HEADS, DIM).astype(np.float64)
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        for seq, token in np.ndindex(3, wish.tokens):
            end = int(LENGTHS[seq]) - (wish.tokens - 1 - token if wish.causal else 0)
            position = np.arange(max(0, end - wish.window) if wish.window else 0, end)
            slots = wish.tables[seq, position // BLOCK] * BLOCK + position % BLOCK
            k, v = (
                np.repeat(x[slots].astype(np.float64), HEADS // KV_HEADS, axis=1)
                for x in (self.key, self.value)
            )
            scores = np.einsum("hd,thd->ht", q[seq, token], k) * wish.scale
            if wish.cap is not None:
                scores = wish.cap * np.tanh(scores / wish.cap)
            weights, total = np.exp(scores), np.exp(scores).sum(axis=1)
            if wish.sinks is not None:
                total = total + np.exp(wish.sinks.astype(np.float64))
            out[seq, token] = np.einsum("ht,thd->hd", weights, v) / total[:, None]
            lse[seq, token] = np.log(total)
        return out, lse

    def check(self, output: Any, lse: Any = None) -> None:
        expected, expected_lse = self.expected()
        host = self.rig.download(output)
        got = host.view(np.float16 if self.wish.q_dtype == np.float16 else ml_dtypes.bfloat16)
        # Weights and outputs are BF16 or better: 2^-8 of values up to 6.
        np.testing.assert_allclose(got.reshape(expected.shape).astype(np.float64), expected, atol=6 * 2**-8)
        if lse is not None:
            np.testing.assert_allclose(
                self.rig.download(lse).reshape(expected_lse.shape), expected_lse, atol=1e-3
            )


def run_decoder(problem: Problem) -> None:
    wish, rig = problem.wish, problem.rig
    by_feature: dict[str, dict[str, Any]] = {
        "query_tokens": {"query_tokens": 2}, "soft_cap": {"soft_cap": wish.cap},
        "not_causal": {"query_tokens": 2, "causal": False}, "float16": {"q_dtype": "float16"},
        "split_tokens": {"split_tokens": 16, "max_blocks_per_seq": 3},
    }  # fmt: skip
    cache = problem.cache()
    decoder = Decoder.for_cache(cache, HEADS, 3, **by_feature.get(wish.feature, {}))
    lse = rig.gpu.asarray(np.full(problem.q.shape[:-1], np.nan, np.float32))
    options: dict[str, Any] = {
        "stream": rig.stream, "lse": lse, "softmax_scale": wish.scale, "sliding_window": wish.window,
        "sinks": None if wish.sinks is None else rig.upload(wish.sinks),
    }  # fmt: skip
    tables = rig.upload(wish.tables)
    if wish.feature == "table_stride":
        out = rig.full_bf16(problem.q.shape)
        decoder.decode(
            problem.rows(problem.q), cache.k_cache, cache.v_cache, tables[:1], rig.upload(LENGTHS), out,
            num_seqs=3, max_blocks_per_seq=3, table_stride=0, k_scale=cache.k_scale, v_scale=cache.v_scale,
            **options,
        )  # fmt: skip
    else:
        out = decoder.decode(problem.rows(problem.q), cache, tables, rig.upload(LENGTHS), **options)
    problem.check(out, lse)


def run_cascade(problem: Problem) -> None:
    """Over an empty prefix: prefixes are another test's; here each feature passes through."""
    wish, rig = problem.wish, problem.rig
    made: dict[str, dict[str, Any]] = {
        "query_tokens": {"query_tokens": 2}, "soft_cap": {"soft_cap": wish.cap},
        "not_causal": {"query_tokens": 2, "causal": False}, "float16": {"q_dtype": "float16"},
        "split_tokens": {"split_tokens": 16},
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {
        "sliding_window": {"sliding_window": wish.window}, "table_stride": {"table_stride": 0},
    }  # fmt: skip
    cache = problem.cache()
    decoder = CascadeDecoder.for_cache(cache, HEADS, 3, **made.get(wish.feature, {}))
    lse = rig.gpu.asarray(np.full(problem.q.shape[:-1], np.nan, np.float32))
    out = decoder.decode(
        problem.rows(problem.q), cache, rig.upload(np.array([3], np.int32)), 0, rig.upload(wish.tables),
        rig.upload(LENGTHS), stream=rig.stream, lse=lse, softmax_scale=wish.scale,
        sinks=None if wish.sinks is None else rig.upload(wish.sinks), **asked.get(wish.feature, {}),
    )  # fmt: skip
    problem.check(out, lse)


def launcher_arguments(problem: Problem, launcher: str) -> tuple[Any, LaunchArguments]:
    """The cache and what the format takes; among the keywords those that a launcher may lack, too."""
    wish, rig, cache = problem.wish, problem.rig, problem.cache()
    layout = wish.layout
    scales = (cache.k_scale or 1.0, cache.v_scale or 1.0)
    own = launch_arguments(launcher, layout, scales, wish.window)
    ones = rig.gpu.zeros(4, np.float32)
    missing: dict[str, dict[str, Any]] = {
        "lse": {"lse": ones}, "sinks": {"sinks": ones}, "soft_cap": {"soft_cap": 1.5},
        "query_tokens": {"query_tokens": 2}, "not_causal": {"causal": False},
        "float16": {"q_dtype": "float16"}, "heads_first": {"heads_first": True},
        "table_stride": {"table_stride": 0}, "head_scales": {"k_scales": ones},
        "value_format": {"value_layout": wish.value_layout}, "split_tokens": {"split_tokens": 16},
        "tensor_scales": {} if wish.fmt.needs_scale else {"k_scale": 0.5},
        "block_stride": {"cache_stride": layout.block_stride_bytes // 2} if wish.fmt == BF16 else {},
    }  # fmt: skip
    return cache, replace(own, keywords=own.keywords | missing.get(wish.feature, {}))


def run_single(problem: Problem) -> None:
    wish, rig = problem.wish, problem.rig
    name = f"paged_decode_attn_{wish.fmt.name}"
    cache, own = launcher_arguments(problem, name)
    out = rig.full_bf16(problem.q.shape)
    stride = (HEADS + (wish.feature == "q_stride")) * DIM
    getattr(ops, name)(
        rig.gpu, rig.kernel(name), problem.rows(problem.q), cache.k_cache, cache.v_cache, out,
        rig.upload(wish.tables), rig.upload(LENGTHS), 3, 3, HEADS, KV_HEADS, DIM, BLOCK, wish.scale,
        *own.scales, stride, *own.strides, *own.window, rig.stream, num_blocks=BLOCKS, **own.keywords,
    )  # fmt: skip
    problem.check(out)


def run_split(problem: Problem) -> None:
    wish, rig = problem.wish, problem.rig
    fmt = wish.fmt.name
    name = f"paged_decode_attn_splitk_{fmt}"
    cache, own = launcher_arguments(problem, name)
    workspace = rig.gpu.zeros((3, HEADS, 2, DIM + 2), np.float32)
    stride = (HEADS + (wish.feature == "q_stride")) * DIM
    lengths = rig.upload(LENGTHS)
    getattr(ops, name)(
        rig.gpu, rig.kernel(f"paged_decode_attn_{fmt}", name), problem.rows(problem.q), cache.k_cache,
        cache.v_cache, workspace, rig.upload(wish.tables), lengths, 3, HEADS, KV_HEADS, DIM, BLOCK,
        wish.scale, 2, *own.scales, stride, *own.strides, 3, *own.window, rig.stream, num_blocks=BLOCKS,
        **own.keywords,
    )  # fmt: skip
    out = rig.full_bf16(problem.q.shape)
    reduce = reduction(wish.fmt)
    getattr(ops, reduce)(
        rig.gpu, rig.kernel("paged_decode_attn_reduce", reduce), workspace, out, lengths, HEADS, DIM, 2, 3,
        rig.stream,
    )  # fmt: skip
    problem.check(out)


def run_streaming(problem: Problem) -> None:
    wish, rig = problem.wish, problem.rig
    ones = rig.gpu.zeros(4, np.float32)
    scales: dict[str, Any] = SCALES
    constructed: dict[str, dict[str, Any]] = {
        "soft_cap": {"soft_cap": 1.5}, "query_tokens": {"query_tokens": 2}, "not_causal": {"causal": False},
        "float16": {"q_dtype": "float16"}, "head_scales": {"k_scales": ones},
        "value_format": {"value_layout": wish.value_layout}, "split_tokens": {"split_tokens": 16},
        "tensor_scales": scales,
    }  # fmt: skip
    made = constructed.get(wish.feature, scales if wish.fmt.needs_scale else {})
    asked: dict[str, dict[str, Any]] = {
        "lse": {"lse": ones}, "sinks": {"sinks": ones}, "sliding_window": {"sliding_window": 5},
        "q_stride": {"q_stride": 5 * DIM}, "table_stride": {"table_stride": 0},
        "block_stride": {"block_stride_override": 4096},
    }  # fmt: skip
    decoder = StreamingDecoder(
        rig.gpu, wish.layout, HEADS, max_seqs=3, scratch_bytes=1 << 20, tiles_in_flight=2, **made
    )
    sequences = []
    for seq, length in enumerate(LENGTHS):
        position = np.arange(length)
        slots = wish.tables[seq, position // BLOCK] * BLOCK + position % BLOCK
        records, last = encode_records(
            wish.layout, problem.key[slots], problem.value[slots], **(scales if wish.fmt.needs_scale else {})
        )
        store: Any = PinnedStore(rig.gpu, wish.layout, len(records) + 1)
        store.append(records[:-1])
        store.keep_tail(Tail(records[-1].copy(), last))
        sequences.append(decoder.open(store))
    out = rig.full_bf16(problem.q.shape)
    decoder.decode(
        problem.rows(problem.q),
        sequences,
        out,
        stream=rig.stream,
        softmax_scale=wish.scale,
        **asked.get(wish.feature, {}),
    )
    rig.gpu.synchronize()
    problem.check(out)


def run_write(problem: Problem) -> None:
    """What is written reads back exactly."""
    rig, cache = problem.rig, problem.cache()
    order = np.arange(BLOCKS)[::-1].astype(np.int32)
    k, v = cache.gather(rig.upload(order.copy()), BLOCKS * BLOCK, stream=rig.stream)
    slots = (order[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    for got, tokens in ((k, problem.key), (v, problem.value)):
        np.testing.assert_array_equal(rig.download(got), tokens[slots].astype(np.float32))


RUN = {
    "decoder": run_decoder,
    "cascade": run_cascade,
    "single": run_single,
    "split": run_split,
    "streaming": run_streaming,
    "write": run_write,
}
CELLS = [
    (path, feature, fmt)
    for path in PATHS
    for feature in FEATURES
    for fmt in FORMATS
    if path.name != "write" or feature.of_caches
]


@pytest.mark.parametrize(
    ("path", "feature", "fmt"), CELLS, ids=[f"{p.name}-{f.name}-{fmt.name}" for p, f, fmt in CELLS]
)
def test_cell(rig: Rig, path: Path, feature: Feature, fmt: CacheFormat) -> None:
    assert rig.name in BACKENDS
    problem = Problem(rig, wish(feature, fmt))
    if is_supported(feature, path, fmt):
        RUN[path.name](problem)
        return
    with pytest.raises((TypeError, ArgumentTypeError, ArgumentValueError)) as caught:
        RUN[path.name](problem)
    names = [*feature.arguments, *(name + "s" for name in feature.arguments), "layout", "scale"]
    assert any(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize(("arch", "bulk"), targets(), ids=lambda value: str(value))
def test_architectures(arch: str, bulk: bool) -> None:
    """Every head_dim has a shape there for each format, which fills its ring as the matrix says."""
    limits = limits_of_capability(int(arch.removeprefix("sm_").rstrip("af")), 4)
    for fmt in FORMATS:
        for head_dim in range(16, 257, 16):
            for heads in (1, 8):
                shape = ring_shape(RingProblem(fmt.name, fmt.name, heads, head_dim, 16, 4), limits)
                if not (fmt.has_scale_section and bulk):  # the scales of some of the heads may be too short
                    assert shape.bulk == bulk


def test_the_readme_has_the_matrix() -> None:
    text = matrix()
    for feature in FEATURES:
        assert f"| {feature.title} |" in text
    assert all(arch in text for arch, _ in targets())
