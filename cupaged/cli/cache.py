"""``cupaged cache``: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from cupaged import cache, cache_dir
from cupaged.cli.parsing import Commands, command
from cupaged.cli.status import DONE, FAILED, MissingError
from cupaged.cli.terminal import Terminal
from cupaged.doctor import readable_bytes


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "cache",
        summary="show or clear the compiled kernels",
        description="Kernels are compiled once and kept on disk. Removing them is always safe: what is\n"
        "needed is compiled again. The folder is\n"
        f"${cache_dir.DIR_VARIABLE}, else $XDG_CACHE_HOME/cupaged, else ~/.cache/cupaged;\n"
        f"its cap, in bytes, is ${cache.MAX_BYTES_VARIABLE}.",
        examples="  %(prog)s              folder, entries and size\n"
        "  %(prog)s where        the folder alone, for scripts\n"
        "  %(prog)s list         every entry, least recently used first\n"
        "  %(prog)s clear        remove them all",
    )
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="show", metavar="ACTION",
                        help="show (the default), where, size, list or clear")  # fmt: skip
    parser.add_argument("--clear", action="store_true", help="the same as clear")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Do the action on the folder."""
    place = cache_dir.place()
    if place.path is None:
        raise MissingError(f"there is no cache: {place.problem}; set {cache_dir.DIR_VARIABLE}")
    action = "clear" if options.clear else options.action
    return _ACTIONS[action](place.path, place.problem, terminal)


def _show(folder: Path, problem: str, terminal: Terminal) -> int:
    found = cache.entries(folder)
    terminal.line(f"folder    {folder}{f' (cannot be written: {problem})' if problem else ''}")
    for room, count in sorted(Counter(entry.path.parent.name for entry in found).items()):
        size = sum(entry.num_bytes for entry in found if entry.path.parent.name == room)
        terminal.line(f"{room:10}{count} entries, {readable_bytes(size)}")
    total = sum(entry.num_bytes for entry in found)
    terminal.line(f"size      {readable_bytes(total)} of {readable_bytes(cache.max_bytes())}")
    return DONE


def _where(folder: Path, problem: str, terminal: Terminal) -> int:
    terminal.line(str(folder))
    return DONE


def _size(folder: Path, problem: str, terminal: Terminal) -> int:
    terminal.line(str(cache.total_bytes(folder)))
    return DONE


def _list(folder: Path, problem: str, terminal: Terminal) -> int:
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)),
            readable_bytes(entry.num_bytes),
            str(entry.path.relative_to(folder)),
        ]
        for entry in cache.entries(folder)
    ]
    terminal.table(["last used", "size", "entry"], rows)
    return DONE


def _clear(folder: Path, problem: str, terminal: Terminal) -> int:
    done = cache.clear(folder)
    terminal.line(f"{folder}: removed {done.num_entries} entries, {readable_bytes(done.num_bytes)}")
    for path in done.failed:
        terminal.error(f"cannot remove {path}")
    return FAILED if done.failed else DONE


_ACTIONS = {"show": _show, "where": _where, "size": _size, "list": _list, "clear": _clear}
