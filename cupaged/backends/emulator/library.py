"""The compiled libraries as Python sees them: layouts of C++ structures, calls and faults."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from cupaged.backends.emulator.places import describe_place
from cupaged.errors import (
    AsyncCopyFault,
    BackendUnavailableError,
    DataRaceFault,
    DeadlockFault,
    KernelFault,
    LaunchError,
    MisalignedFault,
    OutOfBoundsFault,
    UninitialisedSharedFault,
    WarpMismatchFault,
)

SCHEDULES = {"fifo": 0, "reverse": 1, "random": 2}

_LAUNCH_REFUSED = 1
# FaultKind in runtime/report.h -> the error raised.
_FAULTS: dict[int, type[KernelFault]] = {
    2: DeadlockFault,
    3: WarpMismatchFault,
    4: AsyncCopyFault,
    5: MisalignedFault,
    6: KernelFault,
    7: DataRaceFault,
    8: OutOfBoundsFault,
    9: UninitialisedSharedFault,
}


class SharedLayout(ctypes.Structure):
    """SharedLayout in runtime/shared_memory.h."""

    _fields_ = (
        ("anchor", ctypes.c_void_p),
        ("anchor_offset", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
    )


class LaunchRequest(ctypes.Structure):
    """LaunchRequest in runtime/launch.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("shared", ctypes.POINTER(SharedLayout)),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("stack_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("setup", ctypes.c_void_p),
    )


class Report(ctypes.Structure):
    """Report in runtime/report.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("has_block", ctypes.c_int32),
        ("has_thread", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("place", ctypes.c_uint32),
        ("other_place", ctypes.c_uint32),
        ("message", ctypes.c_char * 4052),
    )

    def error(self, kernel: str, library: Path) -> KernelFault | LaunchError:
        """The error that this report stands for.

        Args:
            kernel: the entry's name.
            library: the kernel's library, which the report's places lie in.
        """
        text = self.message.decode(errors="replace")
        other = describe_place(library, self.other_place) if self.other_place else "an unknown place"
        text = text.replace("@other@", other)
        if self.kind == _LAUNCH_REFUSED:
            return LaunchError(f"{kernel}: {text}")
        block = _triple(self.block) if self.has_block else None
        thread = _triple(self.thread) if self.has_thread else None
        place = "".join(
            f", {name} {index}" for name, index in (("block", block), ("thread", thread)) if index is not None
        )
        if self.place:
            place += f", at {describe_place(library, self.place)}"
        return _FAULTS[self.kind](f"{kernel}{place}: {text}", kernel=kernel, block=block, thread=thread)


def _triple(values: ctypes.Array[ctypes.c_uint32]) -> tuple[int, int, int]:
    x, y, z = values
    return (x, y, z)


class Runtime:
    """The runtime library, loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Kernels are linked to the library by its name; nothing else must see its symbols.
        self._library = load(path)
        self._launch = self._library.cupaged_emulator_launch
        self._launch.argtypes = (ctypes.POINTER(LaunchRequest), ctypes.POINTER(Report))
        self._launch.restype = ctypes.c_int
        self._locate = self._library.cupaged_emulator_locate_shared
        self._locate.argtypes = (ctypes.c_void_p, ctypes.POINTER(SharedLayout))
        self._locate.restype = ctypes.c_int

    @classmethod
    def of(cls, path: Path) -> Runtime:
        """The one runtime of that file name in this process.

        Kernels find their runtime by name among the libraries already loaded, so there must not be two of
        one name, even from different cache folders.
        """
        with _runtimes_lock:
            found = _runtimes.get(path.name)
            if found is None:
                found = _runtimes[path.name] = cls(path)
            return found

    def launch(self, request: LaunchRequest, kernel: str, library: Path) -> None:
        """Run a launch to its end.

        Args:
            request: what to launch.
            kernel: the entry's name, for errors.
            library: path of its code.

        Raises:
            LaunchError: the request is not allowed.
            KernelFault: the kernel failed.
        """
        report = Report()
        if self._launch(ctypes.byref(request), ctypes.byref(report)):
            raise report.error(kernel, library)

    def locate_shared(self, anchor: int) -> SharedLayout:
        """Layout of a kernel module's static shared memory, given the address of its anchor function."""
        layout = SharedLayout()
        if not self._locate(anchor, ctypes.byref(layout)):
            raise BackendUnavailableError(
                "the emulator cannot find a kernel's thread-local memory: this system's C library does not "
                "tell where it is (dl_iterate_phdr without dlpi_tls_data)"
            )
        return layout


_runtimes: dict[str, Runtime] = {}
_runtimes_lock = threading.Lock()


class KernelLibrary:
    """A kernel's library, loaded.

    Attributes:
        path: of the file.
        entry: address of the function that calls the kernel with parameters from an array of pointers.
        shared_pointer: where its static shared memory lies, as launches take it.
    """

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self.path = path
        self._library = load(path)
        self.entry = _address(self._library.cupaged_emulator_entry)
        anchor = _address(self._library.cupaged_emulator_shared_anchor)
        self.shared_pointer = ctypes.pointer(runtime.locate_shared(anchor))


def load(path: Path) -> ctypes.CDLL:
    """Load a library, its symbols visible to nothing but what is linked to it.

    Raises:
        BackendUnavailableError: the system refuses to load it.
    """
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise BackendUnavailableError(
            f"a compiled library cannot be loaded: {error}. If its folder is mounted noexec or the file is "
            "damaged, delete the file or set CUPAGED_CACHE_DIR to another folder"
        ) from error


def _address(function: object) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    if value is None:
        raise BackendUnavailableError("a compiled library lacks one of its functions")
    return value
