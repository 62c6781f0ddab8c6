"""Memory that a launch reads and writes, by the names of its kernel's parameters. Nothing touches a device.

``v`` holds a launch's arguments and constants by name, as `cupaged.checked_rules.named_values` makes them;
``holds`` says what each pointer parameter holds, as the registry knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cupaged.formats import FORMATS, NVFP4, CacheFormat, cache_format
from cupaged.ops._checks import UNLIMITED_BLOCKS, UNLIMITED_SLOTS
from cupaged.ops._pools import nvfp4_pools, strided_pools
from cupaged.ops._runs import Run
from cupaged.ops.blocks import gather_pool

__all__ = ["ITEM_BYTES", "Values", "cache_pool", "memory_of", "num_gathered"]

Values = Mapping[str, Any]


@dataclass(frozen=True)
class CachePool:
    """Where the blocks of a pool lie, in bytes."""

    format: CacheFormat
    stride: int
    scale_section: int
    data_bytes: int
    scale_bytes: int

    def runs(self, begin: int, count: int) -> tuple[Run, ...]:
        """Both sections of so many blocks."""
        data = Run(begin, self.data_bytes, count, self.stride)
        return data, Run(begin + self.scale_section, self.scale_bytes, count, self.stride)


def cache_pool(holds: Mapping[str, str], v: Values, side: str) -> CachePool:
    """The K (``side`` "k") or V pool of a launch that has block tables or slots."""
    number = v.get("key_format" if side == "k" else "value_format")
    fmt = cache_format(holds[f"{side}_cache"]) if number is None else FORMATS[number]
    rows, dim = v["block_size"] * v["num_kv_heads"], v["head_dim"]
    data, scales = rows * fmt.data_bytes(dim), rows * fmt.scale_bytes(dim)
    section = v.get(f"{side}_scale_section", v.get("data_section_bytes", 0))
    tight = section + scales if scales else data
    stride = fmt.dtype.itemsize * v["cache_stride"] if v.get("cache_stride") else tight
    stride = v.get(f"{side}_block_stride", v.get("block_stride_bytes", stride))
    return CachePool(fmt, stride, section, data, scales)


def num_gathered(v: Values) -> int:
    """Blocks that a gather looks up."""
    return int(-(-v["seq_len"] // v["block_size"]))


ITEM_BYTES = {"bf16": 2, "f16": 2, "half": 2, "f32": 4, "i32": 4, "u32": 4, "i64": 8}

_Rows = tuple[int, int, int]  # how many, elements from one to the next, elements of one


def _flat(elements: int) -> _Rows:
    return 1, 0, elements


def _row_elements(v: Values) -> int:
    return int(v["num_q_heads"] * v["head_dim"])


def _token_elements(v: Values) -> int:
    return int(v["num_kv_heads"] * v["head_dim"])


def _output_rows(v: Values) -> _Rows:
    if "seq_len" in v:
        return _flat(v["seq_len"] * _token_elements(v))
    return _flat(v["num_seqs"] * v["query_tokens"] * _row_elements(v))


def _query_rows(v: Values) -> _Rows:
    row = _row_elements(v)
    return v["num_seqs"] * v["query_tokens"], v.get("q_stride", row), row


def _data_rows(v: Values) -> _Rows:
    return (v["num_rows"], v["row_stride"], v["row_elems"]) if "num_rows" in v else _flat(v["n_elems"])


def _states(v: Values) -> int:
    """(m, l) of a launch that has states: of each sequence, split and query head."""
    return int(v["num_seqs"] * v.get("num_splits", 1) * v["num_q_heads"])


def _merged_states(v: Values) -> int:
    """The same of all parts, from the first one's begin to the last one's end."""
    last = (v["num_seqs"] - 1) * v["seq_stride"] + (v["num_parts"] - 1) * v["part_stride"]
    return int((last + 1) * v["num_q_heads"])


# Memory of a pointer parameter, in elements. What is not here, and no pool, is a decoder's own.
_ROWS_OF: dict[str, Callable[[Values], _Rows]] = {
    "q": _query_rows,
    "output": _output_rows,
    "lse": lambda v: _flat(v["num_seqs"] * v["query_tokens"] * v["num_q_heads"]),
    "workspace": lambda v: _flat(_states(v) * (v["head_dim"] + 2)),
    "block_tables": lambda v: (v["num_seqs"], v["table_stride"], v["max_blocks_per_seq"]),
    "seq_lens": lambda v: _flat(v["num_seqs"]),
    "sinks": lambda v: _flat(v["num_q_heads"]),
    "tile_blocks": lambda v: _flat(v["num_seqs"] * v["tile_capacity"]),
    "tile_block_counts": lambda v: _flat(v["num_seqs"]),
    "last_block_valid_slots_per_seq": lambda v: _flat(v["num_seqs"]),
    "m_state": lambda v: _flat(_states(v)),
    "l_state": lambda v: _flat(_states(v)),
    "o_state": lambda v: _flat(_states(v) * v["head_dim"]),
    "m_parts": lambda v: _flat(_merged_states(v)),
    "l_parts": lambda v: _flat(_merged_states(v)),
    "o_parts": lambda v: _flat(_merged_states(v) * v["head_dim"]),
    "m_out": lambda v: _flat(_states(v)),
    "l_out": lambda v: _flat(_states(v)),
    "o_out": lambda v: _flat(_states(v) * v["head_dim"]),
    "slot_mapping": lambda v: _flat(v["num_tokens"]),
    "key": lambda v: (v["num_tokens"], v["key_stride"], _token_elements(v)),
    "value": lambda v: (v["num_tokens"], v["value_stride"], _token_elements(v)),
    **dict.fromkeys(("k_scales", "v_scales", "scales"), lambda v: _flat(v["num_kv_heads"])),
    "out_max": lambda v: _flat(1),
    "data": _data_rows,
    "outputs": lambda v: (v["num_parts"], v["part_stride"], v["num_rows"] * v["head_dim"]),
    "lses": lambda v: (v["num_parts"], v["lse_stride"], v["num_rows"]),
    "out": lambda v: _flat(v["num_rows"] * v["head_dim"]),
    "out_lse": lambda v: _flat(v["num_rows"]),
    "block_ids": lambda v: _flat(num_gathered(v)),
    "pairs": lambda v: _flat(2 * v["num_pairs"]),
}


def _cache_runs(holds: Mapping[str, str], v: Values, name: str) -> tuple[Run, ...]:
    side = name[0]
    if v.get("key" if side == "k" else "value", 1) == 0:
        return ()  # a writer that leaves this pool out
    blocks = v["num_blocks"] if "num_blocks" in v else v["num_slots"] // v["block_size"]
    known = blocks < (UNLIMITED_BLOCKS if "num_blocks" in v else UNLIMITED_SLOTS // v["block_size"])
    return cache_pool(holds, v, side).runs(v[name], blocks if known else 1)


def _tile_runs(holds: Mapping[str, str], v: Values, name: str) -> tuple[Run, ...]:
    sizes = (v["block_size"], v["num_kv_heads"], v["head_dim"])
    if holds[name] == NVFP4.name:
        pools = nvfp4_pools(*sizes, v["block_stride_bytes"], v["data_section_bytes"])
    else:
        item = cache_format(holds[name]).dtype.itemsize
        pools = strided_pools(item, *sizes, v["blk_stride"], v["tok_stride"], v["kvh_stride"])
    return (Run(v[name], pools.block_bytes, _known_blocks(v), pools.stride_bytes),)


def _gathered_runs(holds: Mapping[str, str], v: Values, name: str) -> tuple[Run, ...]:
    pools = gather_pool(
        v["cache_format"],
        (v["block_size"], v["num_kv_heads"], v["head_dim"]),
        v["block_stride_bytes"],
        (v["token_stride_bytes"], v["head_stride_bytes"]),
        (v["scale_token_stride_bytes"], v["scale_head_stride_bytes"]),
        v["data_section_bytes"],
    )
    return (Run(v[name], pools.block_bytes, _known_blocks(v), pools.stride_bytes),)


def _copied_runs(holds: Mapping[str, str], v: Values, name: str) -> tuple[Run, ...]:
    side, _, end = name.partition("_")
    if not v[f"{side}_source"]:
        return ()  # left out
    stride, section = v[f"{end}_stride_bytes"], v[f"{end}_section_bytes"]
    count = v[f"num_{end}_blocks"]
    return (
        Run(v[name], v["data_bytes"], count, stride),
        Run(v[name] + section, v["scale_bytes"], count, stride),
    )


def _known_blocks(v: Values) -> int:
    """Blocks of a pool; one where it is not known how many."""
    blocks = int(v["num_blocks"])
    return blocks if blocks < UNLIMITED_BLOCKS else 1


_BLOCKS_OF: dict[str, Callable[[Mapping[str, str], Values, str], tuple[Run, ...]]] = {
    **dict.fromkeys(("k_cache", "v_cache"), _cache_runs),
    **dict.fromkeys(("k_pool", "v_pool"), _tile_runs),
    "pool": _gathered_runs,
    **dict.fromkeys(("k_source", "v_source", "k_target", "v_target"), _copied_runs),
}


def memory_of(holds: Mapping[str, str], v: Values) -> Iterator[tuple[str, tuple[Run, ...]]]:
    """Each pointer parameter that is given, and its memory as far as the scalars tell.

    A decoder's own memory is left out, and so are pools that a launch leaves out.
    """
    for name, held in holds.items():
        if not v[name]:
            continue
        if name in _BLOCKS_OF:
            yield name, _BLOCKS_OF[name](holds, v, name)
        elif name in _ROWS_OF:
            count, stride, row = _ROWS_OF[name](v)
            item = ITEM_BYTES[held]
            yield name, (Run(v[name], item * row, count, item * stride),)
