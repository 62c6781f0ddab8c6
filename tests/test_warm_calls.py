"""Calls whose sizes were met before: they make nothing, and what they are given is checked as at first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupaged import EmulatorBackend, ops
from cupaged import handle as handle_module
from cupaged.decode import Decoder
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, FORMATS, FP8, CacheFormat, CacheLayout
from cupaged.registry.decode import latency_levels, planned_spec
from tests.fake_backend import FakeBackend, aligned
from tests.launcher_cases import FACTORS, INTEGERS, LAUNCHERS, addresses, arguments, handle, pairs
from tests.warm import UNTIL_READY

POINTERS: set[str] = set()
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


@pytest.fixture
def gpu() -> FakeBackend:
    return FakeBackend()


class Warm:
    """A launcher with one handle, called once."""

    def __init__(self, gpu: FakeBackend, launcher: str) -> None:
        self.gpu, self.launcher = gpu, launcher
        self.kernel = handle(gpu, launcher)
        self.call()

    def call(self, **changed: Any) -> None:
        common = {"gpu": self.gpu, "kernel": self.kernel, "stream": 0}
        getattr(ops, self.launcher)(**addresses(self.launcher) | common | changed)

    def refuses(self, error: type[Exception], match: str, **changed: Any) -> None:
        """An error before anything is launched, also after good calls that are kept; these work as before.

        By a handle of its own: an error before would have dropped part of what is kept.
        """
        self.kernel = handle(self.gpu, self.launcher)
        for _ in range(UNTIL_READY):
            self.call()
        launched = len(self.gpu.launches)
        with pytest.raises(error, match=match) as caught:
            self.call(**changed)
        assert isinstance(caught.value, (ArgumentTypeError, ArgumentValueError))
        assert len(self.gpu.launches) == launched
        self.call()
        assert self.gpu.launches[-1] == self.gpu.launches[0]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_warm_calls_make_nothing(gpu: FakeBackend, launcher: str) -> None:
    kernel = handle(gpu, launcher)
    for given in (addresses(launcher), arguments(launcher)) * 3:
        getattr(ops, launcher)(gpu, kernel, **given, stream=0)
    assert len(gpu.launches) == 6
    assert (len(gpu.loads), gpu.allocations) == (1, 0)


@pytest.mark.parametrize(("launcher", "name"), pairs(INTEGERS))
def test_numbers_that_are_equal_but_no_integers(gpu: FakeBackend, launcher: str, name: str) -> None:
    """What remembers integers must tell 3 from 3.0, though both are one key of a dict."""
    value = addresses(launcher)[name]
    for equal in (float(value), np.float64(value), complex(value)):
        Warm(gpu, launcher).refuses(TypeError, rf"\b{name}: got .*allowed is an integer", **{name: equal})
        gpu.launches.clear()


@pytest.mark.parametrize(
    ("launcher", "name"), pairs({"num_seqs", "num_tokens", "num_splits", "max_blocks_per_seq"})
)
def test_true_is_not_one(gpu: FakeBackend, launcher: str, name: str) -> None:
    warm = Warm(gpu, launcher)
    warm.call(**{name: 1})
    warm.refuses(TypeError, rf"\b{name}: got True .*allowed is an integer", **{name: True})
    warm.call(**{name: np.uint8(1)})
    assert gpu.last.values[name] == 1


@pytest.mark.parametrize("launcher", [name for name, _ in pairs({"k_cache"})])
def test_the_number_of_blocks_is_checked_each_time(gpu: FakeBackend, launcher: str) -> None:
    warm = Warm(gpu, launcher)
    warm.call(num_blocks=1)
    for bad in (True, 1.0):
        warm.refuses(TypeError, r"num_blocks: got .*allowed is an integer", num_blocks=bad)
    warm.refuses(ValueError, "num_blocks: got -1, allowed", num_blocks=-1)


@pytest.mark.parametrize(("launcher", "name"), pairs(INTEGERS))
def test_negative_integers(gpu: FakeBackend, launcher: str, name: str) -> None:
    Warm(gpu, launcher).refuses(ValueError, rf"\b{name}\b.*got (\d+, )?-1\b", **{name: -1})


@pytest.mark.parametrize(("launcher", "name"), pairs(POINTERS))
def test_pointers(gpu: FakeBackend, launcher: str, name: str) -> None:
    warm = Warm(gpu, launcher)
    address = addresses(launcher)[name]
    warm.refuses(ValueError, f"^{name}: got {address + 1:#x}, its address", **{name: address + 1})
    warm.refuses(ValueError, rf"\b{name}: got -16, allowed", **{name: -16})
    warm.refuses(ValueError, rf"\b{name}: got {2**64}, allowed", **{name: 2**64})
    for bad in (None, True, 4096.0):
        warm.refuses(TypeError, rf"\b{name}: got {type(bad).__name__}", **{name: bad})
    warm.refuses(TypeError, f"^{name}: got dtype complex64", **{name: aligned(2**16, np.complex64)})


@pytest.mark.parametrize(("launcher", "name"), pairs(FACTORS))
def test_factors(gpu: FakeBackend, launcher: str, name: str) -> None:
    warm = Warm(gpu, launcher)
    for bad in (0.0, -0.5, math.nan, math.inf, 1e-50):
        warm.refuses(ValueError, rf"\b{name}\b", **{name: bad})
    warm.refuses(TypeError, rf"\b{name}\b", **{name: True})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_streams_and_handles(gpu: FakeBackend, launcher: str) -> None:
    warm = Warm(gpu, launcher)
    warm.refuses(TypeError, "stream: got", stream=None)
    warm.refuses(ValueError, "stream: got -1", stream=-1)
    other = handle(FakeBackend(), launcher)
    warm.refuses(ValueError, "kernel: got .*made by this very backend", kernel=other)


def test_what_a_handle_remembers_is_bounded(gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_module, "_MAX_PLANS", 8)
    warm = Warm(gpu, "paged_decode_attn_tiled")
    for num_seqs in range(1, 100):
        warm.call(num_seqs=num_seqs)
        assert gpu.last.grid[0] == num_seqs
        assert len(warm.kernel._plans) <= 8
    assert len(gpu.loads) == 1


# A decoder of 8 query heads on 2 KV heads, and what its calls are given.
BATCH: dict[str, Any] = {
    name: (i + 1) << 20
    for i, name in enumerate(("q", "k_cache", "v_cache", "block_tables", "seq_lens", "output"))
} | {"num_seqs": 3, "max_blocks_per_seq": 5, "stream": 0}


def decoder_for(gpu: FakeBackend, fmt: CacheFormat, **options: Any) -> tuple[Decoder, dict[str, Any]]:
    strides = {name: options.pop(name) for name in list(options) if name.endswith("override")}
    given: dict[str, Any] = {"num_q_heads": 8, "max_seqs": 64} | options
    decoder = Decoder(gpu, CacheLayout(fmt, 2, 64, 16, **strides), **given)  # type: ignore[arg-type]
    return decoder, BATCH | ({"k_scale": 0.5, "v_scale": 0.25} if fmt is FP8 else {})


# What is asked for beside max_seqs -> entries in the order of a call, arrays of the workspace.
DECODERS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "planned": ({}, ["paged_decode_attn_planned"], 3),
    "many": ({"max_seqs": 513}, ["paged_decode_attn_plan", "paged_decode_attn_planned"], 4),
    "chunked": (
        {"split_tokens": 16, "max_blocks_per_seq": 5},
        ["paged_decode_attn_chunked", "paged_decode_attn_merge_chunks"],
        1,
    ),
}
WORKSPACE = ("part_o", "part_state", "counters", "plan", "states")


@formats
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_allocates_when_it_is_made_and_never_again(
    gpu: FakeBackend, monkeypatch: pytest.MonkeyPatch, fmt: CacheFormat, kind: str
) -> None:
    options, entries, arrays = DECODERS[kind]
    made: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr(gpu, "empty", lambda *given: made.append(FakeBackend.empty(gpu, *given)) or made[-1])
    decoder, batch = decoder_for(gpu, fmt, **options)
    held = {array.ctypes.data: array.nbytes for array in made if array.size}
    assert len(held) == arrays
    assert decoder.workspace_bytes == sum(held.values())
    before = gpu.allocations, len(gpu.loads)
    for num_seqs in (3, 64, 1, 0, 3):
        decoder.decode(**batch | {"num_seqs": num_seqs, "lse": 1 << 30, "stream": 7})
    assert (gpu.allocations, len(gpu.loads)) == before
    assert [launch.source.entry for launch in gpu.launches] == entries * 4
    size = len(entries)
    for first, last in zip(gpu.launches[:size], gpu.launches[-size:], strict=True):
        assert first.packed == last.packed
        assert first.stream == 7
    used = {launch.values[name] for launch in gpu.launches for name in WORKSPACE if name in launch.values}
    assert used - {0} == set(held)


def test_small_batches_have_kernels_of_their_own(gpu: FakeBackend) -> None:
    """By the room of the tables, which the host knows: below 65,536 tokens, and up to 16,384."""
    decoder, batch = decoder_for(gpu, FORMATS[2])
    spec = planned_spec(key_format=2, value_format=2, head_dim=64, gqa_ratio=4, num_kv_heads=2, block_size=16)
    levels = latency_levels(spec | {"joined": 1}, gpu.limits)
    assert len(set(levels)) > 1
    for num_seqs, width, level in ((1, 8193, 0), (1, 8192, 1), (16, 256, 1), (4, 257, 2), (4, 256, 3)):
        decoder.decode(**batch | {"num_seqs": num_seqs, "max_blocks_per_seq": width})
        assert gpu.last.constants["SPEC_LATENCY"] == str(levels[level])


def test_a_decoder_needs_all_its_blocks_resident(gpu: FakeBackend) -> None:
    """On a device of 4 multiprocessors that share 40 heads of 256 and 16 groups of 8 query heads each."""
    layout = CacheLayout(BF16, 40, 256, 16)
    with pytest.raises(
        ArgumentValueError, match=r"^num_q_heads, num_kv_heads: got 5120, 40, which take 80 bl"
    ):
        Decoder(gpu, layout, num_q_heads=5120, max_seqs=4)
    assert (gpu.allocations, len(gpu.loads)) == (0, 0)
    Decoder(gpu, layout, num_q_heads=5120, max_seqs=4, split_tokens=64, max_blocks_per_seq=8)


def test_the_emulators_threads_bound_a_decoder() -> None:
    emulator = EmulatorBackend()
    with pytest.raises(ArgumentValueError, match=r"num_q_heads, num_kv_heads: got .* 16384 threads"):
        Decoder(emulator, CacheLayout(BF16, 40, 256, 16), num_q_heads=5120, max_seqs=4)


@formats
def test_a_decoder_checks_every_call(gpu: FakeBackend, fmt: CacheFormat) -> None:
    decoder, batch = decoder_for(gpu, fmt)
    decoder.decode(**batch)
    decoder.decode(**batch | {"num_seqs": 1})
    for changed, match in (
        ({"num_seqs": True}, "num_seqs: got True"),
        ({"num_seqs": 3.0}, "num_seqs: got 3.0"),
        ({"num_seqs": 65}, "num_seqs: got 65, this decoder takes 0 to 64"),
        ({"max_blocks_per_seq": 5.0}, "max_blocks_per_seq: got 5.0"),
        ({"q": BATCH["q"] + 2}, "^q: got 0x100002, its address, in bytes, must be a multiple of 16"),
        ({"q_stride": 516}, "^q_stride: got 516, its value must be a multiple of 8"),
        ({"q_stride": 8}, "^q_stride: got 8, a row has 512 elements"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
        ({"sliding_window": -1}, "sliding_window: got -1"),
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"lse": aligned(23, np.float32)}, "lse: got 23 elements, needed are 24"),
        ({"output": None}, "output: got NoneType"),
        ({"stream": None}, "stream: got None"),
        ({"k_scales": aligned(1, np.float32)}, r"k_scales?: got "),
        ({"k_scale": -1.0}, r"k_scale: got -1\.0"),
        ({"v_scale": None, "v_scales": aligned(2, np.float16)}, r"v_scale"),
        ({"sinks": aligned(7, np.float32)}, r"sinks: got shape \(7,\), allowed is \(8,\)"),
        ({"sinks": (1 << 20) + 2}, "^sinks: got 0x100002, its address, in bytes, must be a multiple of 4"),
    ):
        for _ in range(UNTIL_READY):
            decoder.decode(**batch)
        launched = len(gpu.launches)
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=match):
            decoder.decode(**batch | changed)
        assert len(gpu.launches) == launched
    decoder.decode(**batch)
    assert gpu.launches[0] == gpu.last


def test_scales_are_given_where_the_format_has_them(gpu: FakeBackend) -> None:
    for fmt, changed, match in (
        (FP8, {"k_scale": None}, "^k_scale: got None; an fp8 cache needs it or k_scales"),
        (FP8, {"v_scale": None}, "^v_scale: got None; an fp8 cache needs it or v_scales"),
        (BF16, {"k_scale": 1.0}, r"^k_scale: got 1\.0; a bf16 cache has none"),
        (BF16, {"v_scales": 4096}, "^v_scale: got 4096; a bf16 cache has none"),
    ):
        decoder, batch = decoder_for(gpu, fmt)
        with pytest.raises(ArgumentValueError, match=match):
            decoder.decode(**batch | changed)
    decoder, batch = decoder_for(gpu, FP8)
    decoder.decode(**batch | {"k_scale": None, "k_scales": 4096})
    assert (gpu.last.values["score_scale"], gpu.last.values["k_scales"]) == (0.125, 4096)
    decoder.decode(**batch)
    assert (gpu.last.values["score_scale"], gpu.last.values["v_scale"]) == (0.125 * 0.5, 0.25)


def test_a_decoder_refuses_block_strides_that_its_kernel_would() -> None:
    gpu = FakeBackend()
    for fmt, override, name in (
        (FP8, {"block_stride_override": 2056}, "block_stride_bytes is 2056"),
        (FORMATS[2], {"block_stride_override": 1160}, "block_stride_bytes is 1160"),
        (FORMATS[2], {"data_section_override": 1032}, "data_section_bytes is 1032"),
    ):
        with pytest.raises(ArgumentValueError, match=f"layout: its {name}, which must be a multiple of 16"):
            decoder_for(gpu, fmt, **override)
    assert gpu.loads == gpu.launches == []  # type: ignore[comparison-overlap]
    assert gpu.allocations == 0
    decoder_for(gpu, FP8, block_stride_override=2064)
    decoder_for(gpu, BF16)
