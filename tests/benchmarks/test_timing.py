"""The method of timing, with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import timing


class FakeEngine:
    """A device on which launch i takes costs[i] microseconds; the host takes `host_us` for each launch."""

    def __init__(self, host_us: float = 0.0) -> None:
        self.now, self.host_us = 0.0, host_us
        self.captured: list[str] | None = None
        self.order: list[str] = []
        self.replays: list[int] = []

    def launch(self, name: str, us: float) -> Callable[[], None]:
        def call() -> None:
            if self.captured is not None:
                self.captured.append(name)
                self.graph_us += us
            else:
                self.now += max(us, self.host_us)

        return call

    def elapsed_us(self, work: Callable[[], object]) -> float:
        begin = self.now
        work()
        return self.now - begin

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        self.captured, self.graph_us = [], 0.0
        work()
        names, us, self.captured = self.captured, self.graph_us, None

        def replay() -> None:
            self.order = names
            self.replays.append(len(names))
            self.now += us

        return replay


def test_launches_are_taken_in_turn_in_whole_rounds() -> None:
    engine = FakeEngine()
    launches = [engine.launch(name, us) for name, us in (("a", 10.0), ("b", 20.0), ("c", 30.0))]
    result = timing.graph_time(engine, launches, min_us=100.0)
    assert engine.order[:4] == ["a", "b", "c", "a"]
    assert result.launches % 3 == 0
    assert result.median_us == result.min_us == result.max_us == pytest.approx(20.0)


@pytest.mark.parametrize("us", [2.0, 8.0, 400.0, 5000.0])
def test_the_graph_is_long_enough_although_the_host_is_slow(us: float) -> None:
    engine = FakeEngine(host_us=20.0)
    result = timing.graph_time(engine, [engine.launch("a", us)], min_us=1500.0)
    assert result.launches * us >= 1500.0
    assert result.launches * us <= 1.3 * 1500.0 + us


def test_a_launch_without_a_length_ends() -> None:
    engine = FakeEngine()
    result = timing.graph_time(engine, [engine.launch("a", 0.0)] * 3)
    assert timing.MAX_LAUNCHES / 2 < result.launches <= timing.MAX_LAUNCHES + 3


def test_the_first_replay_does_not_count() -> None:
    class Slowing(FakeEngine):
        slow = 1

        def elapsed_us(self, work: Callable[[], object]) -> float:
            return super().elapsed_us(work) + (1e6 if self._is_first(work) else 0.0)

        def _is_first(self, work: Callable[[], object]) -> bool:
            self.slow += 1
            return self.slow == 3  # the first after the one that measures the graph's length

    engine = Slowing()
    assert timing.graph_time(engine, [engine.launch("a", 2000.0)]).max_us == pytest.approx(2000.0)


def test_no_more_replays_than_needed() -> None:
    engine = FakeEngine()
    alike = timing.graph_time(engine, [engine.launch("a", 2000.0)])
    assert alike.samples == timing.FEWEST
    assert len(engine.replays) == 3 + timing.FEWEST  # warming up, its length, one that does not count

    class Wavering(FakeEngine):
        def elapsed_us(self, work: Callable[[], object]) -> float:
            return super().elapsed_us(work) * (1.01 if len(self.replays) % 2 else 1.0)

    engine = Wavering()
    unlike = timing.graph_time(engine, [engine.launch("a", 2000.0)])
    assert unlike.samples == timing.REPLAYS - 1
    assert len(engine.replays) == 2 + timing.REPLAYS
    assert (unlike.min_us, unlike.max_us) == pytest.approx((2000.0, 2020.0))


def test_host_time_waits_between_batches_and_not_in_them() -> None:
    events: list[str] = []
    result = timing.host_time(
        lambda: events.append("call"), lambda: events.append("wait"), batches=3, calls=4
    )
    assert events == (["call"] * 4 + ["wait"]) * 4
    assert result.launches == 4
    assert 0 < result.min_us <= result.median_us <= result.max_us
