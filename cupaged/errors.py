"""Every error that cupaged raises by itself.

One root, ``CupagedError``. Errors about arguments also derive from the built-in
``ValueError`` or ``TypeError``, so that callers may catch either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = r"[A-Za-z_][\w.]*"
# How messages begin: "name: got", "name[3]: got", "name, name: got"; and the other argument that some name.
_NAMED = re.compile(rf"({_NAME}(?:, {_NAME})*)((?:\[[^]]*\])?: .*)", re.DOTALL)
_SHARING = re.compile(r"(.* (?:is shared|share memory) with )(\w+)(.*)", re.DOTALL)


class CupagedError(Exception):
    """Root of all errors raised by cupaged. They are pickled with their attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls `__init__` with the message alone, and some ask for more.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[CupagedError], args: tuple[Any, ...]) -> CupagedError:
    return kind.__new__(kind, *args)


class ArgumentError(CupagedError):
    """An argument is not as it must be: the root of the three below.

    Attributes:
        kernel: entry name of the kernel that the argument was given for, where the message begins with it.
        argument: name of the argument, or several with commas; "" where the message begins with none.
    """

    def __init__(self, message: str = "", *, kernel: str = "") -> None:
        named = _NAMED.fullmatch(message)
        self.kernel = kernel
        self.argument, self._rest = named.groups() if named else ("", message)
        super().__init__(self._text())

    def _text(self) -> str:
        return f"{self.kernel and self.kernel + ': '}{self.argument}{self._rest}"

    @property
    def detail(self) -> str:
        """The message behind the argument's name."""
        return self._rest.removeprefix(": ")

    def rename(self, names: Mapping[str, str]) -> None:
        """Give arguments the names that the caller knows them by, in the attributes and in the message.

        Args:
            names: a name here -> the caller's name.
        """
        self.argument = ", ".join(names.get(name, name) for name in self.argument.split(", "))
        if sharing := _SHARING.fullmatch(self._rest):
            before, other, after = sharing.groups()
            self._rest = f"{before}{names.get(other, other)}{after}"
        self.args = (self._text(),)

    def leave_out_kernel(self) -> None:
        """For a caller who launched no kernel by name: begin with the argument, where one is named."""
        if self.argument:
            self.kernel = ""
            self.args = (self._text(),)


class ArgumentValueError(ArgumentError, ValueError):
    """An argument has a value that is not allowed; the message names it and what is."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type or dtype that is not allowed; the message names it and what is."""


class CheckedModeError(ArgumentError, ValueError):
    """Checked mode found a value in device memory that a kernel must not be given.

    Attributes:
        index: where it stands in the array, or None where the fault is no single element's.
        value: what stands there, or None.
    """

    def __init__(
        self, message: str, *, array: str, index: tuple[int, ...] | None = None, value: object = None
    ) -> None:
        super().__init__(message)
        self.argument, self._rest = array, message.removeprefix(array)
        self.index = index
        self.value = value

    @property
    def array(self) -> str:
        """The argument that holds it."""
        return self.argument


class OutOfBlocksError(CupagedError, RuntimeError):
    """Too few blocks of a pool are free; nothing was taken.

    Attributes:
        needed: blocks asked for.
        free: blocks that were free.
    """

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class StoreError(CupagedError, RuntimeError):
    """A file of cache blocks cannot be used as asked; the message names the file."""


class StoreFormatError(StoreError):
    """A file that is none of cache blocks, of another version, or of another layout."""


class StoreDamagedError(StoreError):
    """A file of cache blocks that is cut short or does not hold what its checksums say."""


class StoreFullError(StoreError):
    """There is no room for more blocks; what was stored before is as it was."""


class StreamingCancelledError(CupagedError):
    """A streaming decode was cancelled. Its output is not complete; everything can be used again."""


class BackendUnavailableError(CupagedError, RuntimeError):
    """The backend asked for cannot run here (no GPU, no CuPy, no C++ compiler)."""


class KernelSourceError(CupagedError, ValueError):
    """A kernel source does not exist, or its entry or parameters cannot be understood."""


class CompileError(CupagedError, RuntimeError):
    """A kernel did not compile. ``log`` holds the compiler's own output.

    Attributes:
        log: what the compiler printed.
        command: the compiler and its options, one string.
    """

    def __init__(self, message: str, *, log: str, command: str) -> None:
        super().__init__(f"{message}\ncommand: {command}\n{log}")
        self.log = log
        self.command = command


class LaunchError(CupagedError, RuntimeError):
    """The driver or the emulator refused a launch."""


class KernelFault(CupagedError, RuntimeError):
    """The emulator found a fault while a kernel ran.

    Attributes:
        kernel: entry name of the kernel.
        block: block index (x, y, z), or None where the fault belongs to no block.
        thread: thread index (x, y, z), or None where it belongs to no thread.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.block = block
        self.thread = thread


class DeadlockFault(KernelFault):
    """Threads wait for each other for ever."""


class WarpMismatchFault(KernelFault):
    """Lanes of one warp met in different collectives, or with a wrong mask."""


class DataRaceFault(KernelFault):
    """Two accesses, one of them a write, that nothing orders (check mode)."""


class OutOfBoundsFault(KernelFault):
    """An access outside every buffer of the launch (check mode)."""


class MisalignedFault(KernelFault):
    """An access at an address its size does not divide (check mode)."""


class UninitialisedSharedFault(KernelFault):
    """A read of shared memory that nothing wrote (check mode)."""


class AsyncCopyFault(KernelFault):
    """An asynchronous copy used too early, or asked for with wrong addresses or sizes."""
