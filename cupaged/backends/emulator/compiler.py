"""Finding and running the system's C++ compiler."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cupaged import environment
from cupaged.errors import BackendUnavailableError, CompileError

_CANDIDATES = ("g++", "c++", "clang++")
_INSTALL = (
    "install one, for example with: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
    "or pip install ziglang (anywhere)"
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: how it is called, without options.
    """

    command: tuple[str, ...]

    @property
    def identity(self) -> str:
        """What distinguishes its output from another compiler's: command, version and machine."""
        return _identity(self.command)

    def accepts(self, flags: tuple[str, ...]) -> bool:
        """True where the compiler knows these options."""
        return _accepts(self.command, flags)

    def run(self, options: Sequence[str], subject: str, cwd: Path) -> None:
        """Compile.

        Args:
            options: everything after the command.
            subject: what is compiled, for the error message.
            cwd: working folder.

        Raises:
            CompileError: with what the compiler printed.
        """
        command = [*self.command, *options]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", cwd=cwd, check=False
            )
        except OSError as error:
            raise CompileError(
                f"{subject}: the compiler does not start", log=str(error), command=shlex.join(command)
            ) from error
        if done.returncode != 0:
            raise CompileError(
                f"{subject} does not compile", log=done.stderr + done.stdout, command=shlex.join(command)
            )


def find_compiler() -> Compiler:
    """``$CXX`` if it is set, else the first of g++, c++, clang++ and ziglang's ``zig c++``.

    Raises:
        BackendUnavailableError: there is none; the message says what was looked for and how to get one.
    """
    if own := environment.CXX.get():
        command = tuple(shlex.split(own))
        if shutil.which(command[0]) is None:
            raise BackendUnavailableError(
                f"the emulator needs a C++ compiler, but CXX is {own!r}, which is no program on PATH; "
                f"correct or unset it, or {_INSTALL}"
            )
        return Compiler(command)
    for name in _CANDIDATES:
        if (path := shutil.which(name)) is not None:
            return Compiler((path,))
    if importlib.util.find_spec("ziglang") is not None:
        return Compiler((sys.executable, "-m", "ziglang", "c++"))
    raise BackendUnavailableError(
        f"the emulator needs a C++ compiler; looked for $CXX (not set), {', '.join(_CANDIDATES)} on PATH and "
        f"the Python package ziglang, and found none; {_INSTALL}"
    )


@functools.lru_cache(maxsize=16)
def _accepts(command: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    probe = [*command, *flags, "-fsanitize=thread", "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@functools.lru_cache(maxsize=16)
def _identity(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BackendUnavailableError(
            f"the C++ compiler {shlex.join(command)} does not start: {error}"
        ) from error
    return "\n".join((shlex.join(command), done.stdout, platform.machine()))
