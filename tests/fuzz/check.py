"""Runs one random case through the writer and through every path, against float64."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout
from tests import oracle
from tests.fuzz.draws import Draw, Fault
from tests.oracle import F64, assert_matches
from tests.paths import Decoded, call, decoder_of, offers, run_uploaded
from tests.poison import Options, PagedCase, build_case, with_gaps
from tests.rig import Rig, UploadedCase, bits, upload_case

LSE_ATOL, LSE_RTOL = 3e-4, 1e-5


@dataclass
class Built:
    """A drawn case with what it holds.

    Attributes:
        case: as a kernel sees it, faults included.
        tokens: BF16 K and V of all sequences behind each other, ``[num_tokens, num_kv_heads, head_dim]``.
        slots: int64 ``[num_tokens]``.
        out, lse: float64; NaN in a faulty row.
    """

    case: PagedCase
    tokens: tuple[npt.NDArray[Any], npt.NDArray[Any]]
    slots: npt.NDArray[np.int64]
    out: F64
    lse: F64


def build(draw: Draw) -> Built:
    """Tokens, pools, tables and the oracle's result."""
    shape, rng = draw.shape, np.random.default_rng(draw.seed)
    sizes = (sum(draw.lengths), shape.num_kv_heads, shape.head_dim)
    key, value = (rng.standard_normal(sizes, np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    ends = np.cumsum(draw.lengths)
    if draw.needle != 1.0:
        live = [(end - n, end) for n, end in zip(draw.lengths, ends, strict=True) if n]
        at = [int(rng.integers(begin, end)) for begin, end in live]
        key[at] = (key[at].astype(np.float32) * draw.needle).astype(ml_dtypes.bfloat16)
    magnitude = 2.0**draw.log_magnitude
    q = rng.standard_normal((len(draw.lengths), shape.num_q_heads, shape.head_dim)) * magnitude
    case = build_case(
        draw.cache_format,
        q,
        np.split(key, ends[:-1]),
        np.split(value, ends[:-1]),
        block_size=shape.block_size,
        inv_sqrt_d=draw.sharpness / magnitude / np.sqrt(shape.head_dim),
        window=draw.window,
        options=_options(draw),
    )
    slots = _slots(case)
    out, lse = case.expected()
    case = _with_fault(case, draw.fault, out, lse)
    return Built(case, (key, value), slots, out, lse)


def _options(draw: Draw) -> Options:
    width = max(1, *(-(-n // draw.shape.block_size) for n in draw.lengths)) + draw.extra_columns
    return Options(
        poison=draw.poison,
        seed=draw.seed,
        unused_column=draw.unused_column,
        table_width=width,
        spare_blocks=draw.spare_blocks,
        block_padding=_block_padding(draw),
        section_padding=draw.section_padding,
        q_gap=draw.q_gap,
        k_scale=draw.scales[0],
        v_scale=draw.scales[1],
    )


def _block_padding(draw: Draw) -> int:
    """As drawn, and what makes blocks begin at multiples of 16 bytes."""
    shape = draw.shape
    tight = CacheLayout(draw.cache_format, shape.num_kv_heads, shape.head_dim, shape.block_size).block_bytes
    return draw.block_padding + -(tight + draw.section_padding) % 16 if draw.block_padding else 0


def _slots(case: PagedCase) -> npt.NDArray[np.int64]:
    size, found = case.layout.block_size, [np.zeros(0, np.int64)]
    for table, n in zip(case.block_tables, case.seq_lens, strict=True):
        t = np.arange(n)
        found.append(table[t // size].astype(np.int64) * size + t % size)
    return np.concatenate(found)


def _with_fault(case: PagedCase, fault: Fault | None, out: F64, lse: F64) -> PagedCase:
    """The case with its fault, and NaN in that row of the result."""
    if fault is None:
        return case
    row, size = fault.row % case.num_seqs, case.layout.block_size
    tables, lengths = case.block_tables.copy(), case.seq_lens.copy()
    n = int(lengths[row])
    if fault.column is None:
        lengths[row] = (
            fault.value if fault.value < 0 else max(fault.value, case.max_blocks_per_seq * size + 1)
        )
    else:
        first = max(0, n - case.window) // size if case.window else 0
        attended = -(-n // size) - first
        if attended == 0:
            return case
        right = 0 <= fault.value < case.num_blocks
        tables[row, first + fault.column % attended] = case.num_blocks if right else fault.value
    out[row] = lse[row] = np.nan
    return dataclasses.replace(case, block_tables=tables, seq_lens=lengths)


def check(rig: Rig, draw: Draw) -> int:
    """Raises AssertionError where anything is not as it must be; returns how many launches there were."""
    built = build(draw)
    check_writer(rig, draw, built)
    up = upload_case(rig, built.case)
    launches = 1
    for path in ("single", f"splits{draw.splits}", "decoder", f"tiled{draw.tile}"):
        if not offers(path, draw.cache_format, draw.window):
            continue
        if path == "decoder" and not _decodes(rig, built.case):
            continue
        try:
            check_path(up, path, built)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error
        launches += 1
    up.assert_pools_untouched()
    return launches


def _decodes(rig: Rig, case: PagedCase) -> bool:
    """Whether there is a `Decoder` for the shape; one that refuses it says so when it is made."""
    try:
        decoder_of(rig, case)
    except ArgumentValueError:
        return False
    return True


def check_path(up: UploadedCase, path: str, built: Built) -> None:
    """One path against the oracle, then once more: the same bits."""
    found = run_uploaded(up, path)
    assert_matches(found.out, built.out)
    lse = _lse(found)
    if lse is not None:
        np.testing.assert_allclose(lse, built.lse, atol=LSE_ATOL, rtol=LSE_RTOL)
    np.testing.assert_array_equal(bits(run_uploaded(up, path).out), bits(found.out), "two runs")


def _lse(found: Decoded) -> F64 | None:
    if found.lse is not None:
        return found.lse.astype(np.float64)
    if found.workspace is None:
        return None
    with np.errstate(invalid="ignore"):  # a row that is NaN may hold infinities
        return oracle.merge_float64(found.workspace.astype(np.float64))[1]


def check_writer(rig: Rig, draw: Draw, built: Built) -> None:
    """The device writes what the host's packer wrote, byte for byte, and nothing else."""
    case, layout = built.case, built.case.layout
    if not len(built.slots):
        return
    order = np.random.default_rng(draw.seed).permutation(len(built.slots))
    slots = built.slots[order]
    rows = [tokens[order] for tokens in built.tokens]
    if draw.drop:
        rows = [np.concatenate([r, r[:: draw.drop]]) for r in rows]
        never = np.resize(np.array([-1, -(2**40), case.num_blocks * layout.block_size, 2**33]), len(rows[0]))
        slots = np.concatenate([slots, never[: len(rows[0]) - len(slots)]])
    row = layout.num_kv_heads * layout.head_dim
    stride = row + draw.kv_gap
    pools = []
    for host in (case.k_pool, case.v_pool):
        blank = _poisoned(case, host)
        pools.append(rig.upload_guarded(blank))
    call(
        rig,
        f"reshape_and_cache_{draw.format}",
        key=rig.upload(with_gaps(rows[0], stride)),
        value=rig.upload(with_gaps(rows[1], stride)),
        k_cache=pools[0].array,
        v_cache=pools[1].array,
        slot_mapping=rig.upload(slots),
        num_tokens=len(slots),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        key_stride=stride,
        value_stride=stride,
        cache_stride=layout.block_stride_bytes // (2 if draw.format == "bf16" else 1),
        block_stride_bytes=layout.block_stride_bytes,
        data_section_bytes=layout.data_section_bytes,
    )
    for pool, host in zip(pools, (case.k_pool, case.v_pool), strict=True):
        rig.assert_guards_intact(pool)
        found = rig.download(pool.array).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(found, host.reshape(-1).view(np.uint8), "the writer's bytes")


def _poisoned(case: PagedCase, host: npt.NDArray[Any]) -> Any:
    """A pool in which nothing has been written yet."""
    from tests.poison import _poisoned_pool

    fresh = _poisoned_pool(case.layout, case.num_blocks, case.options.poison)
    assert fresh.array.shape == host.shape
    return fresh
