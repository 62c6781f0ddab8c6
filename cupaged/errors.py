"""Every error that cupaged raises by itself.

One root, ``CupagedError``. Errors about arguments also derive from the built-in
``ValueError`` or ``TypeError``, so that callers may catch either.
"""

from __future__ import annotations


class CupagedError(Exception):
    """Root of all errors raised by cupaged."""


class ArgumentValueError(CupagedError, ValueError):
    """An argument has a value that is not allowed; the message names it and what is."""


class ArgumentTypeError(CupagedError, TypeError):
    """An argument has a type or dtype that is not allowed; the message names it and what is."""


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
