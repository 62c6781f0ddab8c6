"""What errors about arguments know beside their message."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest

from cupaged.errors import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    CheckedModeError,
    CompileError,
    CupagedError,
    KernelFault,
    OutOfBlocksError,
)

NAMES = {"output": "out", "lse": "the lse", "got": "never", "the": "never"}


@pytest.mark.parametrize(
    ("message", "argument", "detail"),
    [
        ("q: got 3, allowed: 4", "q", "got 3, allowed: 4"),
        ("num_seqs, output: got 3, 4", "num_seqs, output", "got 3, 4"),
        ("outputs[1]: got\nnothing", "outputs", "[1]: got\nnothing"),
        ("tail.num_tokens: got 3", "tail.num_tokens", "got 3"),
        ("this kernel needs both: grid and block", "", "this kernel needs both: grid and block"),
        ("no name", "", "no name"),
        ("", "", ""),
    ],
)
@pytest.mark.parametrize("kind", [ArgumentValueError, ArgumentTypeError])
def test_a_message_is_split_where_its_name_ends(
    kind: type[ArgumentError], message: str, argument: str, detail: str
) -> None:
    error = kind(message)
    assert (str(error), error.kernel, error.argument, error.detail) == (message, "", argument, detail)
    placed = kind(message, kernel="k_one")
    assert (str(placed), placed.kernel, placed.argument) == (f"k_one: {message}", "k_one", argument)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("output: got the output, output: too", "out: got the output, output: too"),
        ("num_seqs, output: got 3", "num_seqs, out: got 3"),
        ("q: got 'output,', allowed: output", "q: got 'output,', allowed: output"),
        ("output: bytes 1 to 2 share memory with lse, 1", "out: bytes 1 to 2 share memory with the lse, 1"),
        ("q: its memory, 1 to 2, is shared with output, 1", "q: its memory, 1 to 2, is shared with out, 1"),
        ("got output", "got output"),
    ],
)  # fmt: skip
def test_names_are_changed_and_nothing_else(before: str, after: str) -> None:
    error = ArgumentValueError(before, kernel="output")
    error.rename(NAMES)
    assert str(error) == f"output: {after}"
    assert error.argument == re.sub("output", "out", ArgumentValueError(before).argument)


def test_checked_modes_array_is_the_argument() -> None:
    for message, array, after in (
        ("output[0, 3]: got 4", "output", "out[0, 3]: got 4"),
        ("k_cache scale[0]: got nan", "k_cache scale", "k_cache scale[0]: got nan"),
    ):
        error = CheckedModeError(message, array=array, index=(0, 3), value=4)
        assert (str(error), error.array) == (message, array)
        error.rename(NAMES)
        assert (str(error), error.argument) == (after, error.array)
        assert (error.index, error.value) == ((0, 3), 4)


@pytest.mark.parametrize("kind", [ArgumentValueError, ArgumentTypeError])
def test_a_copy_knows_the_same(kind: type[ArgumentError]) -> None:
    """As an error that comes from another process."""
    error = kind("output: got 3", kernel="k_one")
    error.rename(NAMES)
    again: Any = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), vars(again)) == ("k_one: out: got 3", vars(error))


@pytest.mark.parametrize(
    "error",
    [
        CheckedModeError("q[1]: got nan", array="q", index=(1,), value=3),
        OutOfBlocksError("none", needed=2, free=1),
        CompileError("no", log="line 1", command="nvrtc"),
        KernelFault("stray", kernel="k", block=(0, 0, 1)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_with_attributes_come_from_other_processes(error: CupagedError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_a_kernel_that_nobody_named_is_left_out() -> None:
    for message, after in (("lse: got 3", "lse: got 3"), ("no name", "k_one: no name")):
        error = ArgumentValueError(message, kernel="k_one")
        error.leave_out_kernel()
        assert str(error) == after
