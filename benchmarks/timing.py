"""Timing on a GPU: replays of a CUDA graph, medians with spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Time:
    """Microseconds a launch: median, smallest and largest over the replays; launches in the graph."""

    median_us: float
    min_us: float
    max_us: float
    launches: int


def elapsed_us(stream: Any, work: Callable[[], None]) -> float:
    """Time of queued work between two events."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return 1e3 * float(cupy.cuda.get_elapsed_time(start, end))


def graph_time(
    stream: Any, launches: Sequence[Callable[[], None]], *, replays: int = 9, min_us: float = 1500.0
) -> Time:
    """Time of a launch inside a graph of at least min_us, the launches taken in turn.

    Args:
        stream: a CuPy stream that is not the default one; each launch must use it.
        launches: each a different set of inputs, so that caches stay cold.
        replays: of the graph; the first is not counted.
        min_us: least length of the graph.
    """
    for launch in launches:
        launch()
    stream.synchronize()
    estimate = max(
        1.0, elapsed_us(stream, lambda: [launch() for launch in launches] and None) / len(launches)
    )
    count = max(1, math.ceil(min_us / estimate / len(launches))) * len(launches)
    stream.begin_capture()
    for i in range(count):
        launches[i % len(launches)]()
    graph = stream.end_capture()
    times = [elapsed_us(stream, lambda: graph.launch(stream)) / count for _ in range(replays)][1:]
    return Time(float(np.median(times)), min(times), max(times), count)
