"""``cupaged bench``: how long `Decoder` takes for shapes of your own, and whether that changed."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupaged.cli.backends import describe, make_backend
from cupaged.cli.compare import compare
from cupaged.cli.measure import Clock, Row, Shape, measure
from cupaged.cli.parsing import Commands, add_formats, add_shape, command, not_negative, positive
from cupaged.cli.status import DONE, FAILED, MissingError
from cupaged.cli.terminal import Terminal
from cupaged.errors import CupagedError
from cupaged.formats import CacheLayout, cache_format

SCHEMA = 1


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "bench",
        summary="time decoding for shapes of your own, or compare two runs",
        description="Times one decode of a whole batch (cupaged.decode.Decoder) for each combination of the\n"
        "sizes given. Launches are captured into a CUDA graph; they take disjoint sets of blocks in turn,\n"
        "so that no cache stays warm. GB/s counts the K and V bytes that attention must read.",
        examples="  %(prog)s --q-heads 32 --kv-heads 8 --seqs 1 8 64 --length 8192\n"
        "  %(prog)s --formats fp8 --length 1024 8192 65536 --plot lengths.svg\n"
        "  %(prog)s --save before.json\n"
        "  %(prog)s --compare before.json after.json --tolerance 3     exit status 1 if 3%% slower",
    )
    parser.add_argument("--q-heads", type=positive, default=32, metavar="N", help="query heads (32)")
    add_shape(parser)
    parser.add_argument("--seqs", type=positive, nargs="+", default=[64], metavar="N", help="sequences (64)")
    parser.add_argument("--length", type=positive, nargs="+", default=[8192], metavar="N",
                        help="tokens of each sequence (8192)")  # fmt: skip
    add_formats(parser)
    parser.add_argument("--query-tokens", type=positive, default=1, metavar="N",
                        help="tokens decoded of each sequence, 1 to 8 (1)")  # fmt: skip
    parser.add_argument("--replays", type=positive, default=8, metavar="N", help="samples of each time (8)")
    parser.add_argument("--backend", choices=("cupy", "emulator"), default="cupy",
                        help="emulator: to try the command; its times say nothing about a GPU")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw GB/s (needs the extra bench)")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"),
                        help="measure nothing: compare two files of --save")  # fmt: skip
    parser.add_argument("--tolerance", type=not_negative, metavar="PERCENT",
                        help="with --compare: exit status 1 if a shape is that much slower")  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measure, or compare."""
    if options.compare is not None:
        old, new = options.compare
        return compare(old, new, options.tolerance, terminal)
    draw = None if options.plot is None else _pyplot()  # before the minutes of measuring
    gpu = make_backend(options.backend)
    if gpu.name == "emulator":
        terminal.note("on the emulator: these times say nothing about a GPU")
    rows, refused = _measured(gpu, _shapes(options), options.replays, terminal)
    content = {"schema": SCHEMA, **describe(gpu), "rows": [row.to_json() for row in rows]}
    if options.save is not None:
        options.save.write_text(json.dumps(content, indent=2) + "\n")
    if options.json:
        terminal.line(json.dumps(content, indent=2))
    else:
        _show(content, rows, terminal)
    if draw is not None:
        _plot(draw, rows, content["device"], options.plot)
    for shape, error in refused:
        terminal.error(f"{shape.label()}: {error}")
    return FAILED if refused else DONE


def _shapes(options: argparse.Namespace) -> list[Shape]:
    return [
        Shape(name, options.q_heads, options.kv_heads, options.head_dim, options.block_size, num_seqs, length,
              options.query_tokens, options.heads_first)
        for name, num_seqs, length in itertools.product(options.formats, options.seqs, options.length)
    ]  # fmt: skip


def _measured(
    gpu: Any, shapes: Sequence[Shape], replays: int, terminal: Terminal
) -> tuple[list[Row], list[tuple[Shape, CupagedError]]]:
    """The rows, and the shapes that are refused; an invalid argument that all share raises."""
    clock = Clock(gpu)
    layouts = [
        CacheLayout(
            cache_format(x.format), x.num_kv_heads, x.head_dim, x.block_size, heads_first=x.heads_first
        )
        for x in shapes
    ]
    rows: list[Row] = []
    refused: list[tuple[Shape, CupagedError]] = []
    with terminal.progress() as progress:
        for done, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            progress.reach(done, len(shapes), shape.label())
            try:
                rows.append(measure(clock, layout, shape, replays))
            except CupagedError as error:
                refused.append((shape, error))
    if not rows:
        raise refused[0][1]
    return rows, refused


def _show(content: dict[str, Any], rows: Sequence[Row], terminal: Terminal) -> None:
    first = rows[0].shape
    order = "HND" if first.heads_first else "NHD"
    title = (
        f"{content['device']} ({content['arch']}): {first.num_q_heads} query heads, "
        f"{first.num_kv_heads} KV heads, head_dim {first.head_dim}, blocks of {first.block_size} ({order})"
    )
    body = [
        [
            row.shape.format,
            f"{row.shape.num_seqs:,}",
            f"{row.shape.length:,}",
            f"{row.median_us:,.1f}",
            f"{row.min_us:,.1f}",
            f"{row.max_us:,.1f}",
            f"{row.kv_bytes / 1e6:,.1f}",
            f"{row.gb_per_s:,.2f}",
        ]
        for row in rows
    ]
    terminal.table(
        ["cache", "sequences", "tokens", "median us", "min us", "max us", "KV MB", "GB/s"], body, title
    )


def _pyplot() -> Any:
    """Matplotlib, drawing to files.

    Raises:
        MissingError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingError("--plot needs matplotlib: pip install 'cupaged[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _plot(pyplot: Any, rows: Sequence[Row], device: str, path: Path) -> None:
    """GB/s over the tokens of a batch, a line for each format."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(row.shape.format for row in rows):
        points = sorted(
            (row.shape.num_seqs * row.shape.length, row.gb_per_s) for row in rows if row.shape.format == name
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens of the batch", ylabel="K and V read, GB/s", title=device)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
