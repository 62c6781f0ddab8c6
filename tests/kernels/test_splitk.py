"""The split-K workspace format, the reduction on its own, and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged import ops
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, CacheFormat
from tests import oracle
from tests.poison import GUARD_BYTE, Options, Shape, random_case
from tests.rig import Rig, bits, launch_arguments, run_decode, run_reduce, run_split, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
reduces = pytest.mark.parametrize("name", ["fp8", "nvfp4"])


@formats
@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_workspace_rows_are_states(rig: Rig, fmt: CacheFormat, num_splits: int) -> None:
    """Each row, merged in float64 with the others, gives the attention; an empty one is (0, -inf, 0)."""
    case = random_case(fmt, [1, 100, 17, 0])
    workspace = rig.download(run_split(upload_case(rig, case), num_splits)).astype(np.float64)
    assert not np.isnan(workspace).any(), "every element is written"
    o, m, total = workspace[..., :-2], workspace[..., -2], workspace[..., -1]
    empty = total == 0
    assert (m[empty] == -np.inf).all()
    assert (o[empty] == 0).all()
    assert np.isfinite(m[~empty]).all()
    tiles = [-(-int(n) // 16) for n in case.seq_lens]
    for seq, count in enumerate(tiles):
        assert (~empty[seq]).sum(axis=-1).max() <= max(count, 0)
    out, lse = oracle.merge_float64(workspace)
    expected, expected_lse = case.expected()
    np.testing.assert_allclose(out, expected, atol=4e-3, rtol=0)
    live = case.seq_lens > 0
    np.testing.assert_allclose(lse[live], expected_lse[live], atol=2e-4, rtol=1e-5)
    assert (lse[~live] == -np.inf).all()


@formats
def test_workspace_is_not_exceeded(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [40, 3])
    up = upload_case(rig, case)
    count = case.num_seqs * case.num_q_heads * 4 * (case.layout.head_dim + 2)
    storage = rig.gpu.asarray(np.full(4 * count + 4096, GUARD_BYTE, np.uint8))
    fmt_name = fmt.name
    entry = f"paged_decode_attn_splitk_{fmt_name}"
    layout = case.layout
    own = launch_arguments(entry, layout, (case.k_scale, case.v_scale))
    getattr(ops, entry)(
        rig.gpu,
        rig.kernel(f"paged_decode_attn_{fmt_name}", entry),
        up.q,
        up.k.array,
        up.v.array,
        rig.gpu.pointer(storage),
        up.tables,
        up.lengths,
        case.max_blocks_per_seq,
        case.num_q_heads,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        case.inv_sqrt_d,
        4,
        *own.scales,
        case.q_stride,
        *own.strides,
        case.num_seqs,
        *own.window,
        rig.stream,
        **own.keywords,
    )
    host = rig.download(storage)
    assert (host[4 * count :] == GUARD_BYTE).all()


def _reduce(rig: Rig, workspace: np.ndarray, name: str) -> np.ndarray:
    num_seqs, num_q_heads, num_splits, row = workspace.shape
    output = rig.full_bf16((num_seqs, num_q_heads, row - 2))
    entry = f"paged_decode_attn_reduce_{name}"
    getattr(ops, entry)(
        rig.gpu,
        rig.kernel("paged_decode_attn_reduce", entry),
        rig.upload(workspace),
        output,
        rig.upload(np.ones(num_seqs, np.int32)),
        num_q_heads,
        row - 2,
        num_splits,
        num_seqs,
        rig.stream,
    )
    return rig.download_bf16(output)


@reduces
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 33])
def test_reduce_against_float64(rig: Rig, name: str, head_dim: int, num_splits: int) -> None:
    rng = np.random.default_rng(num_splits)
    workspace = rng.standard_normal((3, 4, num_splits, head_dim + 2)).astype(np.float32)
    workspace[..., -2] *= 10
    workspace[..., -1] = np.abs(workspace[..., -1]) + 0.5
    workspace[0, :, 0] = [*[0.0] * head_dim, -np.inf, 0.0]
    workspace[2, :, -1] = [*[0.0] * head_dim, -np.inf, 0.0]
    oracle.assert_matches(_reduce(rig, workspace, name), oracle.merge_float64(workspace)[0])


@reduces
def test_reduce_of_empty_and_of_one_state(rig: Rig, name: str) -> None:
    workspace = np.zeros((2, 1, 4, 66), np.float32)
    workspace[..., -2] = -np.inf
    workspace[1, 0, 2] = [*[7.0] * 64, 2.0, 1.0]
    got = _reduce(rig, workspace, name)
    assert not bits(got[0]).any()
    assert (got[1].astype(np.float32) == 7.0).all(), "an empty state weighs exactly nothing"


@reduces
def test_reduce_keeps_nan(rig: Rig, name: str) -> None:
    workspace = np.zeros((1, 1, 3, 66), np.float32)
    workspace[0, 0, :, -1] = 1.0
    workspace[0, 0, 1, :64] = np.nan
    workspace[0, 0, 1, -1] = np.nan
    assert np.isnan(_reduce(rig, workspace, name).astype(np.float32)).all()


@reduces
def test_merge_weighs_by_natural_exponentials(rig: Rig, name: str) -> None:
    """3072 keys of value 0 and 64 of value 1, all scores 0: 64 / 3136 (a base mix-up gives 0.00374)."""
    workspace = np.zeros((1, 1, 2, 66), np.float32)
    workspace[0, 0, 0, -1] = 3072.0
    workspace[0, 0, 1, :64] = 64.0 / np.e
    workspace[0, 0, 1, -2:] = [1.0, 64.0 / np.e]  # the same sums at reference 1
    got = _reduce(rig, workspace, name).astype(np.float64)
    np.testing.assert_allclose(got, 64 / 3136, rtol=2**-8)


@pytest.mark.parametrize("num_splits", [1, 16, 512])
def test_error_does_not_grow_with_splits(rig: Rig, num_splits: int) -> None:
    case = random_case(BF16, [4096], Shape(4, 1, 64, 16))
    oracle.assert_matches(run_decode(upload_case(rig, case), num_splits), case.expected()[0])


def test_many_splits(rig: Rig) -> None:
    case = random_case(BF16, [40], Shape(1, 1, 64, 16))
    oracle.assert_matches(run_decode(upload_case(rig, case), 16_384), case.expected()[0])


@formats
@pytest.mark.parametrize("splits", [0, 3], ids=["single", "splits3"])
def test_runs_give_the_same_bits(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    case = random_case(fmt, [333, 20], Shape(8, 2, 128, 16))
    up = upload_case(rig, case)
    first = bits(run_decode(up, splits))
    for _ in range(5):
        np.testing.assert_array_equal(bits(run_decode(up, splits)), first)


@formats
@pytest.mark.parametrize("splits", [0, 3], ids=["single", "splits3"])
def test_a_sequence_alone_equals_itself_in_a_batch(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    together = random_case(fmt, [333, 20, 100, 64], Shape(8, 2, 128, 16), options=Options(seed=1))
    batch = run_decode(upload_case(rig, together), splits)
    import dataclasses

    row = 2
    alone = dataclasses.replace(
        together,
        q=together.q[row : row + 1],
        block_tables=together.block_tables[row : row + 1],
        seq_lens=together.seq_lens[row : row + 1],
    )
    np.testing.assert_array_equal(bits(run_decode(upload_case(rig, alone), splits))[0], bits(batch)[row])


def test_smaller_workspace_is_refused(rig: Rig) -> None:
    case = random_case(BF16, [40])
    up = upload_case(rig, case)
    small = rig.gpu.zeros(case.num_q_heads * 2 * 66 - 1, np.float32)
    with pytest.raises(ArgumentValueError, match="workspace"):
        run_reduce(up, small, 2)
