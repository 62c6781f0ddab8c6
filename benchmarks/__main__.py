"""Every measurement of the package on a GPU, in one run: `python -m benchmarks`.

Microseconds a launch inside CUDA graphs over rotating random block tables (cold L2), the bytes that a launch
must move, their share of the ceiling of the same run, the error to float64, and the peer timed the same way.
Sets can be run alone; the ceiling is measured in every run. On a GPU all kernels are compiled first, by all
processors; the peer's modules are compiled meanwhile and while sets that do not need them are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    accuracy,
    cascade,
    ceiling,
    compile_ahead,
    decode,
    features,
    host_cost,
    latency,
    loads,
    peer,
    report,
    seed_launchers,
    tiled,
    writers,
)
from benchmarks.commit import source_commit
from benchmarks.device import Device, facts
from benchmarks.pools import Arenas
from benchmarks.session import Row, Session
from cupaged.formats import FORMATS
from tools.performance_tables import performance

PEER_SECONDS = 240


def measure_peer(session: Session) -> None:
    """FlashInfer over the table's loads, in a process of its own."""
    reason = peer.missing()
    if reason or not session.device.is_gpu:
        session.rows["peer"] = [{"load": "all", "format": "all", "message": reason or "not measured: no GPU"}]
        session.say(session.rows["peer"][0]["message"])
        return
    if session.building is not None:
        session.peer_build, session.building = session.building.finish(session.say), None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peer.json"
        command = [sys.executable, "-m", "benchmarks.peer", "--json", str(target)]
        try:
            status = subprocess.run(command, timeout=PEER_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if target.exists():
            output = json.loads(target.read_text())
            session.rows["peer"] = output["rows"]
            session.versions |= output["versions"]
        if status:
            session.failures += 1
            message = f"not measured: the peer's process ended with status {status}"
            session.rows.setdefault("peer", []).append({"load": "all", "format": "all", "message": message})
            session.say(message)


# In this order: the peer's modules are compiled while the first are measured; what is compared is measured
# close together, what needs idle processors last. Beside each the seconds that it takes on one H200, about.
SETS: dict[str, tuple[Callable[[Session], None], int]] = {
    "generality": (decode.generality, 35),
    "unequal": (decode.unequal, 8),
    "fixed_split": (decode.fixed_split, 10),
    "seed_launchers": (seed_launchers.measure, 6),
    "tiled": (tiled.measure, 5),
    "writers": (writers.measure, 4),
    "features": (features.measure_features, 6),
    "cascade": (cascade.measure, 6),
    "long": (decode.long, 6),
    "table": (decode.table, 8),
    "peer": (measure_peer, 50),
    "latency": (latency.measure, 5),
    "host_cost": (host_cost.measure, 3),
    "compile": (host_cost.compile_times, 20),
}
BEFORE_SECONDS = 35  # compiling ahead, the ceiling


def earlier_sets(path: Path | None, commit: str) -> dict[str, Any]:
    """Sets of a file of the same commit, which this run adds to."""
    if path is None or not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    if earlier["commit"] != commit:
        raise SystemExit(f"--update: {path} is of commit {earlier['commit']}, this is {commit}")
    return dict(earlier["sets"])


def result(session: Session, commit: str, earlier: dict[str, Any]) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "commit": commit,
        "device": {
            **(facts() if session.device.is_gpu else {"gpu": "none: the emulator"}),
            **session.versions,
        },
        "ceiling": {f"{kind}_bytes_per_us": best for kind, best in session.ceiling.items()},
        "compiled": session.compiled,
        "peer_build": session.peer_build,
        "seconds": {name: round(seconds, 1) for name, seconds in session.seconds.items()},
        "sets": {**earlier, **session.rows},
    }


def estimates() -> str:
    """How long the sets take."""
    sets = ", ".join(f"{name} {seconds}" for name, (_, seconds) in SETS.items())
    return (
        f"Seconds on one H200, about: {BEFORE_SECONDS} before all sets, then {sets}. The peer's set also "
        "waits until its modules are compiled."
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=estimates(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write all results there, after each set")
    parser.add_argument("--update", action="store_true", help="keep the other sets of the --json file")
    parser.add_argument("--formats", default="bf16,fp8,nvfp4", help="some of bf16,fp8,nvfp4")
    parser.add_argument("--set", default="all", help=f"all, or some of {','.join(SETS)}")
    parser.add_argument("--commit", help="the source's commit, where there is no repository")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the emulator; times mean nothing"
    )
    options = parser.parse_args(given)
    options.set = list(SETS) if options.set == "all" else options.set.split(",")
    unknown = set(options.set) - set(SETS)
    if unknown:
        parser.error(f"--set: there is no {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    options.formats = tuple(f for f in FORMATS if f.name in options.formats.split(","))
    return options


def start(options: argparse.Namespace) -> Session:
    """A session; the peer's modules are being compiled."""
    device = Device.emulated() if options.dry_run else Device.on_gpu()
    if options.dry_run:
        return Session(device, Arenas(device, pool_bytes=1 << 20), options.formats, shrink=1024)
    reserved = loads.MILLIONS if {"generality", "long"} & set(options.set) else None
    session = Session(device, Arenas(device, reserved=reserved), options.formats)
    if "peer" in options.set and not peer.missing():
        session.building = peer.Build()
    return session


def wrong_rows(sets: dict[str, list[Row]]) -> list[Row]:
    """Rows with a result that was not what it had to be; the peer has a bound of its own."""
    bounds = {"peer": accuracy.PEER_BOUND}
    return [
        row
        for name, rows in sets.items()
        for row in rows
        if report.is_wrong(row, bounds.get(name, accuracy.BOUND))
    ]


def measure_all(session: Session, options: argparse.Namespace, commit: str, earlier: dict[str, Any]) -> None:
    """The ceiling, then every chosen set, written after each."""
    if session.device.is_gpu:
        session.compiled = compile_ahead.compile_sets(session, options.set)
    ceiling.measure(session)
    for name in (n for n in SETS if n in options.set):
        session.say(f"--- {name}")
        begin = time.monotonic()
        SETS[name][0](session)
        session.seconds[name] = time.monotonic() - begin
        if options.json:
            options.json.write_text(json.dumps(result(session, commit, earlier), indent=1) + "\n")


def main(given: Sequence[str] | None = None) -> int:
    """Exit status 1 where a result was wrong or a measurement failed."""
    options = arguments(given)
    commit = source_commit(options.commit)
    earlier = earlier_sets(options.json if options.update else None, commit)
    session = start(options)
    try:
        measure_all(session, options, commit, earlier)
    finally:
        if session.building is not None:
            session.building.stop()
    device = session.device
    if "table" in session.rows:
        print("\n".join(report.comparison(session.rows["table"], session.rows.get("peer", []))))
    if device.is_gpu:
        print(performance(result(session, commit, earlier)))
    wrong = wrong_rows(session.rows)
    for row in wrong:
        print("WRONG:", report.line(row))
    session.say(f"done: {len(wrong)} wrong results, {session.failures} failed measurements")
    return int(bool(wrong or session.failures))


if __name__ == "__main__":
    sys.exit(main())
