"""What the measurements of one run share: device, pools, ceilings, rows so far, progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.device import Device
from benchmarks.pools import Arenas
from benchmarks.timing import Time
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import FORMATS, CacheFormat

if TYPE_CHECKING:
    from benchmarks.peer import Build

Row = dict[str, Any]


@dataclass
class Session:
    """One run.

    Attributes:
        formats: cache formats that are measured.
        ceiling: the best kernels of this run, bytes a microsecond: "read", and "copy" (read plus written).
        rows: rows of each set so far.
        shrink: divides sizes, for a dry run.
        failures: measurements that ended in an error which is no refusal.
        versions: of the peer's packages.
        peer_build: seconds, and the modules that did not compile.
        building: the peer's modules, being compiled while other things are measured.
        compiled: our kernels: how many, seconds, and those that did not compile.
        seconds: of each set.
    """

    device: Device
    arenas: Arenas
    formats: tuple[CacheFormat, ...] = FORMATS
    ceiling: dict[str, float] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    shrink: int = 1
    failures: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    peer_build: dict[str, Any] = field(default_factory=dict)
    building: Build | None = None
    compiled: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def add(self, name: str, row: Row) -> Row:
        """Keep and show a row."""
        self.rows.setdefault(name, []).append(row)
        self.say(report.line(row))
        return row

    def attempt(self, name: str, labels: Row, measure: Callable[[], Row]) -> Row | None:
        """Keep the row of a measurement; where the package refuses or fails, a row with its message.

        Only a refused argument is a result; anything else counts as failed.
        """
        try:
            return self.add(name, {**labels, **measure()})
        except (ArgumentValueError, ArgumentTypeError) as error:
            self.add(name, {**labels, "message": str(error)[:400]})
        except Exception as error:  # every other row must still be measured
            self.failures += 1
            self.add(name, {**labels, "message": f"failed: {type(error).__name__}: {error}"[:400]})
        return None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)


def timed(time: Time, num_bytes: int, ceiling: float | None) -> Row:
    """A time, the bytes it moved, and the share of a ceiling (bytes a microsecond) that this makes."""
    row = {**asdict(time), "bytes": num_bytes, "bytes_per_us": num_bytes / time.median_us}
    if ceiling:
        row["share_of_ceiling"] = row["bytes_per_us"] / ceiling
    return row
