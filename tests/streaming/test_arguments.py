"""What streaming refuses: by name, before anything runs, with errors of the package."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CupagedError,
    StoreDamagedError,
    StoreFormatError,
)
from cupaged.formats import BF16, FP8, CacheFormat, CacheLayout
from cupaged.pointers import DevicePtr
from cupaged.streaming import (
    ContextParallelDecoder,
    FileStore,
    NcclCommunicator,
    PinnedStore,
    StreamingDecoder,
    Tail,
    decode_records,
    encode_records,
    local_blocks,
)
from cupaged.streaming.device import PAGE
from cupaged.streaming.store import format as file_format
from cupaged.streaming.store.format import Header
from tests.rig import Rig
from tests.streaming.contexts import make_decoder, pinned_store, random_context
from tests.streaming.crash import LAYOUT, RECORD, record

SMALL = CacheLayout(BF16, 1, 16, 16)
HOSTILE = [0, -1, 2**70, True, "x", float("nan"), 1.5, None, [], np.array([1, 2])]


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def all_gather(self, exchanges: Any, stream: int) -> None:
        import ctypes

        for source, target, count in exchanges:
            ctypes.memmove(target, source, 4 * count)


def decoder(rig: Rig, **options: Any) -> StreamingDecoder:
    return StreamingDecoder(rig.gpu, SMALL, 1, **{"scratch_bytes": 1 << 16, **options})


def parallel(rig: Rig, **options: Any) -> ContextParallelDecoder:
    return ContextParallelDecoder(rig.gpu, options.pop("layout", SMALL), 1, Alone(), **options)


SIZES: dict[str, Callable[[Rig, Any], Any]] = {
    "max_seqs": lambda rig, x: decoder(rig, max_seqs=x),
    "scratch_bytes": lambda rig, x: decoder(rig, scratch_bytes=x),
    "tiles_in_flight": lambda rig, x: decoder(rig, tiles_in_flight=x),
    "read_threads": lambda rig, x: decoder(rig, read_threads=x),
    "num_q_heads": lambda rig, x: StreamingDecoder(rig.gpu, SMALL, x, scratch_bytes=1 << 16),
    "max_seqs, states": lambda rig, x: parallel(rig, max_seqs=x),
    "max_seqs, outputs": lambda rig, x: parallel(rig, max_seqs=x, partials="outputs"),
    "num_q_heads, parallel": lambda rig, x: ContextParallelDecoder(rig.gpu, SMALL, x, Alone()),
    "capacity_blocks": lambda rig, x: PinnedStore(rig.gpu, SMALL, x),
    "size": lambda rig, x: local_blocks(5, 0, x),
    "size, nccl": lambda rig, x: NcclCommunicator(rig.gpu, x, 0, ()),
}


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes(rig: Rig, name: str, value: Any) -> None:
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"^{name.split(',')[0]}.*: got"):
        SIZES[name](rig, value)


@pytest.mark.parametrize("value", HOSTILE[1:], ids=repr)
def test_sizes_that_may_be_nothing(rig: Rig, value: Any) -> None:
    context = random_context(BF16, [16])
    streaming = make_decoder(rig, context, tile_blocks=2)
    store = pinned_store(rig, context, 0)
    sequence = streaming.open(store)
    row = rig.upload(context.keys[0][:1])
    calls: dict[str, Callable[[], Any]] = {
        "resident_bytes": lambda: decoder(rig, resident_bytes=value),
        "num_tokens": lambda: streaming.extend(sequence, row, row, value, stream=rig.stream),
        "num_blocks": lambda: local_blocks(value, 0, 1),
        "count": lambda: store.reserve(value),
        "rank": lambda: local_blocks(5, value, 2),
        "first|blocks": lambda: store.read(value, np.empty(2 * context.layout.block_stride_bytes, np.uint8)),
    }
    for name, call in calls.items():
        if name == "count" and type(value) is int and value == 2**70:
            continue  # a full store
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"^({name}): got"):
            call()
    assert (sequence.num_tokens, store.num_blocks) == (16, 1)


@pytest.mark.parametrize("value", [0.0, -3, float("nan"), float("inf"), True, "x", [1.0], 1e-50], ids=repr)
def test_scales(rig: Rig, tmp_path: Path, value: Any) -> None:
    layout = CacheLayout(FP8, 2, 64, 16)
    tokens = np.zeros((1, 2, 64))
    calls: list[Callable[[], Any]] = [
        lambda: FileStore.create(tmp_path / "f", layout, v_scale=value),
        lambda: StreamingDecoder(rig.gpu, layout, 4, k_scale=1.0, v_scale=value),
        lambda: ContextParallelDecoder(rig.gpu, layout, 4, Alone(), k_scale=1.0, v_scale=value),
        lambda: encode_records(layout, tokens, tokens, v_scale=value),
        lambda: decode_records(layout, encode_records(layout, tokens, tokens)[0], 1, v_scale=value),
    ]
    for call in calls:
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match="v_scale"):
            call()
    assert not (tmp_path / "f").exists()


def test_a_format_that_streaming_does_not_know(rig: Rig) -> None:
    layout = CacheLayout(CacheFormat("int3", np.dtype(np.uint8), 2), 1, 64, 16)
    with pytest.raises(ArgumentValueError, match="its format is 'int3', allowed are bf16, fp8, nvfp4"):
        StreamingDecoder(rig.gpu, layout, 1)
    for partials in ("states", "outputs"):
        with pytest.raises(ArgumentValueError, match="its format is 'int3'"):
            parallel(rig, layout=layout, partials=partials)


def test_objects_that_are_none(rig: Rig, tmp_path: Path) -> None:
    context = random_context(BF16, [16])
    streaming = make_decoder(rig, context, tile_blocks=2)
    sequence = streaming.open(pinned_store(rig, context, 0))
    q, output, row = rig.upload(context.q), rig.full_bf16(context.q.shape), rig.upload(context.keys[0][:1])

    def decode(**options: Any) -> None:
        given = {"q": q, "sequences": [sequence], "output": output, "stream": rig.stream} | options
        streaming.decode(**given)

    calls: dict[str, Callable[[], Any]] = {
        "store": lambda: streaming.open(5),  # type: ignore[arg-type]
        "sequence": lambda: streaming.close(5),  # type: ignore[arg-type]
        "keep_tail": lambda: streaming.close(sequence, keep_tail=1),  # type: ignore[arg-type]
        "sequences": lambda: streaming.append(sequence, row, row, stream=rig.stream),  # type: ignore[arg-type]
        "sequences ": lambda: decode(sequences=sequence),
        "key": lambda: streaming.append([sequence], None, row, stream=rig.stream),
        "value": lambda: streaming.append([sequence], row, DevicePtr(4096, 64), stream=rig.stream),
        "q": lambda: decode(q="x"),
        "q ": lambda: decode(q=DevicePtr(4096, 64)),
        "output": lambda: decode(output=rig.gpu.zeros(context.q.shape, "float32")),
        "output ": lambda: decode(output=True),
        "softmax_scale": lambda: decode(softmax_scale=float("nan")),
        "progress": lambda: decode(progress=5),
        "cancelled": lambda: decode(cancelled=True),
        "trace": lambda: decode(trace=[]),
        "communicator": lambda: decoder(rig, communicator=5),
        "communicator ": lambda: ContextParallelDecoder(rig.gpu, SMALL, 1, None),  # type: ignore[arg-type]
        "layout": lambda: ContextParallelDecoder(rig.gpu, 5, 1, Alone()),  # type: ignore[arg-type]
        "layout ": lambda: FileStore.create(tmp_path / "f", 5),  # type: ignore[arg-type]
        "gpu": lambda: StreamingDecoder(5, SMALL, 1),
        "path": lambda: FileStore.open(5),  # type: ignore[arg-type]
        "path ": lambda: FileStore.create("a\0b", SMALL),
        "user": lambda: FileStore.create(tmp_path / "f", SMALL, user={1, 2}),
        "durable": lambda: FileStore.create(tmp_path / "f", SMALL, durable="no"),  # type: ignore[arg-type]
        "writable": lambda: FileStore.open(tmp_path / "f", writable=1),  # type: ignore[arg-type]
        "memory": lambda: PinnedStore(rig.gpu, SMALL, 1, memory=5),  # type: ignore[arg-type]
        "records": lambda: sequence.store.append([1]),  # type: ignore[arg-type]
        "tail": lambda: sequence.store.keep_tail(5),  # type: ignore[arg-type]
        "target": lambda: sequence.store.read(0, bytearray(9)),  # type: ignore[arg-type]
        "key ": lambda: encode_records(SMALL, 5, 5),
        "records ": lambda: decode_records(SMALL, None, 1),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"^{name.strip()}: "):
            call()
    assert sequence.num_tokens == 16
    decode()


@pytest.mark.parametrize("partials", ["states", "outputs"])
def test_both_kinds_of_partials_take_the_same(rig: Rig, partials: str) -> None:
    """An array is never taken to be larger than it is, and never for one of another type."""
    if rig.name != "emulator":
        pytest.skip("its communicator copies on the host")
    gpu = rig.gpu
    q, pool = gpu.zeros((1, 1, 16), "uint16"), gpu.zeros((2, 16, 1, 16), "uint16")
    table, output = gpu.zeros((1, 1), "int32"), gpu.empty((2, 1, 16), "uint16")
    ranks = parallel(rig, partials=partials)

    def decode(**changed: Any) -> None:
        given: dict[str, Any] = {
            "q": q, "k_cache": pool, "v_cache": pool, "block_tables": table, "seq_lens": [16],
            "output": output, "max_blocks_per_seq": 1, "num_blocks": 2, "stream": rig.stream,
        }  # fmt: skip
        ranks.decode(**(given | changed))

    refused: list[tuple[str, Any, str]] = [
        ("q", gpu.zeros((1, 1, 16), "float32"), "q: got dtype float32"),
        ("q", DevicePtr(gpu.pointer(q), 8), "q: got 8 bytes, needed are 32"),
        ("k_cache", gpu.zeros((2, 16, 1, 16), "float32"), "k_cache: got dtype float32"),
        ("v_cache", None, "v_cache: got NoneType"),
        ("v_cache", DevicePtr(gpu.pointer(pool), 512), "num_blocks: got 2, but v_cache holds 1 blocks"),
        ("num_blocks", 100, "num_blocks: got 100, but k_cache holds 2 blocks"),
        ("num_blocks", "x", "num_blocks: got 'x'"),
        ("block_tables", gpu.zeros((1, 1), "int64"), "block_tables: got dtype int64"),
        ("max_blocks_per_seq", 1.0, r"max_blocks_per_seq: got 1\.0"),
        ("max_blocks_per_seq", 2, "block_tables: got shape|block_tables: got 1 elements"),
        ("seq_lens", [1.5], r"seq_lens: got 1\.5"),
        ("seq_lens", [True], "seq_lens: got True"),
        ("seq_lens", [2**70], "seq_lens: got"),
        ("seq_lens", ["x"], "seq_lens: got 'x'"),
        ("seq_lens", 16, "seq_lens: got int"),
        ("output", gpu.zeros((1, 1, 8), "uint16"), "output: got "),
        ("output", gpu.zeros((1, 1, 16), "float32"), "output: got dtype float32"),
        ("softmax_scale", float("nan"), "softmax_scale"),
    ]
    for name, value, message in refused:
        with pytest.raises((ArgumentValueError, ArgumentTypeError), match=message):
            decode(**{name: value})
    assert (rig.download(output) == 0xFFFF).all()
    frozen = np.zeros((1, 1, 16), np.uint16)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentValueError, match=r"output: got .* must not be written"):
        decode(output=frozen)
    decode()
    assert not rig.download(output)[0].any()  # V is 0
    assert (rig.download(output)[1] == 0xFFFF).all()
    output[...] = 0xFFFF
    decode(output=gpu.pointer(output), seq_lens=np.array([3], np.int16))
    assert not rig.download(output)[0].any()
    decode(seq_lens=[])


def test_memory_of_the_callers_that_cannot_be_used(rig: Rig) -> None:
    memory = np.zeros(4 * RECORD, np.uint8)
    with pytest.raises(ArgumentValueError, match="memory: got strides"):
        PinnedStore(rig.gpu, LAYOUT, 1, memory=memory[::2])
    memory.flags.writeable = False
    with pytest.raises(ArgumentValueError, match="writeable False"):
        PinnedStore(rig.gpu, LAYOUT, 1, memory=memory)


@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_what_is_no_records(rig: Rig, tmp_path: Path, kind: str) -> None:
    store: Any = PinnedStore(rig.gpu, LAYOUT, 4)
    if kind == "file":
        store = FileStore.create(tmp_path / "f", LAYOUT)
    store.append(record(0).reshape(1, -1))
    with pytest.raises(ArgumentTypeError, match="records: got dtype int8"):
        store.append(np.zeros((1, RECORD), np.int8))
    with pytest.raises(ArgumentValueError, match="target: got shape"):
        store.read(0, np.empty(RECORD + 1, np.uint8))
    with pytest.raises(ArgumentValueError, match="target: got shape"):
        store.read(0, np.empty((1, RECORD), np.uint8))
    with pytest.raises(ArgumentValueError, match="target: got shape"):
        store.read(0, np.empty(2 * RECORD, np.uint8)[::2])
    with pytest.raises(ArgumentTypeError, match="target: got dtype float32"):
        store.read(0, np.empty(RECORD, np.float32))
    with pytest.raises(ArgumentValueError, match=r"tail\.record: got shape"):
        store.keep_tail(Tail(record(1).reshape(1, -1), 3))
    with pytest.raises(ArgumentTypeError, match=r"tail\.num_tokens: got 3\.0"):
        store.keep_tail(Tail(record(1), 3.0))  # type: ignore[arg-type]
    assert (store.num_blocks, store.tail) == (1, None)


def page_of(text: str) -> bytes:
    head = np.array((b"CUPAGEKV", 1, len(text), zlib.crc32(text.encode())), file_format._HEAD).tobytes()
    return (head + text.encode()).ljust(PAGE, b"\0")


def test_headers_with_what_cannot_be(tmp_path: Path) -> None:
    page = Header(LAYOUT).pack()
    fields = json.loads(page[20 : 20 + int.from_bytes(page[12:16], "little")])
    texts = [json.dumps(fields | {"v_scale": scale}) for scale in (-3, float("nan"), True, "x", None)]
    for text in [*texts, "[" * 3500, "[]", "5"]:
        with pytest.raises(StoreFormatError, match="f: the header says what cannot be"):
            Header.unpack(page_of(text), "f")


@pytest.mark.parametrize("num_tokens", [0, 17, 2**31])
def test_a_tail_of_a_file_with_tokens_that_cannot_be(tmp_path: Path, num_tokens: int) -> None:
    """Its checksums are right; on a device, so many tokens would lie outside the block."""
    path = tmp_path / "f"
    with FileStore.create(path, LAYOUT) as store:
        store._write(record(0).reshape(1, -1), num_tokens)
    with pytest.raises(StoreDamagedError, match=f"block 0 has {num_tokens} tokens"):
        FileStore.open(path)


def test_every_error_is_of_the_package(rig: Rig) -> None:
    """No launcher's name for an argument, and no error of NumPy's or Python's."""
    context = random_context(BF16, [16])
    streaming = make_decoder(rig, context, tile_blocks=2)
    sequence = streaming.open(pinned_store(rig, context, 0))
    q, output = rig.upload(context.q), rig.full_bf16(context.q.shape)
    for name in ("q", "sequences", "output", "stream", "softmax_scale", "progress", "cancelled", "trace"):
        for value in (*HOSTILE, object(), {}, b"x", np.zeros(3)):
            given = {"q": q, "sequences": [sequence], "output": output, "stream": rig.stream, name: value}
            if isinstance(value, int) and name in ("q", "output", "stream"):
                continue  # an address, or a stream
            with contextlib.suppress(CupagedError):
                streaming.decode(**given)
