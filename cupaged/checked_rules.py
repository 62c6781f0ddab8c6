"""What checked mode looks for in the arguments of a launch: names of parameters decide, not kernels.

Nothing here touches a device. A `Check` says which kernel of ``input_checks.cu`` searches which array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cupaged.errors import CheckedModeError
from cupaged.formats import FORMATS
from cupaged.ops._checks import UNLIMITED_BLOCKS, UNLIMITED_SLOTS

if TYPE_CHECKING:
    from cupaged.handle import KernelHandle, Value

__all__ = ["Check", "Element", "check_overlaps", "checks_of", "named_values"]

_INT32_MAX = 2**31 - 1
_FORMAT_NAMES = tuple(fmt.name for fmt in FORMATS)

_Values = Mapping[str, Any]


@dataclass(frozen=True)
class Element:
    """How to read one element for the message.

    Attributes:
        address: of the element with a flat index.
        dtype: of the element.
    """

    address: Callable[[int], int]
    dtype: np.dtype[Any]

    @staticmethod
    def of(base: int, dtype: Any) -> Element:
        """Elements one after another from an address."""
        kind = np.dtype(dtype)
        return Element(lambda flat: base + kind.itemsize * flat, kind)

    @staticmethod
    def of_rows(base: int, dtype: Any, row: int, stride: int) -> Element:
        """Rows of `row` elements, `stride` elements apart."""
        kind = np.dtype(dtype)
        return Element(lambda flat: base + kind.itemsize * (flat // row * stride + flat % row), kind)


@dataclass(frozen=True)
class Check:
    """One kernel's search through one array.

    Attributes:
        array: the launcher's name for the array.
        entry: the kernel in ``input_checks.cu``.
        before: its arguments before the record.
        after: those after it.
        shape: of the array, to name an index.
        allowed: for the message.
        element: to read the value found; None where the finding itself says it is a NaN.
    """

    array: str
    entry: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    shape: tuple[int, ...]
    allowed: str
    element: Element | None


def named_values(kernel: KernelHandle, values: Sequence[Value]) -> dict[str, Any]:
    """A launch's arguments and pinned constants by name, with what follows from them where it is not given.

    ``oldest_window``: tokens from the oldest attended one on; several causal query tokens reach further back.
    """
    v: dict[str, Any] = {**kernel.pinned}
    v |= {parameter.name: value for parameter, value in zip(kernel.parameters, values, strict=True)}
    v.setdefault("query_tokens", 1)
    if "gqa_ratio" in v and "num_kv_heads" in v:
        v.setdefault("num_q_heads", v["gqa_ratio"] * v["num_kv_heads"])
    if "max_blocks_per_seq" in v:
        v.setdefault("table_stride", v["max_blocks_per_seq"])
    window, newer = v.get("sliding_window", 0), v["query_tokens"] - 1 if v.get("causal") else 0
    v["oldest_window"] = min(window + newer, 2**32 - 1) if window else 0
    return v


@dataclass(frozen=True)
class _Pool:
    """Where the blocks of a pool lie, in bytes."""

    format: str
    stride: int
    scale_section: int
    block_bytes: int


def _pool(holds: Mapping[str, str], v: _Values, side: str) -> _Pool:
    """The K (``side`` "k") or V pool of a launch that has block tables or slots."""
    number = v.get("key_format" if side == "k" else "value_format")
    fmt = holds[f"{side}_cache"] if number is None else _FORMAT_NAMES[number]
    values = v["block_size"] * v["num_kv_heads"] * v["head_dim"]
    section = v.get(f"{side}_scale_section", v.get("data_section_bytes", 0))
    block = {"bf16": 2 * values, "fp8": values, "nvfp4": section + values // 16}[fmt]
    item = 2 if fmt == "bf16" else 1
    stride = v.get("block_stride_bytes", item * v["cache_stride"] if v.get("cache_stride") else block)
    return _Pool(fmt, v.get(f"{side}_block_stride", stride), section, block)


# ---- what is looked for


def _range(v: _Values, array: str, low: int, high: int, allowed: str) -> Check:
    count, base = v["num_seqs"], v[array]
    bounds = (count, low, min(high, _INT32_MAX))
    return Check(array, "input_range", (base,), bounds, (count,), allowed, Element.of(base, np.int32))


def _lengths(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    capacity = v["max_blocks_per_seq"] * v["block_size"]
    yield _range(v, "seq_lens", 0, capacity, f"0 to {capacity} (max_blocks_per_seq * block_size)")


def _tables(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    """Only those that a kernel looks up: the attended blocks of each sequence."""
    base, width, stride = v["block_tables"], v["max_blocks_per_seq"], v["table_stride"]
    shape = (v["num_seqs"], width)
    after = (*shape, stride, v["block_size"], v["oldest_window"], v["num_blocks"])
    element = Element.of_rows(base, np.int32, max(1, width), stride)
    yield Check("block_tables", "input_blocks", (base, v["seq_lens"]), after, shape, _ids(v), element)


def _tile(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    """A tile's counts and ids, and how much of its last block counts."""
    capacity, size = v["tile_capacity"], v["block_size"]
    yield _range(v, "tile_block_counts", 0, capacity, f"0 to {capacity} (tile_capacity)")
    if v.get("last_block_valid_slots_per_seq"):
        yield _range(v, "last_block_valid_slots_per_seq", 0, size, f"0 to {size} (block_size)")
    base, shape = v["tile_blocks"], (v["num_seqs"], capacity)
    after = (*shape, capacity, 1, 0, v["num_blocks"])  # counts are lengths in blocks of one token
    element = Element.of(base, np.int32)
    yield Check("tile_blocks", "input_blocks", (base, v["tile_block_counts"]), after, shape, _ids(v), element)


def _ids(v: _Values) -> str:
    blocks = v["num_blocks"]
    return "0 or more" if blocks == UNLIMITED_BLOCKS else f"0 to {blocks - 1} (num_blocks - 1)"


def _slots(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    count, base, slots = v["num_tokens"], v["slot_mapping"], v["num_slots"]
    if slots < UNLIMITED_SLOTS:
        allowed = f"below {slots} (num_blocks * block_size), or negative to skip"
        element = Element.of(base, np.int64)
        yield Check("slot_mapping", "input_slots", (base,), (count, slots), (count,), allowed, element)


def _query(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    base, heads, dim, tokens = v["q"], v["num_q_heads"], v["head_dim"], v["query_tokens"]
    row, rows = heads * dim, v["num_seqs"] * tokens
    stride = v.get("q_stride", row)
    dtype, exponent = (np.float16, 0x7C00) if v.get("query_f16") else (ml_dtypes.bfloat16, 0x7F80)
    shape = (v["num_seqs"], *((tokens,) if tokens > 1 else ()), heads, dim)
    element = Element.of_rows(base, dtype, row, stride)
    yield Check("q", "input_finite", (base,), (rows, row, stride, exponent), shape, "finite values", element)


def _scale_arrays(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    """Scales for each KV head, where a launcher was given them."""
    count = v["num_kv_heads"]
    for name in ("k_scales", "v_scales"):
        if v.get(name):
            element = Element.of(v[name], np.float32)
            allowed = "finite values above 0"
            yield Check(name, "input_scales", (v[name],), (count,), (count,), allowed, element)


def _sinks(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    if v["sinks"]:
        count, element = v["num_q_heads"], Element.of(v["sinks"], np.float32)
        allowed = "finite values and -inf"
        yield Check("sinks", "input_sinks", (v["sinks"],), (count,), (count,), allowed, element)


def _scale_bytes(holds: Mapping[str, str], v: _Values) -> Iterator[Check]:
    """The scales inside an NVFP4 cache, of the tokens that are attended."""
    seqs, width, size = v["num_seqs"], v["max_blocks_per_seq"], v["block_size"]
    heads, groups = v["num_kv_heads"], v["head_dim"] // 16
    shape = (seqs, width * size, heads, groups)
    sizes = (seqs, width, v["table_stride"], size, v["oldest_window"], v["num_blocks"], heads, groups)
    for side in ("k", "v"):
        pool = _pool(holds, v, side)
        if pool.format == "nvfp4":
            before = (v[f"{side}_cache"], v["block_tables"], v["seq_lens"])
            after = (*sizes, v.get("heads_first", 0), pool.stride, pool.scale_section)
            allowed = "no NaN in [sequence, token, kv_head, group]"
            yield Check(f"{side}_cache scale", "input_scale_bytes", before, after, shape, allowed, None)


# Names that a kernel's arguments must have, and the checks that then apply, in the order of reports.
_RULES: tuple[tuple[frozenset[str], Callable[[Mapping[str, str], _Values], Iterator[Check]]], ...] = tuple(
    (frozenset(names.split()), rule)
    for names, rule in (
        ("seq_lens max_blocks_per_seq block_size num_seqs", _lengths),
        ("block_tables seq_lens max_blocks_per_seq block_size num_blocks num_seqs", _tables),
        ("tile_blocks tile_block_counts tile_capacity block_size num_blocks num_seqs", _tile),
        ("slot_mapping num_slots num_tokens", _slots),
        ("q num_q_heads head_dim num_seqs", _query),
        ("num_kv_heads", _scale_arrays),
        ("sinks num_q_heads", _sinks),
        ("k_cache v_cache block_tables seq_lens max_blocks_per_seq num_blocks head_dim", _scale_bytes),
    )
)


def checks_of(holds: Mapping[str, str], v: _Values) -> list[Check]:
    """Everything to look at before a launch.

    Args:
        holds: what each pointer parameter holds, from the registry.
        v: from `named_values`.
    """
    return [check for names, rule in _RULES if names <= v.keys() for check in rule(holds, v)]


# ---- outputs that share memory with something

_WRITTEN = frozenset({"output", "workspace", "lse", "m_state", "l_state", "o_state", "out_max"})
_WRITTEN_BY_WRITERS = frozenset({"k_cache", "v_cache"})


@dataclass(frozen=True)
class _Span:
    name: str
    begin: int
    end: int


def check_overlaps(entry: str, holds: Mapping[str, str], v: _Values) -> None:
    """Raise CheckedModeError where an output shares memory with something else, as far as sizes are known."""
    spans = [span for span in _spans(holds, v) if span.begin and span.end > span.begin]
    written = _WRITTEN_BY_WRITERS if "slot_mapping" in v else _WRITTEN
    if entry == "attention_finalize" or "reduce" in entry:
        written = frozenset({"output"})
    for output in spans:
        if output.name not in written:
            continue
        for other in spans:
            pools = {output.name, other.name} == {"k_cache", "v_cache"}  # may be interleaved
            if other is output or pools or other.begin >= output.end or output.begin >= other.end:
                continue
            raise CheckedModeError(
                f"{output.name}: bytes {output.begin:#x} to {output.end:#x} share memory with {other.name}, "
                f"{other.begin:#x} to {other.end:#x}",
                array=output.name,
                value=output.begin,
            )


def _rows(count: int, stride: int, row: int) -> int:
    """Elements from the first row's begin to the last one's end."""
    return (count - 1) * stride + row if count else 0


def _spans(holds: Mapping[str, str], v: _Values) -> Iterator[_Span]:
    """Memory that a launch reads or writes, as far as its scalars tell."""
    seqs, heads, dim = v.get("num_seqs", 0), v.get("num_q_heads", 0), v.get("head_dim", 0)
    tokens, row = v.get("num_tokens", 0), v.get("num_kv_heads", 0) * dim
    rows, width = seqs * v["query_tokens"], v.get("max_blocks_per_seq", 0)
    out = rows * heads * dim
    sizes = {
        "q": 2 * _rows(rows, v.get("q_stride", heads * dim), heads * dim),
        "output": 2 * out,
        "lse": 4 * rows * heads,
        "workspace": 4 * seqs * heads * v.get("num_splits", 0) * (dim + 2),
        "block_tables": 4 * _rows(seqs, v.get("table_stride", 0), width),
        "seq_lens": 4 * seqs,
        "tile_blocks": 4 * seqs * v.get("tile_capacity", 0),
        "tile_block_counts": 4 * seqs,
        "last_block_valid_slots_per_seq": 4 * seqs,
        "m_state": 4 * seqs * heads,
        "l_state": 4 * seqs * heads,
        "o_state": 4 * out,
        "slot_mapping": 8 * tokens,
        "key": 2 * _rows(tokens, v.get("key_stride", 0), row),
        "value": 2 * _rows(tokens, v.get("value_stride", 0), row),
        "out_max": 4,
        "data": 2 * v.get("n_elems", 0),
    }
    if {"k_cache", "v_cache"} <= holds.keys() and {"block_size", "num_kv_heads", "head_dim"} <= v.keys():
        sizes |= {f"{side}_cache": _pool_bytes(_pool(holds, v, side), v) for side in ("k", "v")}
    for name in holds:
        if name in sizes:
            yield _Span(name, int(v[name]), int(v[name]) + sizes[name])


def _pool_bytes(pool: _Pool, v: _Values) -> int:
    """From the first block to the end of the last; one block where the pool's size is not known."""
    blocks = v["num_slots"] // v["block_size"] if "num_slots" in v else v.get("num_blocks", 1)
    known = v.get("num_slots", 0) < UNLIMITED_SLOTS and blocks < UNLIMITED_BLOCKS
    return _rows(blocks if known else 1, pool.stride, pool.block_bytes)
