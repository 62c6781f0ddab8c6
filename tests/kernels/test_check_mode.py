"""The package's kernels in the emulator's check mode: no fault is found, and where one is put in, it is.

Results are checked as elsewhere: the cases are those of the other modules, small ones of each kernel.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.checked import checked_mode
from cupaged.decode import Decoder
from cupaged.errors import (
    AsyncCopyFault,
    DataRaceFault,
    KernelFault,
    OutOfBoundsFault,
    UninitialisedSharedFault,
)
from cupaged.formats import BF16, FORMATS, FP8, NVFP4, CacheFormat
from cupaged.registry import DeviceLimits, entries, limits_of_capability
from cupaged.source import kernels_dir
from tests.edges import test_checked_mode as input_cases
from tests.features.batches import Call, make_batch
from tests.features.classes import CHUNKED_CLASSES, CLASSES, MANY_CLASS
from tests.kernels import (
    test_absmax,
    test_cache_write,
    test_kv_cache,
    test_kv_cache_moves,
    test_merge_states,
    test_splitk,
    test_tiled,
    test_tiled_formats,
)
from tests.kernels import test_decoder as decoder_cases
from tests.launched import Launches, record_launches
from tests.oracle import assert_matches
from tests.poison import PagedCase, Shape, random_case
from tests.rig import Rig, run_decode, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
SCHEDULES = ("fifo", "reverse", "random")
LENGTHS = (1, 300, 17, 0, 64, 130)


class WithoutBulkCopies(EmulatorBackend):
    """As of an sm_86 GPU: the lanes of a warp fill the ring, and it is smaller."""

    @property
    def limits(self) -> DeviceLimits:
        limits = limits_of_capability(86, self.num_sms)
        return replace(limits, cooperative_threads=super().limits.cooperative_threads)


def make_rig(
    schedule: str = "fifo", seed: int = 0, num_sms: int = 4, backend: type[EmulatorBackend] = EmulatorBackend
) -> Rig:
    """The emulator in check mode, which knows what it has launched."""
    return Rig(record_launches(backend(check="full", schedule=schedule, seed=seed, num_sms=num_sms)))


@pytest.fixture(params=SCHEDULES)
def rig(request: pytest.FixtureRequest) -> Rig:
    """The checking emulator under every schedule."""
    return make_rig(request.param, seed=11)


launches = Launches()


def test_every_kernel_of_the_package_is_checked() -> None:
    assert {entry.entry for entry in entries()} <= launches.named


@formats
@launches("reshape_and_cache_{fmt}")
def test_writers(rig: Rig, fmt: CacheFormat) -> None:
    test_cache_write.test_slots_that_must_not_be_written(rig, fmt)
    test_cache_write.test_padded_sources_and_pools(rig, fmt)
    test_cache_write.test_shapes(rig, fmt, 3, 3)


# Bulk copies; runs of 8 tokens; two slices of 16 heads each; NVFP4's scales in pieces of 2 bytes.
SHAPES = [Shape(8, 2, 64, 16), Shape(9, 1, 128, 8), Shape(32, 32, 16, 16), Shape(2, 2, 16, 1)]


@formats
@launches("paged_decode_attn_{fmt}")
def test_single_pass(rig: Rig, fmt: CacheFormat) -> None:
    for shape in SHAPES:
        case = random_case(fmt, LENGTHS, shape)
        assert_matches(run_decode(upload_case(rig, case), 0), case.expected()[0])


@formats
@launches("paged_decode_attn_splitk_{fmt}")
def test_split_k(rig: Rig, fmt: CacheFormat) -> None:
    for shape in SHAPES:
        case = random_case(fmt, LENGTHS, shape)
        assert_matches(run_decode(upload_case(rig, case), 3), case.expected()[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@formats
def test_split_k_without_bulk_copies(fmt: CacheFormat, schedule: str) -> None:
    """One block has to come round to its stages again."""
    rig = make_rig(schedule, 5, 1, WithoutBulkCopies)
    case = random_case(fmt, (1, 700, 17, 0, 300), Shape(8, 2, 64, 16), window=600)
    for splits in (0, 3):
        assert_matches(run_decode(upload_case(rig, case), splits), case.expected()[0])


@launches("paged_decode_attn_reduce_fp8", "paged_decode_attn_reduce_nvfp4")
def test_reduction(rig: Rig) -> None:
    for name in ("fp8", "nvfp4"):
        test_splitk.test_reduce_against_float64(rig, name, 64, 33)
        test_splitk.test_reduce_of_empty_and_of_one_state(rig, name)


@pytest.mark.parametrize("scratch", [False, True], ids=["paged", "scratch"])
@launches("paged_decode_attn_tiled", "attention_finalize")
def test_tiles(rig: Rig, scratch: bool) -> None:
    test_tiled.test_against_references(rig, scratch, 3, 64)


@launches("paged_decode_attn_tiled_fp8", "paged_decode_attn_tiled_nvfp4", "attention_merge_states")
def test_split_tiles(rig: Rig) -> None:
    for fmt in (FP8, NVFP4):
        test_tiled_formats.test_splits(rig, fmt, 2)


@launches("bf16_absmax", "bf16_absmax_rows")
def test_absolute_maxima(rig: Rig) -> None:
    test_absmax.test_every_element_counts(rig, 4096, 1)
    test_absmax.test_calibration_reads_rows_and_not_their_gaps(rig)


@launches("merge_states_bf16", "merge_states_f32", "merge_states_f32_to_bf16")
@launches("merge_states_f16", "merge_states_f32_to_f16")
def test_merging_results(rig: Rig) -> None:
    for source, target in test_merge_states.PAIRS:
        test_merge_states.test_against_float64(rig, 33, 64, source, target)
    test_merge_states.test_in_place_and_twice(rig)


@formats
@launches("copy_cache_blocks", "gather_tokens_bf16", "gather_tokens_f32")
def test_upkeep(rig: Rig, fmt: CacheFormat) -> None:
    test_kv_cache.test_write_and_gather(rig, fmt, False, True)
    test_kv_cache_moves.test_copied_blocks(rig, fmt)


@launches(
    *("input_blocks", "input_finite", "input_range", "input_scale_bytes"),
    *("input_scales", "input_sinks", "input_slots", "input_value"),
)
def test_input_checks(rig: Rig) -> None:
    input_cases.test_good_inputs_pass_and_give_the_same(rig, "single", NVFP4, 20)
    input_cases.test_scales_of_live_nvfp4_tokens(rig, "single", "v_cache")
    input_cases.test_slots(rig, BF16, 48)
    input_cases.test_sinks(rig, False, math.nan)
    with checked_mode():
        test_kv_cache.test_scales_by_head_on_the_device(rig)


def decode(rig: Rig, case: PagedCase, *, launches: int) -> None:
    """Through one `Decoder`, which each launch must leave fit for the next."""
    decoder = Decoder(rig.gpu, case.layout, case.num_q_heads, max(1, case.num_seqs))
    for _ in range(launches):
        got, _ = decoder_cases._decode(rig, case, decoder)
        assert_matches(got, case.expected()[0])


@formats
@pytest.mark.parametrize(
    "shape", [Shape(8, 2, 64, 16), Shape(4, 4, 128, 32), Shape(8, 4, 64, 8), Shape(8, 2, 64, 24)], ids=str
)
@launches("paged_decode_attn_planned")
def test_decoder(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    decode(rig, random_case(fmt, LENGTHS, shape), launches=2)


@formats
@launches("paged_decode_attn_planned")
def test_decoder_of_one_long_sequence(rig: Rig, fmt: CacheFormat) -> None:
    """All blocks share it, and merge."""
    decode(rig, random_case(fmt, [900], Shape(8, 2, 64, 16), window=700), launches=2)


@pytest.mark.parametrize(("num_sms", "schedule"), [(16, "reverse"), (48, "random"), (48, "reverse")])
def test_decoder_of_many_blocks(num_sms: int, schedule: str) -> None:
    """Each way to spread the merge over threads: 16 sharers, and more than 40."""
    rig = make_rig(schedule, 3, num_sms)
    decode(rig, random_case(FP8, [1000, 3], Shape(8, 2, 16, 16)), launches=2)


@pytest.mark.parametrize("name", CLASSES)
@launches("paged_decode_attn_planned")
def test_decoder_variants(rig: Rig, name: str) -> None:
    make_batch(*CLASSES[name]).check_twice(rig)


@launches("paged_decode_attn_plan", "paged_decode_attn_planned")
def test_decoder_of_many_sequences(rig: Rig) -> None:
    make_batch(*MANY_CLASS).check_twice(rig)


@formats
@launches("paged_decode_attn_chunked", "paged_decode_attn_merge_chunks")
def test_decoder_of_fixed_chunks(rig: Rig, fmt: CacheFormat) -> None:
    make_batch(*CHUNKED_CLASSES[fmt]).check_twice(rig)


@pytest.mark.parametrize("schedule", SCHEDULES)
@formats
def test_decoder_without_bulk_copies(fmt: CacheFormat, schedule: str) -> None:
    rig = make_rig(schedule, 5, 2, WithoutBulkCopies)
    decode(rig, random_case(fmt, (900, 0, 33), Shape(8, 2, 64, 16), window=700), launches=2)


# ---- faults put into copies of the kernels


def mutate(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, pattern: str, replacement: str) -> None:
    """Let backends compile a copy of the kernels in which a file is changed."""
    copy = folder / "kernels"
    shutil.copytree(kernels_dir(), copy)
    text, count = re.subn(pattern, replacement, (copy / file).read_text(), flags=re.DOTALL)
    assert count > 0, f"{pattern!r} does not occur in {file}"
    (copy / file).write_text(text)
    monkeypatch.setattr("cupaged.handle.kernels_dir", lambda: copy)


def _shared(schedule: str) -> None:
    """One sequence that four blocks share."""
    decode(make_rig(schedule), random_case(BF16, [1500], Shape(8, 2, 64, 16)), launches=1)


def _alone(schedule: str, backend: type[EmulatorBackend] = EmulatorBackend) -> None:
    """One block, which uses its stages again and again."""
    rig = make_rig(schedule, num_sms=1, backend=backend)
    run_decode(upload_case(rig, random_case(BF16, [1500], Shape(8, 2, 64, 16))), 0)


def _splits(schedule: str) -> None:
    up = upload_case(make_rig(schedule), random_case(BF16, [300, 40], Shape(8, 2, 64, 16)))
    run_decode(up, 3)


def _bytes(schedule: str) -> None:
    """Scales that two lanes store themselves, two bytes at a time."""
    up = upload_case(make_rig(schedule), random_case(NVFP4, [100], Shape(2, 2, 16, 1)))
    run_decode(up, 0)


# How a faulty copy is run, by schedule.
RUNS: dict[str, Callable[[str], object]] = {
    "one block": _alone,
    "four blocks": _shared,
    "by lanes": lambda schedule: _alone(schedule, WithoutBulkCopies),
    "splits": _splits,
    "bytes": _bytes,
    "many": lambda schedule: make_batch(MANY_CLASS[0], Call((3,) * 600)).check(make_rig(schedule)),
}
ASYNC = (AsyncCopyFault, DataRaceFault)
UNREADY = (DataRaceFault, UninitialisedSharedFault)
PIPELINE, MERGE = "ring/pipeline.cuh", "ring/merge.cuh"
MAKE_PLAN = r"(scan_sequences\([^;]*;)\s*__syncthreads\(\);"
ACQUIRE = r"ptx::load_acquire\((\w+)\)"
WAIT_EMPTY, WAIT_FULL = (rf"(void wait_{which}\([^{{]*\{{)[^}}]*\}}" for which in ("empty", "full"))
RELEASE = r"(void release\(int s\) const \{)\s*__syncwarp\(\);"
# Run, file, pattern, replacement, and what is found.
FAULTS: dict[str, tuple[str, str, str, str, Any]] = {
    # A stage is given back before all lanes have read it.
    "release": ("one block", PIPELINE, RELEASE, r"\1", DataRaceFault),
    "release by lanes": ("by lanes", PIPELINE, RELEASE, r"\1", DataRaceFault),
    # A stage is filled while it may still be read.
    "wait-empty": ("one block", PIPELINE, WAIT_EMPTY, r"\1}", ASYNC),
    "wait-empty by lanes": ("by lanes", PIPELINE, WAIT_EMPTY, r"\1}", ASYNC),
    # A stage is read before it has arrived.
    "wait-full": ("one block", PIPELINE, WAIT_FULL, r"\1}", KernelFault),
    "wait-full by lanes": ("by lanes", PIPELINE, WAIT_FULL, r"\1}", KernelFault),
    "arrive early": ("by lanes", PIPELINE, "cp_async_mbarrier_arrive_noinc", "mbarrier_arrive", ASYNC),
    "lanes left out": (
        "bytes",
        PIPELINE,
        r"__syncwarp\(\);(\s*if \(lane\(\) == 0\) ptx::mbarrier_arrive\(&shared.full)",
        r"\1",
        DataRaceFault,
    ),
    # Barriers are used before they are there, and the plan before it is made.
    "init": ("splits", "ring/splits.cuh", r"__syncthreads\(\);", "", KernelFault),
    "plan": (
        "four blocks",
        "ring/planned.cuh",
        r"(scan_sequences\([^;]*;)\s*__syncthreads\(\);",
        r"\1",
        KernelFault,
    ),
    "large plan": ("many", "ring/plan.cuh", r"__syncthreads\(\);", "", UNREADY),
    # Warps that share a sequence's tiles merge before all have written.
    "token warps": ("splits", "attention/block_attention.cuh", r"__syncthreads\(\);", "", UNREADY),
    # A block arrives before all its threads have written their parts.
    "arrive-barrier": (
        "four blocks",
        MERGE,
        r"(\barrive\([^)]*\) const \{)\s*__syncthreads\(\);",
        r"\1",
        DataRaceFault,
    ),
    # Arrivals that publish nothing, and waits that learn nothing.
    "arrive-release": ("four blocks", MERGE, r"ptx::atomic_add_acq_rel\(", "atomicAdd(", DataRaceFault),
    "wait-acquire": (
        "four blocks",
        MERGE,
        r"ptx::load_acquire\((\w+)\)",
        r"atomicAdd(\1, 0u)",
        DataRaceFault,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_ring_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    run, file, pattern, replacement, errors = FAULTS[fault]
    mutate(monkeypatch, tmp_path, file, pattern, replacement)
    for schedule in SCHEDULES:
        with pytest.raises(errors) as caught:
            RUNS[run](schedule)
        assert re.search(r"\w+\.cuh:\d+", str(caught.value))


def test_a_table_that_is_too_short_is_found() -> None:
    rig = make_rig()
    case = random_case(BF16, [64, 64], Shape(8, 2, 64, 16))
    up = upload_case(rig, case)
    up.tables = up.tables.reshape(-1)[:-1]
    with pytest.raises((OutOfBoundsFault, ValueError), match=r"block_tables"):
        run_decode(up, 0)
