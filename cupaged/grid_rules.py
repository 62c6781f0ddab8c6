"""Launch grids and buffer sizes of the package's kernels as text, for loaders in other languages.

Each rule is one integer expression of ``+ - * //``, ``min`` and ``max``. It may name the kernel's scalar
parameters, ``num_sms`` (multiprocessors of the GPU) and, for buffers, what the caller decides. A grid with a
zero in it means that there is nothing to launch. `cupaged.registry` is what the package itself uses; a test
compares both.
"""

from __future__ import annotations

from collections.abc import Callable

from cupaged.registry import Constants, KernelEntry
from cupaged.registry.decode import planned_problem
from cupaged.registry.direct import ABSMAX_BLOCKS, ABSMAX_PIECE, WRITE_VALUES
from cupaged.registry.ring import num_slices
from cupaged.registry.tiled import head_parts
from cupaged.registry.upkeep import READ_GROUP

Rules = tuple[str, str, str]


def _columns(constants: Constants, slices: int) -> str:
    """Blocks of a slice that are resident at once."""
    return f"max(1, num_sms * {constants['blocks_per_sm']} // {slices})"


def _slices(constants: Constants) -> int:
    return num_slices(planned_problem(constants), constants)


def _split_slices(constants: Constants) -> int:
    head_tiles = -(-constants["gqa_ratio"] // 8)
    groups = -(-head_tiles // constants["block_head_tiles"])
    return constants["num_kv_heads"] // constants["block_heads"] * groups


def _planned(constants: Constants) -> Rules:
    slices = _slices(constants)
    return f"min(1, num_seqs) * {_columns(constants, slices)}", str(slices), "1"


def _chunked(constants: Constants) -> Rules:
    slices = _slices(constants)
    return f"min(num_seqs * max_chunks, {_columns(constants, slices)})", str(slices), "1"


def _merge_chunks(constants: Constants) -> Rules:
    rows = constants["num_kv_heads"] * constants["gqa_ratio"] * constants["query_tokens"]
    return "num_seqs", str(rows), "1"


def _split(pieces: str) -> Callable[[Constants], Rules]:
    def rules(constants: Constants) -> Rules:
        slices = _split_slices(constants)
        return f"min({pieces}, {_columns(constants, slices)})", str(slices), "1"

    return rules


def _writer(values: int) -> Callable[[Constants], Rules]:
    def rules(constants: Constants) -> Rules:
        groups = constants["head_dim"] // values
        return f"(num_tokens * num_kv_heads * {groups} + 255) // 256", "1", "1"

    return rules


def _step(constants: Constants) -> Rules:
    return "num_seqs", f"num_kv_heads * {head_parts(constants)}", "num_splits"


def _fixed(*rules: str) -> Callable[[Constants], Rules]:
    x, y, z = rules
    return lambda constants: (x, y, z)


def _absmax(rows: str, elements: str) -> Callable[[Constants], Rules]:
    pieces = f"max(1, ({elements} // 8 + {ABSMAX_PIECE - 1}) // {ABSMAX_PIECE})"
    return _fixed(f"min({ABSMAX_BLOCKS}, ({rows} * {pieces} + 7) // 8) * min(1, {elements})", "1", "1")


_ROWS = _fixed("num_seqs", "num_q_heads", "1")
_GATHER = _fixed(f"(seq_len * num_kv_heads * (head_dim // {READ_GROUP}) + 255) // 256", "1", "1")
_MERGE = _fixed("(num_rows + 3) // 4", "1", "1")

_GRIDS: dict[str, Callable[[Constants], Rules]] = {
    "paged_decode_attn_planned": _planned,
    "paged_decode_attn_chunked": _chunked,
    "paged_decode_attn_merge_chunks": _merge_chunks,
    "paged_decode_attn_plan": _fixed("min(1, num_seqs)", "1", "1"),
    **{f"paged_decode_attn_{fmt}": _split("num_seqs") for fmt in ("bf16", "fp8", "nvfp4")},
    **{
        f"paged_decode_attn_splitk_{fmt}": _split("num_seqs * num_splits") for fmt in ("bf16", "fp8", "nvfp4")
    },
    **{f"reshape_and_cache_{fmt}": _writer(values) for fmt, values in WRITE_VALUES.items()},
    **{f"paged_decode_attn_reduce_{fmt}": _ROWS for fmt in ("fp8", "nvfp4")},
    **{f"paged_decode_attn_tiled{suffix}": _step for suffix in ("", "_fp8", "_nvfp4")},
    "attention_merge_states": _ROWS,
    "attention_finalize": _ROWS,
    "bf16_absmax": _absmax("1", "n_elems"),
    "bf16_absmax_rows": _absmax("num_rows", "row_elems"),
    **{
        f"input_{name}": _fixed(f"min(1024, ({count} + 255) // 256)", "1", "1")
        for name, count in (
            ("range", "count"), ("slots", "num_tokens"), ("scales", "count"), ("sinks", "count"),
            ("value", "num_bytes"),
        )
    },
    **{
        f"input_{name}": _fixed(f"min(1024, {count})", "1", "1")
        for name, count in (("blocks", "num_seqs"), ("finite", "num_rows"), ("scale_bytes", "num_seqs"))
    },
    "gather_tokens_f32": _GATHER,
    "gather_tokens_bf16": _GATHER,
    "copy_cache_blocks": _fixed("num_pairs", "max(1, min(65535, (data_bytes + 16383) // 16384))", "2"),
    **dict.fromkeys((f"merge_states_{kind}" for kind in ("bf16", "f16", "f32")), _MERGE),
    **dict.fromkeys((f"merge_states_f32_to_{kind}" for kind in ("bf16", "f16")), _MERGE),
}  # fmt: skip


def grid_rules(entry: KernelEntry, constants: Constants) -> Rules:
    """Blocks along x, y and z of an entry's launches."""
    return _GRIDS[entry.entry](constants)


def buffer_rules(entry: KernelEntry, constants: Constants) -> dict[str, str]:
    """Bytes of the workspace buffers of an entry, by parameter.

    ``max_seqs`` is the most sequences of a launch, ``max_tokens`` the longest sequence, ``split_tokens`` the
    tokens of a chunk. ``counters`` must be zero before the first launch; launches leave it so.
    """
    head_dim = constants.get("head_dim", 0)
    if entry.entry == "paged_decode_attn_planned":
        problem, slices = planned_problem(constants), _slices(constants)
        rows = min(problem.head_rows, 8 * constants["block_head_tiles"]) * constants["block_heads"]
        parts = f"2 * {_columns(constants, slices)} * {slices} * {rows}"
        plan = {"plan": "4 * (2 * max_seqs + 1)"} if constants["many"] else {}
        return {
            "part_o": f"{parts} * {4 * head_dim}",
            "part_state": f"{parts} * 8",
            "counters": f"4 * max_seqs * {slices}",
            **plan,
        }
    if entry.entry == "paged_decode_attn_chunked":
        rows = constants["num_kv_heads"] * constants["gqa_ratio"] * constants["query_tokens"]
        chunks = "((max_tokens + split_tokens - 1) // split_tokens)"
        return {"states": f"max_seqs * {rows} * {chunks} * {4 * (head_dim + 2)}"}
    return {}
