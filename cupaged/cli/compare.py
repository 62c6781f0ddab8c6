"""Two runs of ``cupaged bench`` side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cupaged.cli.measure import Shape
from cupaged.cli.status import DONE, FAILED, MissingError
from cupaged.cli.terminal import Terminal
from cupaged.errors import ArgumentValueError

_KEYS = tuple(Shape.__dataclass_fields__)


def compare(old_path: Path, new_path: Path, tolerance: int | None, terminal: Terminal) -> int:
    """Print how each shape's time changed.

    A change counts only where the two runs' samples do not overlap: below that it is noise.

    Args:
        old_path: JSON of the earlier run.
        new_path: of the later one.
        tolerance: percent by which no shape may be slower; None: any change is fine.
        terminal: where to print.

    Returns:
        `FAILED` where a shape is slower than allowed.

    Raises:
        MissingError: a file that is not there.
        ArgumentValueError: a file of another kind, or runs that have no shape in common.
    """
    old, new = _read(old_path), _read(new_path)
    for key in ("device", "backend", "arch"):
        if old.get(key) != new.get(key):
            terminal.note(f"the runs differ in {key}: {old.get(key)} and {new.get(key)}")
    before = {_key(row): row for row in old["rows"]}
    shared = [(before[_key(row)], row) for row in new["rows"] if _key(row) in before]
    if not shared:
        raise ArgumentValueError(f"--compare: {old_path} and {new_path} have no shape in common")
    terminal.table(
        ["cache", "heads", "head_dim", "sequences", "tokens", "old us", "new us", "change", ""],
        [_cells(*pair) for pair in shared],
    )
    if left := len(old["rows"]) + len(new["rows"]) - 2 * len(shared):
        terminal.note(f"{left} rows are in one of the files only")
    slower = [] if tolerance is None else [pair for pair in shared if _is_slower(*pair, tolerance)]
    if slower:
        terminal.error(f"{len(slower)} of {len(shared)} shapes are more than {tolerance}% slower")
    return FAILED if slower else DONE


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise MissingError(f"there is no {path}; cupaged bench --save {path} makes it") from None
    except (OSError, ValueError) as error:
        raise ArgumentValueError(f"--compare: {path} cannot be read: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "median_us" in row for row in rows):
        raise ArgumentValueError(f"--compare: {path} is no file of cupaged bench --save")
    return content


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEYS)


def _change(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Percent by which the median grew."""
    return 100 * (float(new["median_us"]) / float(old["median_us"]) - 1)


def _overlap(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return bool(new["min_us"] <= old["max_us"] and old["min_us"] <= new["max_us"])


def _is_slower(old: dict[str, Any], new: dict[str, Any], tolerance: int) -> bool:
    return _change(old, new) > tolerance and not _overlap(old, new)


def _cells(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    verdict = "within the spread" if _overlap(old, new) else "slower" if _change(old, new) > 0 else "faster"
    return [
        str(new["format"]),
        f"{new['num_q_heads']}/{new['num_kv_heads']}",
        f"{new['head_dim']}",
        f"{new['num_seqs']:,}",
        f"{new['length']:,}",
        f"{old['median_us']:,.1f}",
        f"{new['median_us']:,.1f}",
        f"{_change(old, new):+.1f}%",
        verdict,
    ]
