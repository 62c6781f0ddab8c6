"""What `Decoder` refuses, before anything is launched.

Where a feature has tests of its own, its refusals are there: head_dim, block_size and ratios in test_shapes,
q_stride in test_layouts, query_tokens in test_query_tokens, soft_cap, softmax_scale and sliding_window in
test_scores, scales, value_layout and q_dtype in test_scales, num_seqs and the plan's size in test_many,
split_tokens and max_blocks_per_seq in test_split_tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged import KVCache
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, NVFP4, CacheFormat, CacheLayout
from tests.features.batches import Batch, Call, make_batch
from tests.features.setups import Setup
from tests.rig import Rig

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
LENGTHS = (40, 3, 300)
SEQS = len(LENGTHS)


@pytest.mark.parametrize("given", [None, 5, "cuda"])
def test_what_is_no_backend(given: Any) -> None:
    for make in (Decoder, CascadeDecoder):
        with pytest.raises(ArgumentTypeError, match=r"^gpu: got .*, allowed is a backend"):
            make(given, CacheLayout(BF16, 2, 64, 16), 8, 4)


@pytest.mark.parametrize("given", [["float16"], np.float16, "bf16"])
def test_what_is_no_type_of_queries(rig: Rig, given: Any) -> None:
    with pytest.raises(ArgumentValueError, match=r"^q_dtype: got .*, allowed are bfloat16, float16"):
        Decoder(rig.gpu, CacheLayout(BF16, 2, 64, 16), 8, 4, q_dtype=given)


def test_arguments_that_a_decoder_has_not(rig: Rig) -> None:
    layout = CacheLayout(BF16, 2, 64, 16)
    cache = KVCache(rig.gpu, layout, 2)
    made: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (Decoder, {"softcap": 4.0}, "softcap: unexpected keyword; Decoder takes gpu, .*soft_cap"),
        (Decoder, {"gpu": rig.gpu}, "gpu: given twice"),
        (CascadeDecoder, {"q_dtype": "float16"}, "q_dtype: unexpected keyword; queries are BF16"),
        (CascadeDecoder, {"sliding_window": 3}, "sliding_window: unexpected keyword; a window would"),
    ]
    for make, options, message in made:
        with pytest.raises(ArgumentTypeError, match=f"^{message}"):
            make(rig.gpu, layout, 8, 4, **options)
    for kind in (Decoder, CascadeDecoder):
        with pytest.raises(ArgumentTypeError, match=r"^softcap: unexpected keyword"):
            kind.for_cache(cache, 8, 4, softcap=4.0)  # type: ignore[attr-defined]
        with pytest.raises(ArgumentTypeError, match=r"^num_q_heads, max_seqs: missing; .*\*\*features"):
            kind.for_cache(cache)  # type: ignore[attr-defined]
        with pytest.raises(ArgumentTypeError, match=r"^gpu, layout, num_q_heads, max_seqs: missing"):
            kind()


# ---- making one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layout", "value_layout"])
@pytest.mark.parametrize("given", ["bf16", BF16, 16])
def test_what_is_no_layout(rig: Rig, name: str, given: object) -> None:
    layouts = {"layout": CacheLayout(BF16, 2, 64, 16)} | {name: given}
    layout = layouts.pop("layout")
    with pytest.raises(ArgumentTypeError, match=f"{name}: got .*, allowed is a CacheLayout"):
        Decoder(rig.gpu, layout, 8, 4, **layouts)  # type: ignore[arg-type]


@formats
@pytest.mark.parametrize("name", ["layout", "value_layout"])
def test_strides_that_copies_cannot_follow(rig: Rig, fmt: CacheFormat, name: str) -> None:
    good = CacheLayout(fmt, 2, 64, 16)
    stride = good.block_bytes + 8
    bad = dataclasses.replace(good, block_stride_override=stride)
    layouts = {"layout": good, "value_layout": good, name: bad}
    with pytest.raises(
        ArgumentValueError,
        match=f"{name}: its block_stride_bytes is {stride}, which must be a multiple of 16",
    ):
        Decoder(rig.gpu, layouts["layout"], 8, 4, value_layout=layouts["value_layout"])


def test_a_scale_section_that_copies_cannot_follow(rig: Rig) -> None:
    layout = CacheLayout(NVFP4, 3, 16, 1)
    with pytest.raises(
        ArgumentValueError, match="layout: its data_section_bytes is 24, which must be a mult"
    ):
        Decoder(rig.gpu, layout, 3, 4)


@pytest.mark.parametrize("name", ["num_q_heads", "max_seqs", "query_tokens"])
@pytest.mark.parametrize("given", [4.0, "4", None, True, np.float32(4)])
def test_sizes_that_are_no_integers(rig: Rig, name: str, given: object) -> None:
    sizes: dict[str, Any] = {"num_q_heads": 8, "max_seqs": 4, name: given}
    with pytest.raises(ArgumentTypeError, match=name):
        Decoder(rig.gpu, CacheLayout(BF16, 2, 64, 16), **sizes)


@pytest.mark.parametrize("name", ["causal", "checked"])
@pytest.mark.parametrize("given", ["no", 0, 1, None, np.True_])
def test_flags_that_are_no_bools(rig: Rig, name: str, given: object) -> None:
    features: dict[str, Any] = {"query_tokens": 2, name: given}
    with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, allowed are True and False"):
        Decoder(rig.gpu, CacheLayout(BF16, 2, 64, 16), 8, 4, **features)


@pytest.mark.parametrize("max_seqs", [0, -1, 2**20 + 1])
def test_max_seqs(rig: Rig, max_seqs: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"max_seqs: got {max_seqs}, allowed is 1 to 1048576"):
        Setup(max_seqs=max_seqs).decoder(rig)


def test_more_blocks_than_can_wait_for_each_other(rig: Rig) -> None:
    """With split_tokens none waits."""
    setup = Setup(heads=(16 * 128, 16), head_dim=32, query_tokens=8)
    if rig.name == "cupy":
        setup = dataclasses.replace(setup, heads=(71 * 128, 71))
    with pytest.raises(
        ArgumentValueError, match=r"num_q_heads, num_kv_heads: got .*must be resident together"
    ):
        setup.decoder(rig)


# ---- calling it --------------------------------------------------------------------------------------

# Argument -> what is wrong with it, as a function of the rig and of the argument as it should be.
Change = Callable[[Rig, Any], Any]


def zeros(*shape: int, dtype: Any = np.uint16) -> Change:
    return lambda rig, _: rig.gpu.zeros(shape, dtype)


def given(value: object) -> Change:
    return lambda rig, _: value


def moved(num_bytes: int) -> Change:
    """An address that many bytes on."""
    return lambda rig, array: rig.gpu.pointer(array) + num_bytes


def cast(dtype: Any) -> Change:
    return lambda rig, array: rig.gpu.zeros(array.shape, dtype)


VALUE, TYPE = ArgumentValueError, ArgumentTypeError
REFUSED: list[tuple[str, Change, type[Exception], str]] = [
    # sizes
    ("q", zeros(SEQS, 8, 32), VALUE, r"q: got shape"),
    ("q", zeros(SEQS - 1, 8, 64), VALUE, r"q: reaches over"),
    ("q", zeros(SEQS, 2, 8, 64), VALUE, r"q: got shape"),
    (
        "block_tables",
        zeros(SEQS, 2, dtype=np.int32),
        VALUE,
        r"max_blocks_per_seq: got 19, but block_tables has 2",
    ),
    (
        "block_tables",
        zeros(SEQS - 1, 19, dtype=np.int32),
        VALUE,
        r"block_tables: got 38 elements, needed are 57",
    ),
    ("seq_lens", zeros(SEQS - 1, dtype=np.int32), VALUE, r"seq_lens: got 2 elements, needed are 3"),
    ("output", zeros(SEQS - 1, 8, 64), VALUE, r"output: got 1024 elements, needed are 1536"),
    ("lse", zeros(SEQS - 1, 8, dtype=np.float32), VALUE, r"lse: got 16 elements, needed are 24"),
    ("lse", zeros(8, SEQS, dtype=np.float32), VALUE, r"lse: got shape \(8, 3\)"),
    ("sinks", zeros(7, dtype=np.float32), VALUE, r"^sinks: got shape \(7,\), allowed is \(8,\)"),
    ("sinks", zeros(SEQS, 8, dtype=np.float32), VALUE, r"^sinks: got shape \(3, 8\)"),
    ("sinks", zeros(16, dtype=np.float32), VALUE, r"^sinks: got shape \(16,\)"),
    ("sinks", given(-1), VALUE, r"^sinks: got -1"),
    ("sinks", given("none"), TYPE, r"^sinks: got str"),
    (
        "k_cache",
        zeros(9, 2, 16, 64),
        VALUE,
        r"k_cache: got shape \(9, 2, 16, 64\), allowed is \[n, 16, 2, 64\]",
    ),
    ("v_cache", zeros(9, 16, 64, 2), VALUE, r"v_cache: got shape"),
    ("k_cache", zeros(100), VALUE, r"num_blocks: got 26, but k_cache holds 0 blocks"),
    ("num_blocks", given(0), VALUE, r"num_blocks: got 0"),
    ("num_blocks", given(-1), VALUE, r"num_blocks: got -1"),
    ("num_blocks", given(27), VALUE, r"num_blocks: got 27, but k_cache holds 26 blocks"),
    ("max_blocks_per_seq", given(18), VALUE, r"max_blocks_per_seq: got 18"),
    ("max_blocks_per_seq", given(-1), VALUE, r"max_blocks_per_seq: got -1"),
    ("table_stride", given(-1), VALUE, r"table_stride: got -1"),
    ("table_stride", given(2**30), VALUE, r"block_tables: got 57 elements, needed are 2147483667"),
    ("table_stride", given(np.int32(2**30)), VALUE, r"block_tables: got 57 elements, needed are 2147483667"),
    ("num_seqs", given(17), VALUE, r"num_seqs: got 17, this decoder takes 0 to 16"),
    # types
    (
        "q",
        cast(np.float32),
        TYPE,
        r"q: got dtype float32, this decoder takes bfloat16, uint16 \(BF16 as bits\)",
    ),
    ("q", cast(np.uint8), TYPE, r"q: got dtype uint8"),
    ("output", cast(np.float32), TYPE, r"output: got dtype float32"),
    ("block_tables", cast(np.int64), TYPE, r"block_tables.*int64"),
    ("block_tables", cast(np.uint32), TYPE, r"block_tables.*uint32"),
    ("seq_lens", cast(np.int64), TYPE, r"seq_lens.*int64"),
    ("seq_lens", cast(np.float32), TYPE, r"seq_lens.*float32"),
    ("lse", zeros(SEQS, 8, dtype=np.float64), TYPE, r"lse.*float64"),
    ("lse", zeros(SEQS, 8, dtype=np.uint16), TYPE, r"lse.*uint16"),
    ("sinks", zeros(8, dtype=np.float64), TYPE, r"sinks.*float64"),
    ("sinks", zeros(8, dtype=np.uint16), TYPE, r"sinks.*uint16"),
    ("k_cache", cast(np.float32), TYPE, r"k_cache.*float32"),
    ("num_seqs", given(3.0), TYPE, r"num_seqs"),
    ("max_blocks_per_seq", given("19"), TYPE, r"max_blocks_per_seq"),
    ("num_blocks", given(26.0), TYPE, r"num_blocks"),
    ("table_stride", given(19.0), TYPE, r"table_stride"),
    ("q_stride", given(512.0), TYPE, r"q_stride"),
    ("sliding_window", given(4.0), TYPE, r"^sliding_window: got 4.0"),
    ("sliding_window", given(-1), VALUE, r"^sliding_window: got -1, allowed is 1 to .*; 0 is no window"),
    ("sliding_window", given(2**32), VALUE, r"^sliding_window: got 4294967296"),
    ("softmax_scale", given("0.125"), TYPE, r"softmax_scale"),
    ("softmax_scale", given(math.nan), VALUE, r"softmax_scale"),
    # addresses
    ("q", moved(2), VALUE, r"q: .*multiple of 16"),
    ("k_cache", moved(8), VALUE, r"k_cache: .*multiple of 16"),
    ("v_cache", moved(2), VALUE, r"v_cache: .*multiple of 16"),
    ("output", moved(8), VALUE, r"output: .*multiple of 16"),
    ("block_tables", moved(2), VALUE, r"block_tables: .*multiple of 4"),
    ("seq_lens", moved(1), VALUE, r"seq_lens: .*multiple of 4"),
    ("lse", moved(2), VALUE, r"lse: .*multiple of 4"),
]


@pytest.mark.parametrize("split", [False, True], ids=["planned", "chunked"])
@pytest.mark.parametrize(
    ("name", "change", "error", "match"), REFUSED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REFUSED)]
)
def test_calls(rig: Rig, split: bool, name: str, change: Change, error: type[Exception], match: str) -> None:
    """And the outputs are as they were."""
    setup = Setup(split_tokens=48, max_blocks_per_seq=64) if split else Setup()
    batch = make_batch(setup, Call(lengths=LENGTHS))
    output = rig.full_bf16(batch.q.shape)
    lse = rig.gpu.asarray(np.full(batch.q.shape[:3], np.nan, np.float32))
    arguments = {**batch.arguments(rig), "output": output, "lse": lse, "sinks": None}
    arguments[name] = change(rig, arguments.get(name))
    with pytest.raises(error, match=match):
        setup.decoder(rig).decode(**arguments)
    assert (rig.download(output) == 0x7FC0).all()
    assert np.isnan(rig.download(lse)).all()


@formats
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_pools_of_other_formats(rig: Rig, fmt: CacheFormat, name: str) -> None:
    """A pool of another format would be read as numbers that make no sense."""
    batch = make_batch(Setup.of(fmt), Call(lengths=LENGTHS))
    for dtype in (np.int32, np.float32, np.uint8 if fmt == BF16 else np.uint16):
        with pytest.raises(
            ArgumentTypeError, match=f"{name}: got dtype {np.dtype(dtype)}, this decoder takes"
        ):
            batch.run(rig, **{name: rig.gpu.zeros(10**5, dtype)})


def _columns(batch: Batch) -> int:
    return int(batch.tables.shape[1])


def test_the_sizes_that_the_table_of_refusals_names() -> None:
    """Its figures are those of this batch."""
    batch = make_batch(Setup(), Call(lengths=LENGTHS))
    assert (_columns(batch), batch.num_blocks) == (19, 26)
