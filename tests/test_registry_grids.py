"""How many blocks each kernel is launched with."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import ANY

import pytest

from cupaged.errors import ArgumentValueError
from cupaged.registry import (
    KernelEntry,
    div_ceil,
    entries,
    find,
    head_tiles,
    limits_of_capability,
)
from cupaged.registry.decode import check_resident, planned_spec
from cupaged.registry.ring import RingProblem, ring_shape
from tests.registry_cases import DECODE, DEVICES, HOPPER, PINNED, TILED, constants, grid_of


def test_attention_blocks_grow_with_groups_of_eight_heads() -> None:
    assert [head_tiles(ratio) for ratio in (1, 8, 9, 16, 17, 128)] == [1, 1, 2, 2, 3, 16]
    for entry in TILED:
        blocks = [
            entry.block(constants(entry, num_q_heads=2 * ratio, gqa_ratio=ratio))[0]
            for ratio in (1, 8, 9, 16)
        ]
        assert blocks == [128, 128, 256, 256]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
@pytest.mark.parametrize("entry", [*DECODE, *PINNED[:2]], ids=lambda e: e.entry)
def test_decode_grids_are_persistent(entry: KernelEntry, kv_heads: int) -> None:
    """Columns share the pieces, or the whole batch; rows are slices of the heads."""
    heads = {"num_q_heads": 16 * kv_heads, "num_kv_heads": kv_heads}
    found = constants(entry, **heads)
    slices = kv_heads // found["block_heads"] * div_ceil(2, found["block_head_tiles"])
    columns = HOPPER.num_sms * found["blocks_per_sm"] // slices
    pieces = 1
    for second in entry.grid_names[1:]:
        assert second in ("num_splits", "max_chunks")
        pieces = 5
    values = (pieces,) if pieces > 1 else ()
    for num_seqs in (0, 1, 3, 70_000):
        wanted = min(num_seqs * pieces, columns)
        if entry.cooperative:
            wanted = columns if num_seqs else 0
        assert entry.grid((num_seqs, *values), found, HOPPER) == (wanted, slices if wanted else ANY, 1)


def test_grids_of_the_planned_modules_other_kernels() -> None:
    merge, plan = PINNED[2:]
    found = merge.constants(
        planned_spec(head_dim=64, gqa_ratio=4, num_kv_heads=2, block_size=16, query_tokens=3), HOPPER
    )
    assert merge.grid((7,), found, HOPPER) == (7, 24, 1)
    assert 0 in merge.grid((0,), found, HOPPER)
    assert [plan.grid((n,), found, HOPPER)[0] for n in (0, 1, 100_000)] == [0, 1, 1]


@pytest.mark.parametrize("latency", [0, 1, 2, 3])
def test_what_must_be_resident_is(latency: int) -> None:
    """A co-operative launch never has more blocks than the device holds, or is refused."""
    planned, refused = PINNED[0], 0
    assert planned.cooperative
    assert not any(e.cooperative for e in entries() if e is not planned)
    emulator = replace(limits_of_capability(90, 4), cooperative_threads=16_384)
    for head_dim, ratio, kv_heads, tokens, limits in itertools.product(
        (16, 64, 128, 256), (1, 8, 128), (1, 8, 96, 200), (1, 8), (*DEVICES, emulator)
    ):
        spec = planned_spec(
            head_dim=head_dim,
            gqa_ratio=ratio,
            num_kv_heads=kv_heads,
            block_size=16,
            query_tokens=tokens,
            latency=latency,
        )
        found = planned.constants(spec, limits)
        columns, slices, _ = planned.grid((1,), found, limits)
        threads = columns * slices * planned.block(found)[0]
        resident = columns * slices <= limits.num_sms * found["blocks_per_sm"]
        if limits.cooperative_threads is not None:
            resident = threads <= limits.cooperative_threads
        if resident:
            check_resident(spec, limits)
            continue
        refused += 1
        heads = (
            f"num_q_heads, num_kv_heads: got {ratio * kv_heads}, {kv_heads}, which take {columns * slices}"
        )
        with pytest.raises(ArgumentValueError, match=f"^{heads} .*split_tokens"):
            check_resident(spec, limits)
    assert refused > 0


def test_a_device_without_room_for_three_stages_is_refused() -> None:
    """A stage of head_dim 256 in BF16 is 16 KiB at least; beside three of them a block has its plan."""
    problem = RingProblem("bf16", "bf16", 8, 256, 16, 4)
    shape = ring_shape(problem, replace(HOPPER, shared_per_block=64 * 1024))
    assert (shape.block_heads, shape.stages) == (1, 3)
    refusal = "^head_dim: got 256, of which three stages do not fit the 49152 bytes"
    with pytest.raises(ArgumentValueError, match=refusal):
        ring_shape(problem, replace(HOPPER, shared_per_block=48 * 1024))


def test_other_grids() -> None:
    for fmt in ("fp8", "nvfp4"):
        reduce = find("paged_decode_attn_reduce", f"paged_decode_attn_reduce_{fmt}")
        assert grid_of(reduce, num_seqs=3, num_q_heads=8) == (3, 8, 1)
    tiled = find("paged_decode_attn_tiled", "paged_decode_attn_tiled")
    finalize = find("paged_decode_attn_tiled", "attention_finalize")
    merge = find("paged_decode_attn_tiled", "attention_merge_states")
    assert grid_of(tiled, num_seqs=3, num_kv_heads=2, num_splits=5) == (3, 2, 5)
    assert grid_of(merge, num_seqs=3, num_q_heads=8) == (3, 8, 1)
    assert grid_of(finalize, num_seqs=3, num_q_heads=8) == (3, 8, 1)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_writer_grids_cover_every_group_of_values(fmt: str) -> None:
    entry = find(f"reshape_and_cache_{fmt}", f"reshape_and_cache_{fmt}")
    wide = 2 if fmt == "bf16" else 1  # threads for 16 values
    for tokens, heads, blocks in (
        (0, 2, 0),
        (1, 1, 1),
        (64 // wide, 1, 1),
        (64 // wide + 1, 1, 2),
        (1000, 8, 125 * wide),
    ):
        assert grid_of(entry, num_tokens=tokens, num_kv_heads=heads) == (blocks, 1, 1)


def test_absmax_grids() -> None:
    flat, rows = find("bf16_absmax", "bf16_absmax"), find("bf16_absmax", "bf16_absmax_rows")
    warp = 4096  # elements that a warp takes at a time, of 8 in a block
    for n_elems, blocks in (
        (0, 0),
        (1, 1),
        (8 * warp, 1),
        (8 * warp + 8, 2),
        (2**30, 2**15),
        (2**32 - 1, 2**15),
    ):
        assert grid_of(flat, n_elems=n_elems) == (blocks, 1, 1)
    for num_rows, row_elems, blocks in (
        (0, 8, 0),
        (8, 0, 0),
        (1, 8, 1),
        (9, 8, 2),
        (3, 3 * warp, 2),
        (2**20, 8, 2**15),
        (1, 2**30, 2**15),
    ):
        assert grid_of(rows, num_rows=num_rows, row_elems=row_elems) == (blocks, 1, 1)
