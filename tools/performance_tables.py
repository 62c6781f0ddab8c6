"""The README's tables of performance, from the JSON that `python -m benchmarks` writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import best_peer, error_of, peer_ratio

FORMATS = ("bf16", "fp8", "nvfp4")
IMAGE = "docs/images/decode_roofline.svg"
ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]
Sets = dict[str, list[Row]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def commit_of(result: dict[str, Any] | None) -> str:
    """The commit that a result belongs to, as a sentence."""
    return f" Commit {result['commit'][:12]}." if result and "commit" in result else ""


def by_format(rows: Sequence[Row], key: str, cell: Callable[[Row], str]) -> list[list[str]]:
    """One line for each value of a key, one cell for each format."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(str(row[key]), {})[row["format"]] = cell(row)
    return [[name, *(found.get(f, "not measured") for f in FORMATS)] for name, found in cells.items()]


def _share(row: Row) -> str:
    if "median_us" not in row:
        return refused(row)
    share = f"{100 * row['share_of_ceiling']:.0f}%" if "share_of_ceiling" in row else "not measured"
    return f"{row['median_us']:.1f} ({share})"


def refused(row: Row) -> str:
    """A cell for a row without figures."""
    return "failed" if row["message"].startswith("failed") else "not supported"


def _section(title: str, rows: Sequence[Row] | None, body: Callable[[Sequence[Row]], str]) -> str:
    return body(rows) if rows else f"{title}: not measured."


def decode(sets: Sets, peer: Sequence[Row]) -> str:
    """Ours, the share of the ceiling, and the ratio to the peer's best path."""

    def cell(row: Row) -> str:
        ratio = peer_ratio(row, peer)
        return _share(row) + ("" if ratio is None else f", {ratio:.2f} x")

    rows = [*sets.get("table", []), *sets.get("long", [])]
    if not rows:
        return "Decode throughput: not measured."
    ours = table(["q/kv heads, sequences x tokens", *FORMATS], by_format(rows, "load", cell))
    return ours + "\n\n" + _peer(sets.get("table", []), peer)


def _peer(rows: Sequence[Row], peer: Sequence[Row]) -> str:
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        best = best_peer(peer, row["load"], row["format"])
        if best:
            inside = ", ".join(part for part in (best["path"], error_of(best)) if part)
            lines.setdefault(row["load"], {})[row["format"]] = f"{best['median_us']:.1f} ({inside})"
    if not lines:
        return "FlashInfer on the same loads: not measured."
    body = [[name, *(cells.get(f, "not measured") for f in FORMATS)] for name, cells in lines.items()]
    plans = [r["plan_ms"] for r in peer if r.get("plan_ms")]
    plan = (
        f" Its plan on the host costs {min(plans):.1f} to {max(plans):.1f} ms more at each change of batch."
        if plans
        else ""
    )
    title = (
        "FlashInfer on the same loads, timed the same way; in brackets its best path, and that path's "
        f"relative error to float64.{plan}"
    )
    return f"{title}\n\n" + table(["microseconds", *FORMATS], body)


def latency(rows: Sequence[Row]) -> str:
    """Back to back, and behind a writer of q."""

    def cell(row: Row) -> str:
        return (
            f"{row['median_us']:.1f}; {row['behind_writer_us']:.1f}" if "median_us" in row else refused(row)
        )

    return (
        "One sequence: microseconds back to back; behind a kernel that writes q each time (the pair less "
        "that kernel alone).\n\n" + table(["latency", *FORMATS], by_format(rows, "load", cell))
    )


def unequal(sets: Sets) -> str:
    """The price of unequal lengths."""
    rows = [r for r in sets.get("unequal", []) if r["lengths"] == "unequal"]
    if not rows:
        return "Unequal lengths: not measured."

    def cell(row: Row) -> str:
        if "median_us" not in row:
            return refused(row)
        return _share(row) + (f", {100 * row['price']:+.1f}%" if "price" in row else "")

    body = [*by_format(rows, "load", cell), *by_format(sets.get("many", []), "load", _share)]
    return (
        "Unequal lengths; last the price against equal lengths of as many tokens (64: of 128 to 32768 "
        "tokens).\n\n" + table(["unequal lengths", *FORMATS], body)
    )


def generality(rows: Sequence[Row]) -> str:
    """Share of the ceiling for every shape."""

    def cell(row: Row) -> str:
        if "median_us" not in row:
            return refused(row)
        return f"{100 * row['share_of_ceiling']:.0f}%" if "share_of_ceiling" in row else "not measured"

    named = [
        {**r, "axis": "1 x 4,194,304 tokens" if r["axis"] == "one sequence" else r["axis"]} for r in rows
    ]
    return (
        "Other shapes: share of the read ceiling at 2 GB of K and V or more, one thing varied at a time from "
        "32/8 heads of 128 and blocks of 16 (KV heads at a GQA ratio of 4).\n\n"
        + table(["shape", *FORMATS], by_format(named, "axis", cell))
    )


def seed_launchers(rows: Sequence[Row]) -> str:
    """The launchers against the decoder."""

    def cell(row: Row) -> str:
        if "median_us" not in row:
            return refused(row)
        return f"{row['median_us']:.1f}" + (f" ({100 * row['price']:+.1f}%)" if "price" in row else "")

    return (
        "The single launchers at 64 x 8192, microseconds (against `Decoder`); split-K with its reduction.\n\n"
        + table(["path", *FORMATS], by_format(rows, "path", cell))
    )


def fixed_split(rows: Sequence[Row]) -> str:
    """The price of batch invariance."""
    split = [r for r in rows if "split_tokens" in r]
    if not split:
        return f"Fixed split size: not measured ({rows[0].get('message', '')})."
    named = [{**r, "case": f"{r['load']}, {r['split_tokens']} tokens a split"} for r in split]

    def cell(row: Row) -> str:
        if "price" not in row:
            return refused(row) if "message" in row else "not measured"
        return f"{100 * row['price']:+.1f}%" + (", bits differ" if row["bits_depend_on_batch"] else "")

    return "A fixed split size (a sequence's bits do not depend on its batch): its price.\n\n" + table(
        ["fixed split size", *FORMATS], by_format(named, "case", cell)
    )


def features(sets: Sets) -> str:
    """What features cost, and formats mixed."""

    def cell(row: Row) -> str:
        return _share(row) + (f", {100 * row['price']:+.1f}%" if "price" in row else "")

    parts = []
    if sets.get("features"):
        body = by_format(sets["features"], "feature", cell)
        parts.append(
            "Features at 64 x 8192, 32/8 heads; last the price against the plain decoder.\n\n"
            + table(["feature", *FORMATS], body)
        )
    if sets.get("mixed"):
        rows = [[f"{r['format']} K, {r['value_format']} V", _share(r)] for r in sets["mixed"]]
        parts.append(table(["K and V of different formats", "microseconds"], rows))
    return "\n\n".join(parts) or "Features: not measured."


def cascade(rows: Sequence[Row]) -> str:
    """A shared prefix, against flat decode."""

    def cell(row: Row) -> str:
        if "median_us" not in row:
            return refused(row)
        gains = (row[f"speedup_over_{name}"] for name in ("copies", "same_blocks"))
        return ", ".join([f"{row['median_us']:.1f}", *(f"{gain:.1f} x" for gain in gains)])

    return (
        "A shared prefix (`CascadeDecoder`): microseconds; flat decode's time over it, where each sequence "
        "has a copy of the prefix, and where all share its blocks.\n\n"
        + table(["sequences x (prefix + suffix)", *FORMATS], by_format(rows, "load", cell))
    )


def shares(title: str) -> Callable[[Sequence[Row]], str]:
    """A table of loads with their shares of a ceiling."""
    return lambda rows: table(
        [title, *FORMATS], by_format([r for r in rows if r["format"] != "all"], "load", _share)
    )


def host_cost(rows: Sequence[Row]) -> str:
    """Microseconds of host time."""
    body = [
        [
            r["call"],
            f"{r['median_us']:.1f}" if "median_us" in r else refused(r),
            str(r.get("allocations", "")),
        ]
        for r in rows
    ]
    return table(["a warm call on the host", "microseconds", "allocations in 100 calls"], body)


def compile_times(rows: Sequence[Row]) -> str:
    """First use of a kernel."""
    body = [
        [
            r["module"],
            f"{r['cold_ms']:.0f}" if "cold_ms" in r else refused(r),
            *(f"{r[key]:.0f}" if key in r else "not measured" for key in ("from_disk_ms", "ahead_ms")),
        ]
        for r in rows
    ]
    header = ["first use, 32/8 heads of 128", "compiled, ms", "from the disk cache, ms", "compiled ahead, ms"]
    return table(header, body)


def performance(result: dict[str, Any] | None) -> str:
    """All tables, or a line that nothing was measured."""
    if result is None:
        return "Performance: not measured."
    output = result.get("output", result)
    sets: Sets = output["sets"]
    ceiling = output["ceiling"]
    versions = output["device"]
    peer = f"; FlashInfer {versions['flashinfer']}" if "flashinfer" in versions else ""
    read, copy = (ceiling[f"{kind}_bytes_per_us"] / 1e6 for kind in ("read", "copy"))
    intro = (
        "`Decoder`, microseconds a call inside a CUDA graph over rotating random block tables (cold L2; "
        f"medians), in brackets the share of the read ceiling of the same run, {read:.2f} TB/s (copy, read "
        f"plus written: {copy:.2f} TB/s), then FlashInfer's time over ours. Bytes are those of K and V "
        f"alone. Commit {output['commit'][:12]}, driver {versions['driver']}{peer}."
    )
    parts = [intro]
    if (ROOT / IMAGE).exists():
        parts.append(f"![Bandwidth of decode below the read ceiling]({IMAGE})")
    parts.append(decode(sets, sets.get("peer", [])))
    parts.append(_section("Latency", sets.get("latency"), latency))
    parts.append(unequal(sets))
    parts.append(_section("Other shapes", sets.get("generality"), generality))
    parts.append(_section("Fixed split size", sets.get("fixed_split"), fixed_split))
    parts.append(_section("Single launchers", sets.get("seed_launchers"), seed_launchers))
    parts.append(features(sets))
    parts.append(_section("Cascade", sets.get("cascade"), cascade))
    parts.append(
        _section(
            "Streaming step", sets.get("tiled"), shares("streaming step, tile (share of the read ceiling)")
        )
    )
    parts.append(_section("Writers", sets.get("writers"), shares("writer (share of the copy ceiling)")))
    parts.append(_section("absmax", sets.get("absmax"), _absmax))
    parts.append(_section("Host cost", sets.get("host_cost"), host_cost))
    parts.append(_section("Compile times", sets.get("compile"), compile_times))
    return "\n\n".join(parts)


def _absmax(rows: Sequence[Row]) -> str:
    return f"`bf16_absmax` of {rows[0]['load']}: {_share(rows[0])} of the read ceiling."
