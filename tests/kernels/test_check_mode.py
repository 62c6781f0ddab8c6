"""The package's kernels in the emulator's check mode: no fault is found, and where one is put in, it is.

Results are checked as elsewhere: the cases are those of the other modules, small ones of each kernel.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cupaged.backends.emulator import EmulatorBackend
from cupaged.decode import Decoder
from cupaged.errors import AsyncCopyFault, DataRaceFault, KernelFault, OutOfBoundsFault
from cupaged.formats import BF16, FORMATS, CacheFormat
from cupaged.source import kernels_dir
from tests.kernels import test_absmax, test_cache_write, test_splitk, test_tiled
from tests.kernels import test_decoder as decoder_cases
from tests.oracle import assert_matches
from tests.poison import PagedCase, Shape, random_case
from tests.rig import Rig, run_decode, upload_case

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
SCHEDULES = ("fifo", "reverse", "random")
LENGTHS = (1, 300, 17, 0, 64, 130)


def make_rig(schedule: str = "fifo", seed: int = 0, num_sms: int = 4) -> Rig:
    return Rig(EmulatorBackend(check="full", schedule=schedule, seed=seed, num_sms=num_sms))


@pytest.fixture(params=SCHEDULES)
def rig(request: pytest.FixtureRequest) -> Rig:
    """The checking emulator under every schedule."""
    return make_rig(request.param, seed=11)


@formats
def test_writers(rig: Rig, fmt: CacheFormat) -> None:
    test_cache_write.test_slots_that_must_not_be_written(rig, fmt)
    test_cache_write.test_padded_sources_and_pools(rig, fmt)
    test_cache_write.test_shapes(rig, fmt, 3, 3)


@formats
@pytest.mark.parametrize("splits", [0, 3], ids=["single", "splits3"])
def test_direct_decode(rig: Rig, fmt: CacheFormat, splits: int) -> None:
    for shape in (Shape(8, 2, 64, 16), Shape(9, 1, 128, 8)):
        case = random_case(fmt, LENGTHS, shape)
        assert_matches(run_decode(upload_case(rig, case), splits), case.expected()[0])


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_reduction(rig: Rig, name: str) -> None:
    test_splitk.test_reduce_against_float64(rig, name, 64, 33)
    test_splitk.test_reduce_of_empty_and_of_one_state(rig, name)


@pytest.mark.parametrize("scratch", [False, True], ids=["paged", "scratch"])
def test_tiles(rig: Rig, scratch: bool) -> None:
    test_tiled.test_against_references(rig, scratch, 3, 64)


def test_absolute_maxima(rig: Rig) -> None:
    test_absmax.test_every_element_counts(rig, 4096, 1)
    test_absmax.test_calibration_reads_rows_and_not_their_gaps(rig)


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
def test_decoder(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    decode(rig, random_case(fmt, LENGTHS, shape), launches=2)


@formats
def test_decoder_of_one_long_sequence(rig: Rig, fmt: CacheFormat) -> None:
    """All blocks share it, and merge."""
    decode(rig, random_case(fmt, [900], Shape(8, 2, 64, 16), window=700), launches=2)


# ---- faults put into copies of the kernels


def mutate(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, pattern: str, replacement: str) -> None:
    """Let backends compile a copy of the kernels in which a file is changed."""
    copy = folder / "kernels"
    shutil.copytree(kernels_dir(), copy)
    text, count = re.subn(pattern, replacement, (copy / file).read_text(), flags=re.DOTALL)
    assert count > 0, f"{pattern!r} does not occur in {file}"
    (copy / file).write_text(text)
    monkeypatch.setattr("cupaged.handle.kernels_dir", lambda: copy)


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "errors"),
    [
        # A stage is given back before all lanes have read it.
        ("ring/pipeline.cuh", r"(void release\(int s\) const \{)\s*__syncwarp\(\);", r"\1", DataRaceFault),
        # A stage is filled while it may still be read.
        ("ring/pipeline.cuh", r"(void wait_empty\([^{]*\{)[^}]*\}", r"\1}", (AsyncCopyFault, DataRaceFault)),
        # A stage is read before it has arrived.
        ("ring/pipeline.cuh", r"(void wait_full\([^{]*\{)[^}]*\}", r"\1}", KernelFault),
        # A block arrives before all its threads have written their parts.
        ("ring/merge.cuh", r"(\barrive\([^)]*\) const \{)\s*__syncthreads\(\);", r"\1", DataRaceFault),
        # Arrivals that publish nothing, and waits that learn nothing.
        ("ring/merge.cuh", r"ptx::atomic_add_acq_rel\(", "atomicAdd(", DataRaceFault),
        ("ring/merge.cuh", r"ptx::load_acquire\((\w+)\)", r"atomicAdd(\1, 0u)", DataRaceFault),
    ],
    ids=["release", "wait-empty", "wait-full", "arrive-barrier", "arrive-release", "wait-acquire"],
)
def test_faults_in_the_ring_are_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str,
    pattern: str,
    replacement: str,
    errors: type[KernelFault] | tuple[type[KernelFault], ...],
) -> None:
    mutate(monkeypatch, tmp_path, file, pattern, replacement)
    for schedule in SCHEDULES:
        # Few blocks use their stages again and again, more of them share a sequence.
        rig = make_rig(schedule, num_sms=1 if file == "ring/pipeline.cuh" else 4)
        with pytest.raises(errors) as caught:
            decode(rig, random_case(BF16, [1500], Shape(8, 2, 64, 16)), launches=1)
        assert re.search(r"\w+\.cuh:\d+", str(caught.value))


def test_a_table_that_is_too_short_is_found() -> None:
    rig = make_rig()
    case = random_case(BF16, [64, 64], Shape(8, 2, 64, 16))
    up = upload_case(rig, case)
    up.tables = up.tables.reshape(-1)[:-1]
    with pytest.raises((OutOfBoundsFault, ValueError), match=r"block_tables"):
        run_decode(up, 0)
