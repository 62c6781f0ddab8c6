"""Splits, merging and reproducibility, on every path and format."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat
from tests import oracle
from tests.paths import call, decode_case, path_format_pairs, run, run_uploaded
from tests.poison import Options, PagedCase, Shape, build_case, random_case
from tests.rig import Rig, bits, upload_case

edge = pytest.mark.edge
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
everywhere = pytest.mark.parametrize(
    ("path", "fmt"), path_format_pairs(), ids=[f"{p}-{f.name}" for p, f in path_format_pairs()]
)
FIXED_PATHS = ("single", "splits1", "splits16")  # whose cuts do not depend on the batch


@edge("merge-empty")
@edge("merge-base")
@formats
@pytest.mark.parametrize("path", ["splits2", "splits7", "decoder"])
def test_parts_weigh_by_natural_exponentials(rig: Rig, path: str, fmt: CacheFormat) -> None:
    """3072 keys of V = 0, then 64 of V = 1.5, all scores 0: 1.5 * 64 / 3136 (a base mix-up shows)."""
    n = 3072 + 64
    values = np.zeros((n, 1, 64), np.float32)
    values[3072:] = 1.5
    case = build_case(fmt, np.zeros((1, 2, 64)), [np.zeros_like(values)], [values])
    found = run(rig, case, path)
    oracle.assert_matches(found.out, np.full(case.q.shape, 1.5 * 64 / n))
    if found.lse is not None:
        np.testing.assert_allclose(found.lse, np.log(n), rtol=1e-6)


@edge("merge-base")
@formats
@pytest.mark.parametrize("path", ["splits2", "splits7"])
def test_parts_merge_in_float64_to_the_oracles_lse(rig: Rig, path: str, fmt: CacheFormat) -> None:
    case = random_case(fmt, [1, 100, 700, 0])
    workspace = run(rig, case, path).workspace
    assert workspace is not None
    _, lse = oracle.merge_float64(workspace.astype(np.float64))
    np.testing.assert_allclose(lse, case.expected()[1], atol=3e-4, rtol=1e-5)


@edge("splits-error")
@formats
def test_the_error_does_not_grow_with_splits(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [4096], Shape(4, 1, 64, 16))
    expected = case.expected()[0]
    errors = {}
    for splits in (1, 16, 256):
        out = run(rig, case, f"splits{splits}").out
        oracle.assert_matches(out, expected)
        errors[splits] = np.linalg.norm(out.astype(np.float64) - expected)
    assert max(errors.values()) <= 1.5 * errors[1], errors


def row_of(case: PagedCase, row: int) -> PagedCase:
    """One sequence of a batch, in the same pools."""
    return dataclasses.replace(
        case,
        q=case.q[row : row + 1],
        block_tables=case.block_tables[row : row + 1],
        seq_lens=case.seq_lens[row : row + 1],
        k_dense=case.k_dense[row : row + 1],
        v_dense=case.v_dense[row : row + 1],
    )


def same_tokens_elsewhere(fmt: CacheFormat, others: list[int], row: int, n: int, seed: int) -> PagedCase:
    """A batch whose sequence `row` holds the same n tokens whatever the seed, in blocks that it chooses."""
    sizes = [*others[:row], n, *others[row:]]
    fixed, free = np.random.default_rng(99), np.random.default_rng(seed)
    draw = [fixed if i == row else free for i in range(len(sizes))]
    shape = [(size, 2, 64) for size in sizes]
    keys: list[npt.NDArray[Any]] = [r.standard_normal(s).astype(np.float32) for r, s in zip(draw, shape, strict=True)]  # fmt: skip # noqa: E501
    values = [r.standard_normal(s).astype(np.float32) for r, s in zip(draw, shape, strict=True)]
    q = [r.standard_normal((4, 64)) for r in draw]
    options = Options(seed=seed, k_scale=0.02, v_scale=0.02) if fmt == FP8 else Options(seed=seed)
    return build_case(fmt, np.stack(q), keys, values, options=options)


@edge("batch-invariance")
@formats
@pytest.mark.parametrize("path", FIXED_PATHS)
def test_a_sequence_does_not_depend_on_its_batch(rig: Rig, path: str, fmt: CacheFormat) -> None:
    n = 8192
    alone = run(rig, same_tokens_elsewhere(fmt, [], 0, n, seed=1), path).out[0]
    others = [int(x) for x in np.random.default_rng(0).integers(0, 300, 63)]
    for row in (0, 31, 63):
        batch = run(rig, same_tokens_elsewhere(fmt, others, row, n, seed=2 + row), path).out[row]
        np.testing.assert_array_equal(bits(batch), bits(alone))


@edge("batch-invariance")
@formats
def test_a_decoder_of_fixed_splits_does_not_depend_on_the_batch(rig: Rig, fmt: CacheFormat) -> None:
    n, outs = 8192, []
    others = [int(x) for x in np.random.default_rng(0).integers(0, 300, 63)]
    for row, lengths in ((0, []), (0, others), (31, others), (63, others)):
        case = same_tokens_elsewhere(fmt, lengths, row, n, seed=len(outs))
        decoder = Decoder(
            rig.gpu, case.layout, 4, 64, split_tokens=512, max_blocks_per_seq=case.max_blocks_per_seq
        )
        outs.append(bits(decode_case(upload_case(rig, case), decoder).out[row]))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@edge("batch-invariance")
@edge("determinism")
@everywhere
def test_twenty_runs_give_the_same_bits(rig: Rig, path: str, fmt: CacheFormat) -> None:
    up = upload_case(rig, random_case(fmt, [777, 20, 0, 64, 130], Shape(8, 2, 64, 16)))
    first = run_uploaded(up, path)
    for _ in range(19):
        again = run_uploaded(up, path)
        np.testing.assert_array_equal(bits(again.out), bits(first.out))
        for name in ("lse", "workspace"):
            one, other = getattr(first, name), getattr(again, name)
            if one is not None:
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@edge("determinism")
@formats
def test_writers_and_absmax_give_the_same_bits(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [40], Shape(4, 2, 64, 16))
    layout = case.layout
    rng = np.random.default_rng(1)
    source = rig.upload(rng.standard_normal((40, 2, 64)).astype(np.float32).view(np.uint16)[:, :, :64])
    slots = rig.upload(rng.permutation(48)[:40].astype(np.int64))
    found = []
    for _ in range(3):
        pools = [rig.gpu.zeros(layout.pool_shape(3), layout.pool_dtype) for _ in range(2)]
        call(rig, f"reshape_and_cache_{fmt.name}", key=source, value=source, k_cache=pools[0],
             v_cache=pools[1], slot_mapping=slots, num_tokens=40, num_kv_heads=2, head_dim=64, block_size=16,
             k_scale=0.5, v_scale=0.25, key_stride=128, value_stride=128, cache_stride=layout.cache_stride,
             block_stride_bytes=layout.block_stride_bytes,
             data_section_bytes=layout.data_section_bytes)  # fmt: skip
        largest = rig.gpu.zeros(1, np.float32)
        call(rig, "bf16_absmax", data=source, out_max=largest, n_elems=40 * 128)
        found.append([rig.download(x).tobytes() for x in (*pools, largest)])
    assert found[0] == found[1] == found[2]


@edge("workspace-size")
@formats
def test_a_workspace_too_small_is_refused(rig: Rig, fmt: CacheFormat) -> None:
    up = upload_case(rig, random_case(fmt, [40, 3]))
    for missing in (1, 66):
        short = rig.gpu.zeros(2 * 4 * 2 * 66 - missing, np.float32)
        with pytest.raises(ArgumentValueError, match="workspace"):
            run_uploaded_with(up, "splits2", short)


def run_uploaded_with(up: Any, path: str, workspace: Any) -> None:
    from tests.paths import arguments

    named = arguments(up) | {"workspace": workspace, "num_splits": int(path[6:])}
    call(up.rig, f"paged_decode_attn_splitk_{up.case.layout.format.name}", **named)


@edge("workspace-size")
def test_a_decoders_workspace_is_what_it_says(rig: Rig) -> None:
    case = random_case(BF16, [40], Shape(8, 2, 64, 16))
    decoder = Decoder(rig.gpu, case.layout, 8, 4)
    assert sum(int(array.nbytes) for array in decoder._kernels._arrays) == decoder.workspace_bytes
