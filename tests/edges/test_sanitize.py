"""Small cases of every kernel and every class of specialisation: what compute-sanitizer runs over.

Each goes through the writer, single pass, split-K and its reduction, `Decoder` and tiles; with windows,
padding, dropped slots, and rows that are NaN for a bad block or length. Then what else `Decoder` can be asked
for, and the kernels beside decode. The emulator has a few of the shapes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cupaged.calibration import Fp8Calibration
from cupaged.checked import checked_mode
from cupaged.formats import BF16, FORMATS, NVFP4, CacheFormat
from cupaged.registry import entries
from tests.conftest import make_gpu
from tests.edges import test_checked_mode as input_cases
from tests.features.batches import Call, make_batch
from tests.features.classes import CHUNKED_CLASSES, CLASSES, MANY_CLASS
from tests.features.setups import Setup
from tests.fuzz.check import check
from tests.fuzz.draws import EMULATED, SPECIALISATIONS, Draw, Fault
from tests.kernels import test_kv_cache, test_kv_cache_moves, test_merge_states, test_tiled_formats
from tests.launched import Launches, record_launches
from tests.paths import call, run
from tests.poison import Poison, Shape, random_case
from tests.rig import Rig

pytestmark = pytest.mark.sanitize
launches = Launches()
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
classes = pytest.mark.parametrize(
    ("fmt", "shape"),
    SPECIALISATIONS,
    ids=[
        f"{f.name}-{s.num_q_heads}-{s.num_kv_heads}-d{s.head_dim}-b{s.block_size}" for f, s in SPECIALISATIONS
    ],
)


@pytest.fixture(scope="module", params=["emulator", pytest.param("cupy", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Rig:
    """As everywhere, and it knows what it has launched."""
    return Rig(record_launches(make_gpu(request.param)))


def a_draw(fmt: CacheFormat, shape: Shape, window: int, fault: Fault | None) -> Draw:
    quantised = fmt.name != "bf16"
    return Draw(
        format=fmt.name, shape=shape, lengths=(1, 17, 0, 90, 300), window=window, splits=3, tile=3,
        poison=Poison.NAN, unused_column=-1, extra_columns=1, spare_blocks=1,
        block_padding=32 if quantised else 0, section_padding=16 if fmt.name == "nvfp4" else 0, q_gap=8,
        kv_gap=8, log_scales=(1.0, -1.0), log_magnitude=0, sharpness=1.0, needle=1.0, drop=5, fault=fault,
        seed=1,
    )  # fmt: skip


@classes
@launches(
    *("reshape_and_cache_{fmt}", "paged_decode_attn_{fmt}", "paged_decode_attn_splitk_{fmt}"),
    *("paged_decode_attn_reduce_{reduce}", "paged_decode_attn_tiled{tiled}", "attention_finalize"),
)
def test_every_class(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    if rig.name == "emulator" and (fmt, shape) not in EMULATED:
        pytest.skip("left to the GPU: each class takes the emulator seconds to compile")
    assert check(rig, a_draw(fmt, shape, 0, None)) >= 3
    assert check(rig, a_draw(fmt, shape, 37, Fault(3, 2, -1))) >= 3


@formats
@launches("paged_decode_attn_planned")
def test_a_tight_layout_and_a_bad_length(rig: Rig, fmt: CacheFormat) -> None:
    """Without padding NVFP4's data and scales come by one copy."""
    for fault in (None, Fault(1, None, -5), Fault(1, None, 10**6)):
        draw = a_draw(fmt, Shape(8, 2, 64, 16), 0, fault)
        assert check(rig, Draw(**{**vars(draw), "block_padding": 0, "section_padding": 0})) >= 3


@formats
@launches("input_blocks", "input_finite")
def test_checked_mode(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [40, 0, 1], Shape(8, 2, 64, 16))
    with checked_mode():
        for path in ("single", "splits2", "decoder", "tiled2"):
            run(rig, case, path)


@launches("bf16_absmax", "bf16_absmax_rows")
def test_absolute_maxima(rig: Rig) -> None:
    data = rig.upload(np.full((5, 48), 0x3F80, np.uint16))
    largest = rig.gpu.zeros(1, np.float32)
    for count in (1, 7, 240):
        call(rig, "bf16_absmax", data=data, out_max=largest, n_elems=count)
    assert rig.download(largest)[0] == 1.0
    calibration = Fp8Calibration(rig.gpu)
    calibration.update(data, 5, 33, 48, rig.stream)
    assert calibration.scale() == 1.0 / 448.0


@pytest.mark.parametrize("name", CLASSES)
@launches("paged_decode_attn_planned")
def test_decoder_classes(rig: Rig, name: str) -> None:
    make_batch(*CLASSES[name]).check_twice(rig)


@launches("paged_decode_attn_plan", "paged_decode_attn_planned")
def test_a_decoder_for_many_sequences(rig: Rig) -> None:
    make_batch(*MANY_CLASS).check_twice(rig)


@formats
@launches("paged_decode_attn_chunked", "paged_decode_attn_merge_chunks")
def test_a_decoder_of_fixed_chunks(rig: Rig, fmt: CacheFormat) -> None:
    make_batch(*CHUNKED_CLASSES[fmt]).check_twice(rig)


@formats
@launches("paged_decode_attn_planned")
def test_other_rows_and_stages(rig: Rig, fmt: CacheFormat) -> None:
    """F16 queries with the stages for large batches, and the smallest ones, by lanes of a warp."""
    plain = Setup.of(fmt, heads=(6, 2), head_dim=48, block_size=8, heads_first=True)
    for changed in ({"q_dtype": "float16", "level": 0}, {"query_tokens": 4, "causal": False, "level": 2}):
        make_batch(dataclasses.replace(plain, **changed), Call(window=20)).check_twice(rig)


@launches("merge_states_bf16", "merge_states_f32", "merge_states_f32_to_bf16")
@launches("merge_states_f16", "merge_states_f32_to_f16")
def test_merging_results(rig: Rig) -> None:
    for source, target in test_merge_states.PAIRS:
        test_merge_states.test_against_float64(rig, 33, 64, source, target)


@formats
@launches("attention_merge_states", "attention_finalize")
def test_split_tiles(rig: Rig, fmt: CacheFormat) -> None:
    test_tiled_formats.test_splits(rig, fmt, 5)


@formats
@launches("copy_cache_blocks", "gather_tokens_bf16", "gather_tokens_f32")
def test_upkeep(rig: Rig, fmt: CacheFormat) -> None:
    test_kv_cache.test_write_and_gather(rig, fmt, False, True)
    test_kv_cache_moves.test_copied_blocks(rig, fmt)


@launches("input_range", "input_scale_bytes", "input_scales", "input_sinks", "input_slots", "input_value")
def test_input_checks(rig: Rig) -> None:
    input_cases.test_good_inputs_pass_and_give_the_same(rig, "single", NVFP4, 20)
    input_cases.test_scales_of_live_nvfp4_tokens(rig, "single", "v_cache")
    input_cases.test_slots(rig, BF16, 48)
    input_cases.test_sinks(rig, False, math.nan)
    with checked_mode():
        test_kv_cache.test_scales_by_head_on_the_device(rig)


def test_every_kernel_of_the_package_is_here() -> None:
    assert {entry.entry for entry in entries()} <= launches.named
