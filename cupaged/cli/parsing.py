"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from typing import Any

from cupaged.formats import FORMATS

Commands = Any  # argparse's own type for sub-commands is private


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs stay as they are written."""


def command(
    commands: Commands, name: str, *, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: of the main parser.
        name: the command.
        summary: its line in the list of commands.
        description: what it does, above the options.
        examples: lines below the options, ``%(prog)s`` standing for program and command.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=Formatter,
    )
    return parser


def positive(text: str) -> int:
    """An integer above 0, for argparse."""
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    """An integer of 0 or more, for argparse."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is an integer of {least} or more")
    return value


def add_format(parser: argparse.ArgumentParser) -> None:
    """The option that names one cache format."""
    names = [fmt.name for fmt in FORMATS]
    parser.add_argument("--format", choices=names, default="bf16", help="cache format (bf16)")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """The option that names some cache formats."""
    names = [fmt.name for fmt in FORMATS]
    parser.add_argument("--formats", nargs="+", choices=names, default=names, help="cache formats (all)")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The options that describe a cache's blocks."""
    parser.add_argument("--kv-heads", type=positive, default=8, metavar="N", help="KV heads (8)")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="N", help="values of a head (128)")
    parser.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens of a block (16)")
    parser.add_argument(
        "--heads-first",
        action="store_true",
        help="rows of a block in the order head, token (HND) instead of token, head (NHD)",
    )
