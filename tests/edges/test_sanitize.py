"""Small cases of every kernel and every class of specialisation: what compute-sanitizer runs over.

Each goes through the writer, single pass, split-K and its reduction, `Decoder` and tiles; with windows,
padding, dropped slots, and rows that are NaN for a bad block or length. The emulator has a few classes.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.calibration import Fp8Calibration
from cupaged.checked import checked_mode
from cupaged.formats import FORMATS, CacheFormat
from tests.fuzz.check import check
from tests.fuzz.draws import EMULATED, SPECIALISATIONS, Draw, Fault
from tests.paths import call, run
from tests.poison import Poison, Shape, random_case
from tests.rig import Rig

pytestmark = pytest.mark.sanitize
classes = pytest.mark.parametrize(
    ("fmt", "shape"),
    SPECIALISATIONS,
    ids=[
        f"{f.name}-{s.num_q_heads}-{s.num_kv_heads}-d{s.head_dim}-b{s.block_size}" for f, s in SPECIALISATIONS
    ],
)


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
def test_every_class(rig: Rig, fmt: CacheFormat, shape: Shape) -> None:
    if rig.name == "emulator" and (fmt, shape) not in EMULATED:
        pytest.skip("left to the GPU: each class takes the emulator seconds to compile")
    assert check(rig, a_draw(fmt, shape, 0, None)) >= 3
    assert check(rig, a_draw(fmt, shape, 37, Fault(3, 2, -1))) >= 3


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_tight_layout_and_a_bad_length(rig: Rig, fmt: CacheFormat) -> None:
    """Without padding NVFP4's data and scales come by one copy."""
    for fault in (None, Fault(1, None, -5), Fault(1, None, 10**6)):
        draw = a_draw(fmt, Shape(8, 2, 64, 16), 0, fault)
        assert check(rig, Draw(**{**vars(draw), "block_padding": 0, "section_padding": 0})) >= 3


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_checked_mode(rig: Rig, fmt: CacheFormat) -> None:
    case = random_case(fmt, [40, 0, 1], Shape(8, 2, 64, 16))
    with checked_mode():
        for path in ("single", "splits2", "decoder", "tiled2"):
            run(rig, case, path)


def test_absolute_maxima(rig: Rig) -> None:
    data = rig.upload(np.full((5, 48), 0x3F80, np.uint16))
    largest = rig.gpu.zeros(1, np.float32)
    for count in (1, 7, 240):
        call(rig, "bf16_absmax", data=data, out_max=largest, n_elems=count)
    assert rig.download(largest)[0] == 1.0
    calibration = Fp8Calibration(rig.gpu)
    calibration.update(data, 5, 33, 48, rig.stream)
    assert calibration.scale() == 1.0 / 448.0
