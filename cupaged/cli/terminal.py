"""Output for people: tables, progress and colour, by rich where it is installed, else plain.

Into a pipe or a file goes plain text without colour or progress, whatever is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupaged import environment

_RED, _RESET = "\x1b[31m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"


def _is_terminal(stream: Any) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def wants_colour(stream: Any) -> bool:
    """Whether text for a stream is coloured: ``NO_COLOR``, then ``FORCE_COLOR``, else if it is a terminal."""
    if environment.NO_COLOR.get() is not None:
        return False
    if environment.FORCE_COLOR.get() is not None:
        return True
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _rich(module: str) -> Any:
    """A module of rich, or None where it is not installed."""
    try:
        return importlib.import_module(f"rich.{module}")
    except ImportError:
        return None


class Terminal:
    """Where a command writes: results to stdout, everything else to stderr."""

    def __init__(self) -> None:
        self.is_live = _is_terminal(sys.stdout) and wants_colour(sys.stdout)

    def line(self, text: str = "") -> None:
        """A line of the result."""
        print(text)

    def note(self, text: str) -> None:
        """A remark that is not part of the result."""
        print(text, file=sys.stderr)

    def error(self, text: str) -> None:
        """Why a command did not do what it was asked."""
        coloured = wants_colour(sys.stderr)
        print(f"{_RED}{text}{_RESET}" if coloured else text, file=sys.stderr)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """A table; columns whose cells are all numbers are aligned to the right."""
        right = [all(_is_number(row[column]) for row in rows) for column in range(len(header))]
        console, rich_table = _rich("console"), _rich("table")
        if self.is_live and console is not None and rich_table is not None:
            drawn = rich_table.Table(title=title or None)
            for name, is_right in zip(header, right, strict=True):
                drawn.add_column(name, justify="right" if is_right else "left")
            for row in rows:
                drawn.add_row(*row)
            console.Console(highlight=False, markup=False).print(drawn)
            return
        if title:
            self.line(title)
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, *rows):
            cells = (
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right, strict=True)
            )
            self.line("  ".join(cells).rstrip())

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Shows how far the work in its body is; nothing where the output is no terminal."""
        rich_progress = _rich("progress")
        if not self.is_live or not _is_terminal(sys.stderr):
            yield Progress(lambda done, total, label: None)
        elif rich_progress is None:
            yield Progress(_show_counter)
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
        else:
            console = _rich("console").Console(stderr=True)
            with rich_progress.Progress(console=console, transient=True) as bar:
                task = bar.add_task("")
                yield Progress(
                    lambda done, total, label: bar.update(
                        task, completed=done, total=total, description=label
                    )
                )


class Progress:
    """How far a piece of work is.

    Args:
        show: called with items done, items in all, and what comes next.
    """

    def __init__(self, show: Callable[[int, int, str], object]) -> None:
        self._show = show

    def reach(self, done: int, total: int, label: str = "") -> None:
        """So many items are done of so many; the label says what comes next."""
        self._show(done, total, label)


def _is_number(cell: str) -> bool:
    return bool(cell) and all(c in "0123456789.,+-%x " for c in cell)


def _show_counter(done: int, total: int, label: str) -> None:
    print(f"{_CLEAR_LINE}{done}/{total} {label}", end="", file=sys.stderr, flush=True)
