"""Timing: replays of a CUDA graph for what a GPU does, a plain loop for what the host does.

Everything that is compared (ours, the peer, the ceilings) is timed by these functions with the same numbers;
only the `Engine`, which knows how to record events and capture a graph, differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

REPLAYS = 9  # of a graph, at most; the first is not counted
FEWEST = 4  # that are counted, where they are alike:
ALIKE = 0.005  # largest and smallest within so much of each other
GRAPH_US = 1500.0  # least length of a graph: launching it then costs well below 1 %
MAX_LAUNCHES = 4096  # in a graph

Launch = Callable[[], object]


@dataclass(frozen=True)
class Time:
    """Microseconds a launch: median, smallest and largest over the samples; launches in each of them."""

    median_us: float
    min_us: float
    max_us: float
    launches: int
    samples: int

    @staticmethod
    def of(samples: Sequence[float], launches: int) -> Time:
        return Time(float(np.median(samples)), min(samples), max(samples), launches, len(samples))


class Engine(Protocol):
    """Events and graphs of one library, on one stream."""

    def elapsed_us(self, work: Launch) -> float:
        """Microseconds between an event before and one after the work; waits for the second."""

    def capture(self, work: Launch) -> Launch:
        """The work as a graph; the result replays it."""


class CupyEngine:
    """Graphs of a CuPy stream, which must not be the default one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def elapsed_us(self, work: Launch) -> float:
        import cupy

        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(start, end))

    def capture(self, work: Launch) -> Launch:
        self._stream.begin_capture()
        try:
            work()
        finally:
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        return lambda: graph.launch(self._stream)


class HostEngine:
    """Where launches run to their end before they return (the emulator). Its times mean little."""

    def elapsed_us(self, work: Launch) -> float:
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin)

    def capture(self, work: Launch) -> Launch:
        return work


def graph_time(
    engine: Engine, launches: Sequence[Launch], *, replays: int = REPLAYS, min_us: float = GRAPH_US
) -> Time:
    """Time of a launch inside a graph of at least min_us, the launches taken in turn.

    The graph is made of whole rounds over the launches and grows until a replay lasts min_us: launched one by
    one, short kernels wait for the host, which says nothing about their time in a graph.

    Args:
        engine: of the stream that every launch uses.
        launches: each a different set of inputs, so that caches stay cold.
        replays: of the graph, at most; the first is not counted. Where FEWEST are alike, no more are made.
        min_us: least length of the graph.
    """
    for launch in launches:
        launch()
    rounds = 1
    while True:
        count = rounds * len(launches)
        replay = engine.capture(lambda n=count: _in_turn(launches, n))
        replay()
        length = engine.elapsed_us(replay)
        if length >= min_us or count >= MAX_LAUNCHES:
            break
        growth = 1.1 * min_us / max(length, 1.0)
        rounds = min(math.ceil(rounds * growth), max(rounds + 1, MAX_LAUNCHES // len(launches)))
    engine.elapsed_us(replay)
    samples: list[float] = []
    while len(samples) < replays - 1 and not _settled(samples):
        samples.append(engine.elapsed_us(replay) / count)
    return Time.of(samples, count)


def _settled(samples: Sequence[float]) -> bool:
    return len(samples) >= FEWEST and max(samples) <= (1 + ALIKE) * min(samples)


def _in_turn(launches: Sequence[Launch], count: int) -> None:
    for i in range(count):
        launches[i % len(launches)]()


def host_time(call: Launch, wait: Launch, *, batches: int = 25, calls: int = 200) -> Time:
    """Time of a call on the host, over batches of calls, between which the device is waited for.

    A batch is shorter than a stream's queue, so no call waits for the device.
    """
    for _ in range(calls):
        call()
    wait()
    samples = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e6 * (time.perf_counter() - begin) / calls)
        wait()
    return Time.of(samples, calls)
