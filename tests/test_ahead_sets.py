"""What a set of kernels compiled ahead of time holds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged.ahead import KernelSet
from cupaged.errors import ArgumentTypeError, ArgumentValueError, KernelSourceError
from cupaged.formats import FP8, CacheLayout
from cupaged.registry import entries
from tests.test_ahead import ARCH, MODEL


def test_a_set_holds_what_its_objects_launch() -> None:
    """Of every kind of request, and each kernel once."""
    layout = CacheLayout(FP8, 2, 64, 16)
    kernels = KernelSet().add_cache(layout).add_cache(layout).add_decoder(layout, 8, max_seqs=600)
    kernels.add_decoder(layout, 8, split_tokens=64, max_blocks_per_seq=4).add_cascade(layout, 8)
    found = kernels.sources(ARCH)
    assert len({(source.entry, source.defines) for source in found}) == len(found)
    assert {source.entry for source in found} == {
        "reshape_and_cache_fp8", "gather_tokens_f32", "gather_tokens_bf16", "copy_cache_blocks",
        "paged_decode_attn_planned", "paged_decode_attn_plan", "paged_decode_attn_chunked",
        "paged_decode_attn_merge_chunks", "merge_states_bf16",
    }  # fmt: skip
    assert {dict(source.defines).get("SPEC_QUERY_TOKENS") for source in found} == {None, "1", "6"}
    smaller = kernels.sources("sm_80")
    assert {dict(source.defines).get("SPEC_BULK") for source in smaller} == {None, "0"}


def test_a_checked_decoders_set_holds_the_checks() -> None:
    """Without NVRTC there is no other place that they could come from."""
    layout = CacheLayout(FP8, 2, 64, 16)
    plain = KernelSet().add_decoder(layout, 8).sources(ARCH)
    found = KernelSet().add_decoder(layout, 8, checked=True).sources(ARCH)
    checks = {entry.entry for entry in entries() if entry.module == "input_checks"}
    assert {source.entry for source in found} == {source.entry for source in plain} | checks
    assert {source.entry for source in KernelSet().add_checks().sources(ARCH)} == checks


def test_what_a_set_refuses(tmp_path: Path) -> None:
    kernels = KernelSet()
    with pytest.raises(ArgumentValueError, match="formats: got 'int8', allowed are bf16, fp8, nvfp4"):
        kernels.add_model(**MODEL, formats=("int8",))
    with pytest.raises(KernelSourceError, match="no kernel bf16_absmax:nothing"):
        kernels.add_kernel("bf16_absmax", "nothing")
    for arch in ("compute_90", "sm_", "90"):
        with pytest.raises(ArgumentValueError, match=f"arch: got '{arch}'"):
            kernels.sources(arch)
    for arch in ("sm_70", "sm_75", "sm_9a"):
        with pytest.raises(ArgumentValueError, match=f"arch: got '{arch}', allowed are sm_80 and later"):
            kernels.sources(arch)
    for archs in ("sm_90a", None, 90):
        with pytest.raises(ArgumentTypeError, match=f"archs: got {archs!r}"):
            kernels.save(tmp_path, archs)  # type: ignore[arg-type]
    for unnamed in (90, None, ["sm_90a"]):
        with pytest.raises(ArgumentTypeError, match=r"arch: got .*allowed is a name"):
            kernels.save(tmp_path, [unnamed])  # type: ignore[list-item]
    with pytest.raises(ArgumentValueError, match="head_dim: got 40"):
        KernelSet().add_kernel(
            "reshape_and_cache_bf16", "reshape_and_cache_bf16", head_dim=40, block_size=16
        ).sources(ARCH)
    assert not list(tmp_path.iterdir())
