"""What checked mode looks for in the arguments of a launch: names of parameters decide, not kernels.

Nothing here touches a device. A `Check` says which kernel of ``input_checks.cu`` searches which array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cupaged.errors import CheckedModeError
from cupaged.formats import NVFP4
from cupaged.ops._checks import UNLIMITED_BLOCKS, UNLIMITED_SLOTS
from cupaged.ops._memory import ITEM_BYTES, Values, cache_pool, memory_of, num_gathered
from cupaged.ops._runs import Run, meet

if TYPE_CHECKING:
    from cupaged.handle import KernelHandle, Value

__all__ = ["Check", "Element", "check_overlaps", "checks_of", "named_values"]

_INT32_MAX = 2**31 - 1


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


# ---- what is looked for


def _range(v: Values, array: str, count: int, high: int, allowed: str) -> Check:
    base, bounds = v[array], (count, 0, min(high, _INT32_MAX))
    return Check(array, "input_range", (base,), bounds, (count,), allowed, Element.of(base, np.int32))


def _lengths(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    capacity = v["max_blocks_per_seq"] * v["block_size"]
    yield _range(v, "seq_lens", v["num_seqs"], capacity, f"0 to {capacity} (max_blocks_per_seq * block_size)")


def _tables(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    """Only those that a kernel looks up: the attended blocks of each sequence."""
    base, width, stride = v["block_tables"], v["max_blocks_per_seq"], v["table_stride"]
    shape = (v["num_seqs"], width)
    after = (*shape, stride, v["block_size"], v["oldest_window"], v["num_blocks"])
    element = Element.of_rows(base, np.int32, max(1, width), stride)
    yield Check("block_tables", "input_blocks", (base, v["seq_lens"]), after, shape, _ids(v), element)


def _tile(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    """A tile's counts and ids, and how much of its last block counts."""
    capacity, size, seqs = v["tile_capacity"], v["block_size"], v["num_seqs"]
    yield _range(v, "tile_block_counts", seqs, capacity, f"0 to {capacity} (tile_capacity)")
    if v.get("last_block_valid_slots_per_seq"):
        yield _range(v, "last_block_valid_slots_per_seq", seqs, size, f"0 to {size} (block_size)")
    base, shape = v["tile_blocks"], (seqs, capacity)
    after = (*shape, capacity, 1, 0, v["num_blocks"])  # counts are lengths in blocks of one token
    element = Element.of(base, np.int32)
    yield Check("tile_blocks", "input_blocks", (base, v["tile_block_counts"]), after, shape, _ids(v), element)


def _gathered(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    yield _range(v, "block_ids", num_gathered(v), v["num_blocks"] - 1, _ids(v))


def _ids(v: Values) -> str:
    blocks = v["num_blocks"]
    return "0 or more" if blocks == UNLIMITED_BLOCKS else f"0 to {blocks - 1} (num_blocks - 1)"


def _slots(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    count, base, slots = v["num_tokens"], v["slot_mapping"], v["num_slots"]
    if slots < UNLIMITED_SLOTS:
        allowed = f"below {slots} (num_blocks * block_size), or negative to skip"
        element = Element.of(base, np.int64)
        yield Check("slot_mapping", "input_slots", (base,), (count, slots), (count,), allowed, element)


def _query(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    base, heads, dim, tokens = v["q"], v["num_q_heads"], v["head_dim"], v["query_tokens"]
    row, rows = heads * dim, v["num_seqs"] * tokens
    stride = v.get("q_stride", row)
    dtype, exponent = (np.float16, 0x7C00) if v.get("query_f16") else (ml_dtypes.bfloat16, 0x7F80)
    shape = (v["num_seqs"], *((tokens,) if tokens > 1 else ()), heads, dim)
    element = Element.of_rows(base, dtype, row, stride)
    yield Check("q", "input_finite", (base,), (rows, row, stride, exponent), shape, "finite values", element)


def _scale_arrays(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    """Scales for each KV head, where a launcher was given them."""
    count = v["num_kv_heads"]
    for name in ("k_scales", "v_scales", "scales"):
        if v.get(name):
            element = Element.of(v[name], np.float32)
            allowed = "finite values above 0"
            yield Check(name, "input_scales", (v[name],), (count,), (count,), allowed, element)


def _sinks(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    if v["sinks"]:
        count, element = v["num_q_heads"], Element.of(v["sinks"], np.float32)
        allowed = "finite values and -inf"
        yield Check("sinks", "input_sinks", (v["sinks"],), (count,), (count,), allowed, element)


def _scale_bytes(holds: Mapping[str, str], v: Values) -> Iterator[Check]:
    """The scales inside an NVFP4 cache, of the tokens that are attended."""
    seqs, width, size = v["num_seqs"], v["max_blocks_per_seq"], v["block_size"]
    heads, groups = v["num_kv_heads"], v["head_dim"] // 16
    shape = (seqs, width * size, heads, groups)
    sizes = (seqs, width, v["table_stride"], size, v["oldest_window"], v["num_blocks"], heads, groups)
    for side in ("k", "v"):
        pool = cache_pool(holds, v, side)
        if pool.format == NVFP4:
            before = (v[f"{side}_cache"], v["block_tables"], v["seq_lens"])
            after = (*sizes, v.get("heads_first", 0), pool.stride, pool.scale_section)
            allowed = "no NaN in [sequence, token, kv_head, group]"
            yield Check(f"{side}_cache scale", "input_scale_bytes", before, after, shape, allowed, None)


# Names that a kernel's arguments must have, and the checks that then apply, in the order of reports.
_RULES: tuple[tuple[frozenset[str], Callable[[Mapping[str, str], Values], Iterator[Check]]], ...] = tuple(
    (frozenset(names.split()), rule)
    for names, rule in (
        ("seq_lens max_blocks_per_seq block_size num_seqs", _lengths),
        ("block_tables seq_lens max_blocks_per_seq block_size num_blocks num_seqs", _tables),
        ("tile_blocks tile_block_counts tile_capacity block_size num_blocks num_seqs", _tile),
        ("block_ids seq_len block_size num_blocks", _gathered),
        ("slot_mapping num_slots num_tokens", _slots),
        ("q num_q_heads head_dim num_seqs", _query),
        ("num_kv_heads", _scale_arrays),
        ("sinks num_q_heads", _sinks),
        ("k_cache v_cache block_tables seq_lens max_blocks_per_seq num_blocks head_dim", _scale_bytes),
    )
)


def checks_of(holds: Mapping[str, str], v: Values) -> list[Check]:
    """Everything to look at before a launch.

    Args:
        holds: what each pointer parameter holds, from the registry.
        v: from `named_values`.
    """
    return [check for names, rule in _RULES if names <= v.keys() for check in rule(holds, v)]


# ---- outputs that share memory with something


@dataclass(frozen=True)
class _Span:
    name: str
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        filled = [run for run in self.runs if run.end > run.begin]
        return f"{min(run.begin for run in filled):#x} to {max(run.end for run in filled):#x}"


def check_overlaps(holds: Mapping[str, str], written: Set[str], v: Values) -> None:
    """Raise CheckedModeError where an output shares memory with something else, as far as sizes are known.

    Args:
        holds: what each pointer parameter holds, from the registry.
        written: parameters that the kernel may write through.
        v: from `named_values`.
    """
    spans = [_Span(name, runs) for name, runs in memory_of(holds, v)]
    for output in spans:
        if output.name not in written:
            continue
        for other in spans:
            if other is output or not meet(output.runs, other.runs) or _may_share(holds, v, output, other):
                continue
            raise CheckedModeError(
                f"{output.name}: bytes {output} share memory with {other.name}, {other}",
                array=output.name,
                value=v[output.name],
            )


def _may_share(holds: Mapping[str, str], v: Values, output: _Span, other: _Span) -> bool:
    """A merge may write into one of its parts, and blocks may be copied within a pool."""
    names = (output.name, other.name)
    if names in (("out", "outputs"), ("out_lse", "lses")):
        part = ITEM_BYTES[holds[other.name]] * v["part_stride" if output.name == "out" else "lse_stride"]
        at = v[output.name] - v[other.name]
        inside = at == 0 or (part > 0 and at % part == 0 and 0 < at // part < v["num_parts"])
        return holds[output.name] == holds[other.name] and inside
    if names in (("k_target", "k_source"), ("v_target", "v_source")):
        stride = v["target_stride_bytes"]
        at = v[output.name] - v[other.name]
        same = (stride, v["target_section_bytes"]) == (v["source_stride_bytes"], v["source_section_bytes"])
        return same and (at == 0 or (stride > 0 and at % stride == 0))
    return False
