"""What is supported where, read off the declarations: feature x path x format, and format x architecture.

The README's matrix is generated from this module, and ``tests/test_support.py`` runs every cell of it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupaged import ops
from cupaged.backends.cupy.nvrtc import CHECKED_TARGETS, Target
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.decode_kernels import MAX_SEQS
from cupaged.decode_layouts import scale_rule
from cupaged.errors import ArgumentValueError
from cupaged.formats import FORMATS, CacheFormat, CacheLayout
from cupaged.kv import KVCache
from cupaged.registry.rules import (
    MAX_BLOCK_SIZE,
    MAX_GQA_RATIO,
    MAX_QUERY_TOKENS,
    SUPPORTED_HEAD_DIMS,
)
from cupaged.streaming import StreamingDecoder
from cupaged.streaming.step import check_scales

__all__ = ["BACKENDS", "FEATURES", "PATHS", "Feature", "Path", "is_supported", "matrix", "targets"]

# Every path runs on each of them.
BACKENDS = ("cupy", "emulator")


@dataclass(frozen=True)
class Feature:
    """Something that may be asked for.

    Attributes:
        name: short name.
        title: what it is.
        arguments: names that it has where it exists: of a parameter, or of a layout's field.
        of_caches: whether it concerns what is stored, not attention alone.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    of_caches: bool = False


FEATURES = (
    Feature("softmax_scale", "softmax scale of the caller's", ("softmax_scale", "inv_sqrt_d")),
    Feature("sliding_window", "sliding window", ("sliding_window",)),
    Feature("lse", "log-sum-exp output", ("lse",)),
    Feature("sinks", "attention sinks", ("sinks",)),
    Feature("soft_cap", "logit soft cap", ("soft_cap",)),
    Feature("query_tokens", f"2 to {MAX_QUERY_TOKENS} query tokens a sequence", ("query_tokens",)),
    Feature("not_causal", "query tokens that see each other", ("causal",)),
    Feature("float16", "q and output in FP16", ("q_dtype",)),
    Feature("q_stride", "rows of q (key, value) with gaps", ("q_stride", "key_stride"), True),
    Feature("heads_first", "HND blocks", ("heads_first",), True),
    Feature(
        "block_stride",
        "blocks with gaps (interleaved K and V, layers)",
        ("block_stride_override", "cache_stride", "block_stride_bytes"),
        True,
    ),
    Feature("table_stride", "one table row for all", ("table_stride",)),
    Feature("tensor_scales", "scales of K and V", ("k_scale",), True),
    Feature("head_scales", "scales by KV head", ("k_scales",), True),
    Feature("value_format", "V in another format", ("value_layout",), True),
    Feature("split_tokens", "bits that no batch changes", ("split_tokens",)),
)


@dataclass(frozen=True)
class Path:
    """A way to run kernels.

    Attributes:
        name: short name.
        title: what the README calls it.
        arguments: what it takes for a cache format: names of parameters and of layout fields.
    """

    name: str
    title: str
    arguments: Callable[[CacheFormat], frozenset[str]]


def _parameters(*functions: Callable[..., Any]) -> frozenset[str]:
    return frozenset(name for function in functions for name in inspect.signature(function).parameters)


_LAYOUT = frozenset(field.name for field in dataclasses.fields(CacheLayout))
_SCALES = frozenset({"k_scale", "v_scale", "k_scales", "v_scales"})
_SIZES = (2, 64, 16)  # KV heads, head_dim and block_size of layouts that are only asked for their format


def _has_scales(fmt: CacheFormat) -> bool:
    return scale_rule(CacheLayout(fmt, *_SIZES))[1]


def _decoder(fmt: CacheFormat) -> frozenset[str]:
    found = _parameters(Decoder.__init__, Decoder.decode_pools) | _LAYOUT
    return found if _has_scales(fmt) else found - _SCALES


def _cascade(fmt: CacheFormat) -> frozenset[str]:
    """Scales come with the cache, and the stride of q is the array's."""
    found = _parameters(CascadeDecoder.__init__, CascadeDecoder.decode) | _LAYOUT | {"q_stride"}
    return found | _SCALES if _has_scales(fmt) else found


def _launcher(pattern: str) -> Callable[[CacheFormat], frozenset[str]]:
    return lambda fmt: _parameters(getattr(ops, pattern.format(fmt.name)))


def _streaming(fmt: CacheFormat) -> frozenset[str]:
    found = _parameters(StreamingDecoder.__init__, StreamingDecoder.decode)
    try:
        check_scales(fmt.name, 1.0, 1.0)
    except ArgumentValueError:
        return found - _SCALES
    return found


def _write(fmt: CacheFormat) -> frozenset[str]:
    """A writer's launch has one format; the cache makes one for each of K and V."""
    launched = _parameters(getattr(ops, f"reshape_and_cache_{fmt.name}"))
    return launched | (_parameters(KVCache.__init__) & {"value_layout"})


PATHS = (
    Path("decoder", "`Decoder`", _decoder),
    Path("cascade", "`CascadeDecoder`", _cascade),
    Path("single", "`paged_decode_attn_*`", _launcher("paged_decode_attn_{}")),
    Path("split", "`..._splitk_*` + reduce", _launcher("paged_decode_attn_splitk_{}")),
    Path("streaming", "`StreamingDecoder`", _streaming),
    Path("write", "`KVCache.write`", _write),
)


def is_supported(feature: Feature, path: Path, fmt: CacheFormat) -> bool:
    """Whether a path takes a feature over a cache format, on every backend and architecture."""
    return not path.arguments(fmt).isdisjoint(feature.arguments)


def targets() -> tuple[tuple[str, bool], ...]:
    """(architecture, whether bulk copies fill shared memory there), of all that kernels are compiled for."""
    return tuple((arch, Target(arch).has_bulk_copies) for arch in CHECKED_TARGETS)


def matrix() -> str:
    """The support matrix as Markdown."""
    header = ["", *(path.title for path in PATHS)]
    rows = [[f.title, *(_cell(f, path) for path in PATHS)] for f in FEATURES]
    sizes = [
        ["head_dim", f"multiples of 16 from {SUPPORTED_HEAD_DIMS[0]} to {SUPPORTED_HEAD_DIMS[-1]}"],
        ["query heads for each KV head", f"1 to {MAX_GQA_RATIO}"],
        ["block_size", f"1 to {MAX_BLOCK_SIZE}"],
        ["sequences of a `Decoder` call", f"0 to {MAX_SEQS:,}"],
        ["backends", ", ".join(BACKENDS)],
        *_architectures(),
    ]
    names = ", ".join(fmt.name for fmt in FORMATS)
    intro = f"Cache formats by feature and path (yes: {names}), the same on each backend and architecture:"
    return "\n".join([*_table(["", "all paths"], sizes), "", intro, "", *_table(header, rows)])


def _architectures() -> list[list[str]]:
    ways = {
        True: "shared memory filled by bulk copies where rows allow",
        False: "by the lanes of a warp, 16 bytes each",
    }
    return [
        [", ".join(arch for arch, bulk in targets() if bulk is way), f"{names}; {ways[way]}"]
        for way, names in ((bulk, "all formats and features") for bulk in (True, False))
    ]


def _cell(feature: Feature, path: Path) -> str:
    if path.name == "write" and not feature.of_caches:
        return ""
    found = [fmt for fmt in FORMATS if is_supported(feature, path, fmt)]
    if len(found) == len(FORMATS):
        return "yes"
    return ", ".join(fmt.name for fmt in found) or "no"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
