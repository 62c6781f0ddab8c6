"""``python -m cupaged``: the command line of `cupaged.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cupaged import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return cli.main(arguments, prog="python -m cupaged")


if __name__ == "__main__":
    sys.exit(main())
