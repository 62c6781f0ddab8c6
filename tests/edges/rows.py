"""Inputs that break paged-attention software in the field: one row each, and which tests stand for it.

Tests in this folder and in ``tests/fuzz`` name their row with ``@pytest.mark.edge``; `ELSEWHERE` names those
of the rest of the suite. ``python -m tests.edges.rows`` prints the table of README.md.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# id -> (what goes in, what is right)
ROWS: dict[str, tuple[str, str]] = {
    # closed forms
    "fixture-u": ("q = 0, V[t] = t + 1", "(n + 1) / 2 in every lane, LSE = ln n"),
    "fixture-h": ("q = 0, V of head h = h + 1", "query head i reads KV head floor(i / ratio)"),
    "fixture-d": ("q = 0, V in lane d = d", "out[d] = d"),
    "fixture-x2": ("two keys, scores 0 and c", "1 / (1 + e^-c), in the first and the last lane"),
    "fixture-p": ("poison where no live token is", "the result does not change by a bit"),
    # lengths, tables, windows
    "lengths-mean": ("n around tiles, blocks and powers of two up to 4097", "first and last token count"),
    "lengths-tails": ("n = 1 and 3 with NaN or Inf behind", "1.0 and 2.0"),
    "table-block0-nan": ("block 0 all NaN, table [b, -1, -1]", "no clamp of -1 to block 0"),
    "empty-row": ("n = 4, 0, 7 over a NaN output", "2.5, 0, 4; LSE of the empty row -inf"),
    "head-dim-256": ("head_dim 256, blocks of 8 and 16", "mean and lane tags"),
    "table-at-end": ("a table that ends where its allocation does", "no read past it"),
    "table-too-narrow": ("a length beyond the table", "that row NaN; an error in checked mode"),
    "pool-of-three": ("a table entry 99 and a slot 99 * 16 for 3 blocks", "row NaN, nothing written"),
    "window": ("n = 20, window 4, 1, and n or more", "18.5, 20, the mean of all"),
    "window-grid": ("formats x paths x windows x n around them", "error of each row bounded"),
    "ratio-refused": ("heads 3/2, 33/2, 5/0", "ValueError before a launch"),
    "ratio-heads": ("heads 9/3, 28/4, 24/4, 5/1", "the right KV head"),
    # formats
    "fp8-scales": ("K 2.0 at scale 0.5, V 3.0 at scale 2.0", "bytes 0x48, 0x3C; reads 3.0"),
    "e4m3-saturation": ("448, 464, 466, 1000, -1000, Inf, NaN", "saturates, NaN stays"),
    "nvfp4-nan-group": ("a group with a NaN", "scale 0x7F; the group reads NaN, others do not"),
    "nvfp4-zeros": ("16 zeros", "codes 0, reads 0"),
    "nvfp4-amax-3000": ("largest magnitude 3000", "scale 448, codes clamp at 6"),
    "nvfp4-tiny-scale": ("largest magnitude 6 * 2^-10 and 6 * 2^-9", "zero; scale byte 0x01"),
    "nvfp4-division": ("5.625 and 1.171875", "code 2: a division"),
    "fp8-division": ("0.00439453125 at scale 0.3, 1.0 at scale 0.84210527", "0x07, 0x3A"),
    "nvfp4-group-scales": ("each group its own power-of-two scale", "exact, K and V apart"),
    "fp8-bad-scale": ("scale 0, negative, NaN, Inf, 1e-50, 1e300", "ValueError"),
    "scale-types": ("scale as float, float32, float64, 0-d array", "equal results"),
    "all-codes": ("all E4M3 and E2M1 codes, all scale bytes", "exact, NaN kept"),
    "absmax-view": ("absmax of rows whose gaps hold NaN; none; -0.0; accumulating", "live values only"),
    "query-dtype": ("q in float16, float32, bytes", "TypeError naming what is allowed"),
    "head-dim-odd": ("odd head_dim, and no multiple of 16 for NVFP4", "ValueError"),
    # splits, merging, workspace
    "empty-parts": ("more parts than tokens; empty tiles anywhere; l = 0", "as in one pass, no NaN"),
    "merge-empty": ("a state merged with an empty one", "the state, exactly"),
    "merge-base": ("3072 keys of 0 and 64 of 1", "64 / 3136: natural exponentials"),
    "splits-error": ("1, 16, 256 splits of 4096 tokens", "the error does not grow"),
    "batch-invariance": ("n = 8192 alone and in a batch of 64", "the same bits"),
    "workspace-size": ("canaries behind the workspace; one too small", "intact; ValueError"),
    "long-and-many-splits": ("n = 65,536 and 1,048,576; 16,384 splits", "right"),
    # memory, strides, launches
    "block-id-131071": ("blocks around 2^32 bytes and beyond", "as at block 0; writes land there"),
    "slots-negative": ("slots 0, -1, 17, -2^40", "only 0 and 17 change"),
    "slot-capacity": ("a slot at the capacity, 2^33", "dropped, guards intact; an error in checked mode"),
    "head-dim-family": ("head_dim 8 to 112; a pool 2 bytes in", "refused or right, the device lives on"),
    "q-strides": ("q inside packed QKV; negative, zero, Fortran strides", "as contiguous, or ValueError"),
    "interleaved-pool": ("K and V in one pool", "block stride honoured or rejected"),
    "nothing-to-do": ("no tokens, no sequences, null pointers", "no launch, no error"),
    "index-dtypes": ("tables and lengths int64, uint32, float32; slots int32", "TypeError naming both"),
    "argument-values": ("arg_f32, arg_u32, arg_u64 at and beyond their range", "exact bytes, or an error"),
    "echo": ("a kernel of six mixed arguments", "all as sent; a builder may be used again"),
    "argument-counts": ("fewer, more, other kinds", "an error naming parameter and kernel"),
    "two-gpus": ("device 0 then 1; arrays of the other", "right, or an error naming both"),
    "cuda-path-home": ("CUDA_PATH or HOME missing, foreign, read-only; many processes", "works"),
    "side-stream": ("spin, fill, launch on a side stream", "right a hundred times"),
    "capture-replay": ("a graph replayed with everything changed in place", "the same bits as eagerly"),
    "first-call-in-capture": ("the first call inside a capture", "works, or says warm up first"),
    "two-streams": ("two streams, 1000 calls each, temporaries dropped", "the same bits as in turn"),
    "prepared-launches": ("10,000 launches", "nothing loaded or allocated after the first"),
    # beyond the field's rows
    "host-threads": ("8 host threads on one device", "the same bits as in turn"),
    "fork": ("a fork before and after the first use", "works; a clear error"),
    "determinism": ("every entry point again", "the same bits"),
    "null-pointers": ("address 0 for each pointer", "ValueError before a launch, or left out"),
    "read-only-outputs": ("a NumPy array whose writeable flag is off", "ValueError before a launch"),
    "shared-memory": ("results in each other's memory, or in a part's", "ValueError, unless a whole part"),
    "faulted-launch": ("a launch that ends in the middle", "the next one is right"),
    "big-memory": ("pools, queries and outputs beyond 2^31 elements and 2^32 bytes", "the same bits"),
    "num-seqs-100000": ("100,000 sequences", "right, or a message before a launch"),
}  # fmt: skip

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "shared-memory": (
        "kernels/test_merge_states.py::test_results_that_are_no_whole_part",
        "kernels/test_kv_cache_refusals.py::test_results_that_share_memory",
    ),
    "ratio-refused": (
        "test_ops_shapes.py::test_ratios_refused",
        "test_registry.py::test_other_ratios_are_refused",
    ),
    "ratio-heads": (
        "kernels/test_decode.py::test_heads_read_their_kv_head",
        "kernels/test_decoder.py::test_heads",
    ),
    "lengths-mean": ("kernels/test_decode.py::test_mean_of_values",),
    "empty-row": ("kernels/test_decode.py::test_empty_sequence_is_a_zero_row",),
    "window": ("kernels/test_decode.py::test_window_counts_the_newest_key",),
    "fp8-scales": ("kernels/test_decode.py::test_fp8_scales_apply_to_their_own_pool",),
    "e4m3-saturation": ("kernels/test_cache_write.py::test_e4m3_saturates",),
    "fp8-division": ("kernels/test_cache_write.py::test_e4m3_divides",),
    "nvfp4-nan-group": ("kernels/test_cache_write.py::test_nvfp4_groups",),
    "nvfp4-zeros": ("kernels/test_cache_write.py::test_nvfp4_groups",),
    "nvfp4-amax-3000": ("kernels/test_cache_write.py::test_nvfp4_groups",),
    "nvfp4-tiny-scale": ("kernels/test_cache_write.py::test_nvfp4_groups",),
    "nvfp4-division": ("kernels/test_cache_write.py::test_nvfp4_groups",),
    "fp8-bad-scale": ("test_ops_errors.py::test_factors_must_be_finite_and_positive_as_float32",),
    "scale-types": ("test_ops_arguments.py::test_factors_are_the_same_in_every_type",),
    "all-codes": (
        "kernels/test_numerics.py::test_all_e4m3_codes",
        "kernels/test_cache_write.py::test_every_bf16_pattern",
    ),
    "absmax-view": (
        "kernels/test_absmax.py::test_calibration_reads_rows_and_not_their_gaps",
        "kernels/test_absmax.py::test_special_values",
        "kernels/test_absmax.py::test_accumulates",
    ),
    "query-dtype": ("test_ops_errors.py::test_arrays_of_another_dtype",),
    "head-dim-odd": ("test_ops_shapes.py::test_head_dims_refused",),
    "empty-parts": ("kernels/test_tiled.py::test_an_empty_tile_keeps_the_bits",),
    "merge-empty": ("kernels/test_splitk.py::test_reduce_of_empty_and_of_one_state",),
    "merge-base": ("kernels/test_splitk.py::test_merge_weighs_by_natural_exponentials",),
    "workspace-size": ("kernels/test_splitk.py::test_workspace_is_not_exceeded",),
    "slots-negative": ("kernels/test_cache_write.py::test_slots_that_must_not_be_written",),
    "slot-capacity": ("kernels/test_cache_write.py::test_slots_that_must_not_be_written",),
    "pool-of-three": ("kernels/test_cache_write.py::test_slots_that_must_not_be_written",),
    "head-dim-family": (
        "test_registry.py::test_unsupported_head_dims",
        "test_ops_errors.py::test_misaligned_pointers",
    ),
    "q-strides": ("test_handles.py::test_strides", "test_ops_errors.py::test_bad_strides"),
    "interleaved-pool": ("host/test_paging.py::test_interleaved_k_and_v_share_one_buffer",),
    "nothing-to-do": (
        "test_ops_arguments.py::test_nothing_to_do_is_no_launch_and_no_error",
        "kernels/test_cache_write.py::test_no_tokens",
    ),
    "index-dtypes": ("test_ops_errors.py::test_arrays_of_another_dtype",),
    "argument-values": (
        "test_launch.py::test_f32_is_the_nearest_float32",
        "test_launch.py::test_f32_beyond_float32_is_an_error",
        "test_launch.py::test_integers_reach_their_limits_and_not_beyond",
        "test_launch.py::test_integers_of_another_type_are_an_error",
    ),
    "echo": (
        "test_launch.py::test_six_arguments_arrive_byte_for_byte_at_their_natural_alignment",
        "test_launch.py::test_a_reused_builder_launches_the_same_again",
    ),
    "argument-counts": ("test_launch.py::test_an_argument_of_another_kind_names_both",),
    "cuda-path-home": (
        "test_cuda_surroundings.py::test_cuda_path_pointing_at_an_empty_folder",
        "test_surroundings.py::test_a_home_that_can_not_exist",
        "test_surroundings.py::test_cache_that_is_read_only",
        "test_cuda_surroundings.py::test_processes_that_compile_cold_with_nvrtc",
        "test_surroundings.py::test_processes_that_compile_cold_for_the_emulator",
    ),
}


def marked() -> dict[str, list[str]]:
    """Row -> tests that name it, ``file::function`` from ``tests/``."""
    found: dict[str, list[str]] = {}
    for folder in ("edges", "fuzz"):
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    for row in _rows_of(node):
                        found.setdefault(row, []).append(f"{folder}/{path.name}::{node.name}")
    return found


def _rows_of(function: ast.FunctionDef) -> list[str]:
    """Arguments of the decorators ``@edge("...")``."""
    rows = []
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("edge", "pytest.mark.edge"):
            rows += [ast.literal_eval(argument) for argument in decorator.args]
    return rows


def table() -> str:
    """Markdown: row, input, what is right, tests."""
    here = marked()
    lines = ["| row | input | right | tests |", "|---|---|---|---|"]
    for row, (given, right) in ROWS.items():
        tests = [*here.get(row, []), *ELSEWHERE.get(row, ())]
        names = ", ".join(f"`{name}`" for name in tests)
        lines.append(f"| {row} | {given} | {right} | {names} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
