"""The command line: ``cupaged``, or ``python -m cupaged``. Each module is one command or one of its parts.

The base install is enough for all of it; with the extra ``cli`` (rich) tables and progress are drawn better.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import cupaged
from cupaged.cli import bench, cache, compiling, demo, doctor, inspect
from cupaged.cli.parsing import Formatter
from cupaged.cli.status import EXIT_CODES, FAILED, INTERRUPTED, MISSING, USAGE, MissingError
from cupaged.cli.terminal import Terminal
from cupaged.errors import ArgumentTypeError, ArgumentValueError, BackendUnavailableError, CupagedError

_COMMANDS = (doctor, inspect, bench, demo, compiling, cache)


def main(arguments: Sequence[str] | None = None, prog: str = "cupaged") -> int:
    """Run a command.

    Args:
        arguments: words after the program's name; those of this process by default.
        prog: how the program was called, for its help.

    Returns:
        An exit status of `cupaged.cli.status`.
    """
    options = parser(prog).parse_args(arguments)
    terminal = Terminal()
    try:
        return int(options.run(options, terminal))
    except (ArgumentValueError, ArgumentTypeError) as error:
        return _say(terminal, error, USAGE)
    except (BackendUnavailableError, MissingError) as error:
        return _say(terminal, error, MISSING)
    except CupagedError as error:
        return _say(terminal, error, FAILED)
    except BrokenPipeError:  # what read the output has enough; nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(terminal: Terminal, error: Exception, status: int) -> int:
    terminal.error(str(error))
    return status


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of what it returns is the command."""
    codes = "\n".join(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES.items())
    main_parser = argparse.ArgumentParser(
        prog=prog,
        description=(cupaged.__doc__ or "").splitlines()[0],
        epilog=f"begin with:\n  %(prog)s doctor            what works on this machine\n"
        f"  %(prog)s demo              talk to a small model\n"
        f"  %(prog)s bench --help      each command explains itself, with examples\n\nexit status:\n{codes}",
        formatter_class=Formatter,
    )
    main_parser.add_argument("--version", action="version", version=f"cupaged {cupaged.__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return main_parser
