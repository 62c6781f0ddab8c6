"""Progress, cancellation and failures in the middle of a step: everything can be used again."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import BackendUnavailableError, StoreDamagedError, StreamingCancelledError
from cupaged.formats import FORMATS, FP8, CacheFormat
from cupaged.streaming import ProgressBar, Trace
from tests.oracle import assert_matches
from tests.rig import Rig
from tests.streaming.contexts import (
    decode,
    file_store,
    make_decoder,
    open_all,
    pinned_store,
    random_context,
)

formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


@formats
@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_cancelling_leaves_everything_usable(rig: Rig, fmt: CacheFormat, kind: str, tmp_path: Path) -> None:
    context = random_context(fmt, [300, 120])
    make: Any = pinned_store if kind == "pinned" else file_store
    place: Any = rig if kind == "pinned" else tmp_path
    decoder = make_decoder(rig, context, tile_blocks=2, slots=3, resident_blocks=2)
    sequences = open_all(decoder, [make(place, context, seq) for seq in range(2)])
    right = decode(rig, decoder, context, sequences)
    assert_matches(right, context.expected())
    for stop_at in range(12):
        asked = 0

        def cancelled(stop_at: int = stop_at) -> bool:
            nonlocal asked
            asked += 1
            return asked > stop_at

        with pytest.raises(StreamingCancelledError, match=f"cancelled before tile {stop_at} of 12"):
            decode(rig, decoder, context, sequences, cancelled=cancelled)
        assert asked == stop_at + 1
        if stop_at % 4 == 0:
            again = decode(rig, decoder, context, sequences)
            np.testing.assert_array_equal(again.view(np.uint16), right.view(np.uint16))
    decoder.shutdown()


def test_cancelling_from_another_thread(rig: Rig) -> None:
    context = random_context(FP8, [400])
    decoder = make_decoder(rig, context, tile_blocks=1)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])
    stop = threading.Event()
    reached = []

    def progress(done: int, total: int) -> None:
        reached.append(done / total)
        if done > 0:
            thread = threading.Thread(target=stop.set)
            thread.start()
            thread.join()

    with pytest.raises(StreamingCancelledError):
        decode(rig, decoder, context, sequences, progress=progress, cancelled=stop.is_set)
    assert 0 < reached[-1] < 0.2
    assert_matches(decode(rig, decoder, context, sequences), context.expected())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_callback_that_raises(rig: Rig, error: type[BaseException]) -> None:
    context = random_context(FP8, [200])
    decoder = make_decoder(rig, context, tile_blocks=1)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])

    def progress(done: int, total: int) -> None:
        if done:
            raise error

    with pytest.raises(error):
        decode(rig, decoder, context, sequences, progress=progress)
    assert_matches(decode(rig, decoder, context, sequences), context.expected())


@pytest.mark.parametrize("io", ["mmap", "read"])
def test_a_file_cut_short_in_the_middle_of_a_step(rig: Rig, tmp_path: Path, io: str) -> None:
    context = random_context(FP8, [400, 100])
    decoder = make_decoder(rig, context, tile_blocks=2, slots=3)
    files = [file_store(tmp_path, context, seq, io=io) for seq in range(2)]
    sequences = open_all(decoder, files)
    whole = files[0].path.read_bytes()
    os.truncate(files[0].path, len(whole) - 8 * 2 * context.layout.block_stride_bytes)
    with pytest.raises(StoreDamagedError, match="short read"):
        decode(rig, decoder, context, sequences)
    files[0].path.write_bytes(whole)
    assert_matches(decode(rig, decoder, context, sequences), context.expected())
    decoder.shutdown()


def test_progress_of_each_tile(rig: Rig) -> None:
    context = random_context(FP8, [160])
    decoder = make_decoder(rig, context, tile_blocks=3, slots=2)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])
    reported: list[tuple[int, int]] = []
    decode(rig, decoder, context, sequences, progress=lambda *both: reported.append(both))
    record = 2 * context.layout.block_stride_bytes
    assert reported == [(n * record, 10 * record) for n in (0, 0, 3, 6, 10)]


def test_a_trace_has_the_times_of_each_tile(rig: Rig) -> None:
    context = random_context(FP8, [160])
    decoder = make_decoder(rig, context, tile_blocks=3)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])
    trace = Trace()
    assert trace.rows() == []
    decode(rig, decoder, context, sequences, trace=trace)
    rows = trace.rows()
    assert [row["bytes"] for row in rows] == [n * 2 * context.layout.block_stride_bytes for n in (3, 3, 3, 1)]
    for row in rows:
        assert 0 <= row["copy_begin"] <= row["copy_end"] <= row["step_end"]
        assert row["copy_begin"] <= row["step_begin"] <= row["step_end"]


def test_a_bar(rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    context = random_context(FP8, [160])
    decoder = make_decoder(rig, context, tile_blocks=3)
    sequences = open_all(decoder, [pinned_store(rig, context, 0)])
    with ProgressBar("decode") as bar:
        for _ in range(2):
            decode(rig, decoder, context, sequences, progress=bar)
    shown = capsys.readouterr().err
    assert "decode" in shown
    assert "100%" in shown
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'cupaged\[progress\]'"):
        ProgressBar()
