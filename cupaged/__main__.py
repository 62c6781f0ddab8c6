"""``python -m cupaged doctor`` and ``python -m cupaged cache``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import cupaged
from cupaged import cache, cache_dir
from cupaged.doctor import examine, readable_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    return _doctor(options.json) if options.command == "doctor" else _cache(options.clear)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupaged", description=cupaged.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"cupaged {cupaged.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="show what was found on this machine, and test each backend",
        description="Shows what was found on this machine and tests each backend. Exit status 0: at least "
        "one backend works and none fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    upkeep = commands.add_parser(
        "cache",
        help="show or clear the compiled kernels",
        description=f"Shows the compiled kernels on disk. The folder is ${cache_dir.DIR_VARIABLE}, else "
        f"$XDG_CACHE_HOME/cupaged, else ~/.cache/cupaged; its cap, in bytes, is ${cache.MAX_BYTES_VARIABLE}.",
    )
    upkeep.add_argument("--clear", action="store_true", help="remove them all")
    return parser


def _doctor(as_json: bool) -> int:
    report = examine()
    print(report.to_json() if as_json else report.to_text())
    return 0 if report.healthy else 1


def _cache(clear: bool) -> int:
    place = cache_dir.place()
    if place.path is None:
        print(f"there is no cache: {place.problem}; set {cache_dir.DIR_VARIABLE}", file=sys.stderr)
        return 1
    if clear:
        done = cache.clear(place.path)
        print(f"{place.path}: removed {done.num_entries} entries, {readable_bytes(done.num_bytes)}")
        for path in done.failed:
            print(f"cannot remove {path}", file=sys.stderr)
        return 1 if done.failed else 0
    found = cache.entries(place.path)
    print(f"folder    {place.path}{f' (cannot be written: {place.problem})' if place.problem else ''}")
    for room, count in sorted(Counter(entry.path.parent.name for entry in found).items()):
        size = sum(entry.num_bytes for entry in found if entry.path.parent.name == room)
        print(f"{room:10}{count} entries, {readable_bytes(size)}")
    total = sum(entry.num_bytes for entry in found)
    print(f"size      {readable_bytes(total)} of {readable_bytes(cache.max_bytes())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
