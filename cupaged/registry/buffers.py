"""How large the workspace buffers of kernels are, for loaders in other languages."""

from __future__ import annotations

from cupaged.registry.decode import num_parts, planned_problem
from cupaged.registry.entry import Constants, KernelEntry, unknown_device
from cupaged.registry.ring import num_slices
from cupaged.registry.terms import div_ceil, named


def buffer_expressions(entry: KernelEntry, constants: Constants) -> dict[str, str]:
    """Bytes of the workspace buffers of an entry, by parameter.

    Integer expressions of ``num_sms`` and of what the caller decides: ``max_seqs`` is the most sequences of a
    launch, ``max_tokens`` the longest sequence, ``split_tokens`` the tokens of a chunk. ``counters`` must be
    zero before the first launch; launches leave it so.
    """
    head_dim, max_seqs = constants.get("head_dim", 0), named("max_seqs")
    found: dict[str, int] = {}
    if entry.entry == "paged_decode_attn_planned":
        parts = num_parts(constants, unknown_device())
        found = {"part_o": parts * (4 * head_dim), "part_state": parts * 8}
        found["counters"] = max_seqs * (4 * num_slices(planned_problem(constants), constants))
        if constants["many"]:
            found["plan"] = (max_seqs * 2 + 1) * 4
    if entry.entry == "paged_decode_attn_chunked":
        rows = constants["num_kv_heads"] * constants["gqa_ratio"] * constants["query_tokens"]
        chunks = div_ceil(named("max_tokens"), named("split_tokens"))
        found = {"states": max_seqs * rows * chunks * (4 * (head_dim + 2))}
    return {name: str(size) for name, size in found.items()}
