"""Exit statuses of the command line."""

from __future__ import annotations

DONE, FAILED, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = {
    DONE: "done",
    FAILED: "it was done and the answer is bad: a self-test failed, a run is slower, a file stays",
    USAGE: "the command or one of its values is not allowed; nothing was done",
    MISSING: "something is missing here: a GPU, a compiler, a model, a Python package",
    INTERRUPTED: "interrupted from the keyboard",
}


class MissingError(Exception):
    """Something that a command needs is not here; the message says how to get it."""
