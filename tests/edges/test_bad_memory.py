"""Memory that a launch must not use: null pointers, and arrays that must not be written.

Either one ends the process on the emulator, and on a GPU every later call fails too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged import KVCache, merge_states
from cupaged.cascade import CascadeDecoder
from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import BF16, CacheLayout
from tests.fake_backend import FakeBackend
from tests.features.batches import Call, make_batch
from tests.features.setups import Setup
from tests.launcher_cases import addresses, arguments, call, handle, pairs
from tests.rig import Rig

# Launchers -> pointers that may be null, as their docstrings say. A pool goes with its rows.
MAY_BE_NULL = {
    "reshape_and_cache": {"key", "value"},
    "merge_states": {"out_lse"},
    "gather_tokens": {"scales"},
    "copy_cache_blocks": {"k_source", "v_source"},
}
GOES_WITH = {"k_cache": "key", "v_cache": "value", "k_target": "k_source", "v_target": "v_source"}
LAYOUT = CacheLayout(BF16, 2, 64, 16)


def may_be_null(launcher: str, name: str) -> bool:
    return any(launcher.startswith(begin) and name in names for begin, names in MAY_BE_NULL.items())


@pytest.mark.edge("null-pointers")
@pytest.mark.parametrize(("launcher", "name"), pairs(set()))
def test_null_pointers(launcher: str, name: str) -> None:
    gpu = FakeBackend()
    given = addresses(launcher)
    if may_be_null(launcher, name):
        call(gpu, launcher, given, **{name: 0})
        assert gpu.last.values[name] == 0
        return
    with pytest.raises(ArgumentValueError, match=rf"^{name}: got a null pointer \(address 0\)"):
        call(gpu, launcher, given, **{name: 0})
    assert not gpu.launches


@pytest.mark.edge("null-pointers")
@pytest.mark.parametrize(
    ("launcher", "name"), [(a, b) for a, b in pairs(set(GOES_WITH)) if not a.startswith("paged_decode")]
)
def test_pools_that_are_left_out(launcher: str, name: str) -> None:
    """Where the rows or the source are null, the pool may be, and the other one is still written."""
    gpu = FakeBackend()
    call(gpu, launcher, addresses(launcher), **{name: 0, GOES_WITH[name]: 0})
    assert len(gpu.launches) == 1


@pytest.mark.edge("null-pointers")
def test_tables_without_columns() -> None:
    """An array without elements has no address."""
    gpu = FakeBackend()
    for launcher, name in pairs({"block_tables", "tile_blocks"}):
        columns = "max_blocks_per_seq" if name == "block_tables" else "tile_capacity"
        call(gpu, launcher, addresses(launcher), **{name: 0, columns: 0})


@pytest.mark.edge("null-pointers")
@pytest.mark.parametrize("split", [False, True], ids=["planned", "chunked"])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_tables", "seq_lens", "output"])
def test_null_pointers_of_a_decoder(rig: Rig, name: str, split: bool) -> None:
    setup = Setup(split_tokens=48, max_blocks_per_seq=64) if split else Setup()
    batch = make_batch(setup, Call(lengths=(40, 3, 300)))
    output = rig.full_bf16(batch.q.shape)
    arguments = {**batch.arguments(rig), "output": output, name: 0}
    with pytest.raises(ArgumentValueError, match=rf"^{name}: got a null pointer"):
        setup.decoder(rig).decode(**arguments)
    assert (rig.download(output) == 0x7FC0).all()


@pytest.mark.edge("null-pointers")
def test_a_null_pointer_after_a_good_call(rig: Rig) -> None:
    """What was checked before is not taken as checked."""
    batch = make_batch(Setup(), Call(lengths=(40, 3, 300)))
    output = rig.full_bf16(batch.q.shape)
    arguments = {**batch.arguments(rig), "output": output}
    bare = {**arguments, **{name: rig.gpu.pointer(arguments[name]) for name in ("q", "seq_lens", "output")}}
    for good in (arguments, bare):
        for _ in range(3):
            Setup().decoder(rig).decode(**good)
        for name in ("q", "seq_lens", "output"):
            with pytest.raises(ArgumentValueError, match=rf"^{name}: got a null pointer"):
                Setup().decoder(rig).decode(**good | {name: 0})


# ---- arrays that must not be written, of which CuPy has none


@pytest.fixture
def emulated(rig: Rig) -> Rig:
    if rig.name != "emulator":
        pytest.skip("a CuPy array can always be written")
    return rig


def locked(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def written_pointers() -> list[tuple[str, str]]:
    gpu = FakeBackend()
    return [
        (launcher, name)
        for launcher, name in pairs(set())
        for parameter in handle(gpu, launcher).parameters
        if parameter.name == name and not parameter.const
    ]


@pytest.mark.edge("read-only-outputs")
@pytest.mark.parametrize(("launcher", "name"), written_pointers())
def test_outputs_of_launchers(emulated: Rig, launcher: str, name: str) -> None:
    """Bare addresses elsewhere: nothing runs. A kernel that only reads takes such arrays."""
    gpu = emulated.gpu
    given = addresses(launcher)
    with pytest.raises(ArgumentValueError, match=rf"^{name}: got a.* must not be written"):
        call(gpu, launcher, given, **{name: locked(arguments(launcher)[name])})


@pytest.fixture(scope="module")
def cache(rig: Rig) -> KVCache:
    cache = KVCache(rig.gpu, LAYOUT, 4)
    rng = np.random.default_rng(0)
    tokens = [rig.upload(rng.integers(0, 0x3F80, (32, 2, 64)).astype(np.uint16)) for _ in range(2)]
    cache.write(*tokens, rig.upload(np.arange(32)), stream=rig.stream)
    return cache


@pytest.mark.edge("read-only-outputs")
@pytest.mark.parametrize("kind", [Decoder, CascadeDecoder])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_of_decoders(emulated: Rig, cache: KVCache, kind: Any, name: str) -> None:
    decoder = kind.for_cache(cache, 4, 2)
    q = np.full((1, 4, 64), 0x3C00, np.uint16)
    prefix = (np.zeros(1, np.int32), 5) if kind is CascadeDecoder else ()
    table, lengths = np.array([[1]], np.int32), np.array([9], np.int32)
    outputs = {"out": np.full((1, 4, 64), 7, np.uint16), "lse": np.full((1, 4), 7, np.float32)}
    outputs[name].flags.writeable = False
    with pytest.raises(ArgumentValueError, match=r"(^|: )(out|output|lse): got a.* must not be written"):
        decoder.decode(q, cache, *prefix, table, lengths, stream=0, **outputs)
    assert all((array == 7).all() for array in outputs.values())


@pytest.mark.edge("read-only-outputs")
def test_an_output_that_is_locked_after_a_good_call(emulated: Rig, cache: KVCache) -> None:
    decoder = Decoder.for_cache(cache, 4, 2)
    q, out = np.full((1, 4, 64), 0x3C00, np.uint16), np.full((1, 4, 64), 7, np.uint16)
    inputs = (cache.k_cache, cache.v_cache, np.array([[1]], np.int32), np.array([9], np.int32), out)
    for _ in range(3):
        decoder.decode_pools(q, *inputs, num_seqs=1, max_blocks_per_seq=1, stream=0)
    out.flags.writeable = False
    with pytest.raises(ArgumentValueError, match=r"^output: got a.* must not be written"):
        decoder.decode_pools(q, *inputs, num_seqs=1, max_blocks_per_seq=1, stream=0)


@pytest.mark.edge("read-only-outputs")
def test_inputs_may_be_read_only(emulated: Rig, cache: KVCache) -> None:
    decoder = Decoder.for_cache(cache, 4, 2)
    q = np.full((1, 4, 64), 0x3C00, np.uint16)
    inputs = (np.array([[1]], np.int32), np.array([9], np.int32))
    expected = decoder.decode(q, cache, *inputs, stream=0)
    np.testing.assert_array_equal(decoder.decode(locked(q), cache, *map(locked, inputs), stream=0), expected)


@pytest.mark.edge("read-only-outputs")
def test_outputs_of_a_cache(emulated: Rig, cache: KVCache) -> None:
    gpu = emulated.gpu
    for name in ("k_pool", "v_pool"):
        pools = {"k_pool": cache.k_pool, "v_pool": cache.v_pool, name: locked(cache.k_pool)}
        with pytest.raises(ArgumentValueError, match=f"^{name}: got a ndarray that must not be written"):
            KVCache.wrap(gpu, LAYOUT, **pools)
    for name in ("out_k", "out_v"):
        out = {name: locked(np.zeros((32, 2, 64), np.float32))}
        with pytest.raises(ArgumentValueError, match=f"^{name}: got a ndarray that must not be written"):
            cache.gather([0, 1], 32, **out, stream=0)


@pytest.mark.edge("read-only-outputs")
def test_outputs_of_a_merge(emulated: Rig) -> None:
    parts = np.zeros((2, 3, 64), np.float32), np.zeros((2, 3), np.float32)
    out, lse = np.zeros((3, 64), np.float32), np.zeros(3, np.float32)
    for name, outputs in (("out", (locked(out), lse)), ("out_lse", (out, locked(lse)))):
        with pytest.raises(ArgumentValueError, match=f"^{name}: got a ndarray that must not be written"):
            merge_states(emulated.gpu, *parts, *outputs, stream=0)
