"""What a run prints: a line for each row as it comes, tables at the end; ratios to the peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
TITLES = (
    "load",
    "format",
    "value_format",
    "axis",
    "feature",
    "lengths",
    "path",
    "kind",
    "kernel",
    "call",
    "module",
)


def line(row: Row) -> str:
    """One row in words."""
    name = "  ".join(str(row[key]) for key in TITLES if key in row)
    if "split_tokens" in row:
        name += f"  split {row['split_tokens']}"
    return f"{name:64}  {figures(row)}"


def figures(row: Row) -> str:
    """The measured part of a row."""
    if "message" in row:
        return str(row["message"])
    if "cold_ms" in row:
        return f"{row['cold_ms']:.0f} ms compiled, {row['from_disk_ms']:.0f} ms from disk"
    parts = [f"{row['median_us']:9.2f} us ({row['min_us']:.2f} to {row['max_us']:.2f})"]
    if "behind_writer_us" in row:
        parts.append(f"behind a writer {row['behind_writer_us']:.2f} us (pair {row['pair_us']:.2f})")
    if "bytes_per_us" in row:
        parts.append(f"{row['bytes_per_us'] / 1e6:.3f} TB/s")
    if "share_of_ceiling" in row:
        parts.append(f"{100 * row['share_of_ceiling']:.1f}%")
    if error_of(row):
        parts.append(f"error {error_of(row)}")
    for key in ("wrong_bytes", "wrong_results", "allocations", "bits_depend_on_batch"):
        if key in row:
            parts.append(f"{key.replace('_', ' ')} {row[key]}")
    return "  ".join(parts)


def error_of(row: Row) -> str:
    """The relative error to float64; empty where none was taken."""
    error = row.get("relative_error")
    return "" if error is None else f"{error:.1e}"


def best_peer(rows: Sequence[Row], load: str, fmt: str) -> Row | None:
    """The peer's fastest path for a load and a format."""
    found = [r for r in rows if r["load"] == load and r["format"] == fmt and "median_us" in r]
    return min(found, key=lambda r: float(r["median_us"])) if found else None


def peer_ratio(row: Row, peer_rows: Sequence[Row]) -> float | None:
    """The peer's time over ours; above 1 ours is faster."""
    peer = best_peer(peer_rows, row["load"], row["format"])
    if peer is None or "median_us" not in row:
        return None
    return float(peer["median_us"]) / float(row["median_us"])


def comparison(rows: Sequence[Row], peer_rows: Sequence[Row]) -> list[str]:
    """Lines of ours against the peer."""
    ours, theirs = f"{'ours us':>9} {'spread':>15} {'ceiling':>8}", f"{'peer us':>9} {'path':>5} {'error':>7}"
    lines = [f"{'':34} {'':6} {ours} {theirs} ratio"]
    for row in rows:
        if "median_us" not in row:
            lines.append(f"{row['load']:34} {row['format']:6} {row['message']}")
            continue
        peer, ratio = best_peer(peer_rows, row["load"], row["format"]), peer_ratio(row, peer_rows)
        spread = f"{row['min_us']:.1f}..{row['max_us']:.1f}"
        share = f"{100 * row['share_of_ceiling']:.1f}%" if "share_of_ceiling" in row else ""
        compared = (
            f"{peer['median_us']:9.1f} {peer['path']:>5} {error_of(peer):>7} {ratio:.2f}"
            if peer and ratio
            else "not measured"
        )
        lines.append(
            f"{row['load']:34} {row['format']:6} {row['median_us']:9.1f} {spread:>15} {share:>8} {compared}"
        )
    return lines


def is_wrong(row: Row, bound: float) -> bool:
    """Whether a result was not what it had to be."""
    if any(row.get(key) for key in ("wrong_bytes", "wrong_results", "bits_depend_on_batch")):
        return True
    error = row.get("relative_error")
    return error is not None and not error < bound
