"""The launch builder."""

from __future__ import annotations

import contextlib
import ctypes
import math
import numbers
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cupaged.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from cupaged.handle import KernelHandle, ParameterLayout, Value, check_grid
from cupaged.pointers import DevicePtr
from cupaged.registry import Grid

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend, LoadedKernel

_RANGES = {
    "ptr": (0, 2**64 - 1),
    "u32": (0, 2**32 - 1),
    "u64": (0, 2**64 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
_U32_MAX = 2**32 - 1
_Error = TypeVar("_Error", bound=ArgumentError)
_FLOAT32_MAX = 3.4028235677973366e38  # from here on a double rounds to infinity
_BUFFER_BYTES = 4096  # the largest parameter space of a kernel
NO_OBJECTS: Mapping[int, Any] = MappingProxyType({})


class Launched(NamedTuple):
    """A launch that was made.

    Attributes:
        kernel: its handle.
        loaded: the backend's kernel.
        grid, block: of the launch.
        shared_mem: bytes of dynamic shared memory.
        cooperative, overlapping: as `GpuBackend.launch_packed` takes them.
        values: of all parameters, in their order.
        objects: parameter position -> what was given for that pointer, where that was no int.
    """

    kernel: KernelHandle
    loaded: LoadedKernel
    grid: Grid
    block: Grid
    shared_mem: int
    cooperative: bool
    overlapping: bool
    values: tuple[Value, ...]
    objects: Mapping[int, Any]


class _ThreadBuffer(threading.local):
    """One packing buffer a thread, and for each layout an array of pointers into it.

    A launch copies its parameters before it returns, so the next may overwrite them.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(_BUFFER_BYTES)
        self._keep = (ctypes.c_char * _BUFFER_BYTES).from_buffer(self.buffer)
        self._base = ctypes.addressof(self._keep)
        self._arrays: list[Any] = []
        self.pointers: dict[ParameterLayout, int] = {}  # addresses of the arrays of pointers

    def new_pointers(self, layout: ParameterLayout) -> int:
        """Address of the pointer array for a layout, made now."""
        array = (ctypes.c_void_p * max(1, len(layout.offsets)))(
            *[self._base + offset for offset in layout.offsets]
        )
        self._arrays.append(array)
        self.pointers[layout] = ctypes.addressof(array)
        return self.pointers[layout]


_thread = _ThreadBuffer()

# Called with kernel, argument values and stream before each launch in its context (checked mode sets it).
before_launch: ContextVar[Callable[[KernelHandle, Sequence[Value], int], None] | None] = ContextVar(
    "before_launch", default=None
)
_recorded: ContextVar[list[Launched] | None] = ContextVar("recorded", default=None)
_inspecting, _recording = before_launch.get, _recorded.get


@contextlib.contextmanager
def recording() -> Iterator[list[Launched]]:
    """The launches made in its context (this thread, or asynchronous task), in order; an outer one's too."""
    launches: list[Launched] = []
    outer, token = _recording(), _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)
        if outer is not None:
            outer += launches


def is_watched() -> bool:
    """Whether something must see each launch before it is made, so that none may skip the builder."""
    return _inspecting() is not None or _recording() is not None


def issue(launched: Launched, packed: bytes, stream: int, objects: Mapping[int, Any]) -> None:
    """Hand a launch with these parameters, which have been checked, to the backend."""
    kernel, loaded, grid, block, shared_mem, cooperative, overlapping, _, _ = launched
    thread = _thread
    thread.buffer[: len(packed)] = packed
    pointers = thread.pointers.get(kernel.layout) or thread.new_pointers(kernel.layout)
    kernel.gpu.launch_packed(
        loaded, grid, block, shared_mem, pointers, stream, objects, cooperative, overlapping
    )


class KernelLaunch:
    """Collects geometry and arguments of one launch; every method but `launch` returns the builder.

    >>> KernelLaunch(gpu, kernel).grid([4, 1, 1]).block([256, 1, 1]).arg_ptr(x).arg_u32(n).launch(stream)

    Arguments go in the order of the kernel's parameters, each at its natural size and alignment. A value
    that does not fit its kind raises at once; a wrong number or kind of arguments raises at `launch`,
    before anything runs, and names kernel and parameter.
    """

    # What most launches leave as it is.
    _grid: Grid | None = None
    _block: Grid | None = None
    _shared_mem = 0
    _objects: dict[int, Any] | None = None

    def __init__(self, gpu: GpuBackend, kernel: KernelHandle) -> None:
        if type(kernel) is not KernelHandle or kernel.gpu is not gpu:
            kind = ArgumentValueError if isinstance(kernel, KernelHandle) else ArgumentTypeError
            raise kind(f"kernel: got {kernel!r}, allowed is a handle made by this very backend")
        self._gpu = gpu
        self._kernel = kernel
        self._values: list[Value] = []
        self._kinds: list[str] = []

    def grid(self, dims: Sequence[int]) -> KernelLaunch:
        """Blocks in x, y, z. A kernel of the package knows its own; a different one raises at `launch`."""
        self._grid = _triple("grid", dims)
        return self

    def block(self, dims: Sequence[int]) -> KernelLaunch:
        """Threads in x, y, z. A kernel of the package knows its own; a different one raises at `launch`."""
        self._block = _triple("block", dims)
        return self

    def shared_mem(self, num_bytes: int) -> KernelLaunch:
        """Bytes of dynamic shared memory a block."""
        self._shared_mem = in_range("shared_mem", num_bytes, 0, _U32_MAX)
        return self

    def arg_ptr(self, pointer: Any) -> KernelLaunch:
        """A device pointer: int, `DevicePtr`, or an array that lives on this backend."""
        if type(pointer) is not int or pointer >> 64:  # bits beyond the 64th, or a sign
            pointer = self._checked_pointer(pointer)
        self._values.append(pointer)
        self._kinds.append("ptr")
        return self

    def arg_u32(self, value: int) -> KernelLaunch:
        """An unsigned 32-bit integer."""
        if type(value) is not int or value >> 32:
            value = self._checked_integer("u32", value)
        self._values.append(value)
        self._kinds.append("u32")
        return self

    def arg_u64(self, value: int) -> KernelLaunch:
        """An unsigned 64-bit integer."""
        if type(value) is not int or value >> 64:
            value = self._checked_integer("u64", value)
        self._values.append(value)
        self._kinds.append("u64")
        return self

    def arg_i32(self, value: int) -> KernelLaunch:
        """A signed 32-bit integer."""
        if type(value) is not int or (value >> 31) not in (0, -1):
            value = self._checked_integer("i32", value)
        self._values.append(value)
        self._kinds.append("i32")
        return self

    def arg_i64(self, value: int) -> KernelLaunch:
        """A signed 64-bit integer."""
        if type(value) is not int or (value >> 63) not in (0, -1):
            value = self._checked_integer("i64", value)
        self._values.append(value)
        self._kinds.append("i64")
        return self

    def arg_f32(self, value: float) -> KernelLaunch:
        """A float, rounded to 32 bits; infinities and NaN pass, a finite value beyond float32 does not."""
        if type(value) is not float:
            value = self._checked_float(value)
        if not -_FLOAT32_MAX < value < _FLOAT32_MAX and math.isfinite(value):
            raise self._bad_value("f32", value)
        self._values.append(value)
        self._kinds.append("f32")
        return self

    def launch(self, stream: Any) -> None:
        """Launch on a stream: an int handle, a CuPy stream, or an object with ``__cuda_stream__``.

        A kernel of the package with nothing to do (no tokens, no sequences) is not launched.

        Raises:
            ArgumentValueError, ArgumentTypeError: before anything runs.
            CompileError: the specialisation is new and does not compile.
            LaunchError: the driver refused. KernelFault: the emulator found a fault.
        """
        kernel, values = self._kernel, self._values
        if self._kinds != kernel.kinds:
            raise ArgumentTypeError(self._misfit(), kernel=kernel.entry)
        handle = stream if type(stream) is int and stream >= 0 else self._gpu.stream_handle(stream)
        plan = kernel.plan(values)
        grid, block = plan.grid, plan.block
        if grid is None or block is None:
            grid, block = self._own_geometry()
        else:
            if self._grid is not None or self._block is not None:
                self._check_geometry(grid, block)
            if plan.empty:
                return
            for index, multiple in kernel.pointer_multiples:
                if values[index] % multiple:
                    raise kernel.misaligned(index, values[index], multiple)
            if 0 in kernel.nulls.needed(values):
                kernel.nulls.check(values)
        inspect = _inspecting()
        if inspect is not None:
            inspect(kernel, values, handle)
        launched = Launched(
            kernel,
            plan.loaded,
            grid,
            block,
            self._shared_mem or plan.shared_mem,
            plan.cooperative,
            plan.overlapping,
            tuple(values),
            self._objects or NO_OBJECTS,
        )
        issue(launched, kernel.pack(*values), handle, launched.objects)
        recorded = _recording()
        if recorded is not None and inspect is None:
            recorded.append(launched)

    def _own_geometry(self) -> tuple[Grid, Grid]:
        """Grid and block of a kernel of the user's, which has only those given."""
        if self._grid is None or self._block is None:
            raise ArgumentValueError("this kernel needs both grid and block", kernel=self._kernel.entry)
        check_grid(self._kernel.entry, self._grid)
        return self._grid, self._block

    def _check_geometry(self, grid: Grid, block: Grid) -> None:
        for name, given, own in (("grid", self._grid, grid), ("block", self._block, block)):
            if given is not None and given != own:
                raise ArgumentValueError(
                    f"{name}: got {given}, but this kernel's own for these arguments is {own}; leave it out",
                    kernel=self._kernel.entry,
                )

    def _misfit(self) -> str:
        """How the arguments differ from the kernel's parameters."""
        parameters = self._kernel.parameters
        for position, (kind, parameter) in enumerate(zip(self._kinds, parameters, strict=False)):
            if kind != parameter.kind:
                return f"argument {position} is {kind}, but parameter {parameter.name!r} is {parameter.kind}"
        if len(self._kinds) > len(parameters):
            has = "no parameters"
            if parameters:
                has = f"{len(parameters)} parameters, the last of them {parameters[-1].name!r}"
            return f"got {len(self._kinds)} arguments, the kernel has {has}"
        missing = ", ".join(repr(p.name) for p in parameters[len(self._kinds) :])
        return f"got {len(self._kinds)} arguments of {len(parameters)}; missing: {missing}"

    def _name(self) -> str:
        position, parameters = len(self._values), self._kernel.parameters
        return parameters[position].name if position < len(parameters) else f"argument {position}"

    def _error(self, kind: type[_Error], detail: str) -> _Error:
        """An error about the argument that comes next."""
        return kind(f"{self._name()}: {detail}", kernel=self._kernel.entry)

    def _bad_value(self, kind: str, value: Any) -> ArgumentValueError:
        if kind == "f32":
            return self._error(ArgumentValueError, f"got {value}, which does not fit a float32")
        low, high = _RANGES[kind]
        return self._error(ArgumentValueError, f"got {value}, allowed for {kind} is {low} to {high}")

    def _checked_pointer(self, pointer: Any) -> int:
        """Address of a `DevicePtr` or an array, which the launch then keeps; an int is out of range."""
        if type(pointer) is DevicePtr:
            address = pointer.address
        elif type(pointer) is int:
            raise self._bad_value("ptr", pointer)
        else:
            self._kernel.check_array(len(self._values), pointer)
            try:
                address = self._gpu.pointer(pointer)
            except ArgumentError as error:
                raise self._error(type(error), error.detail) from None
            if not 0 <= address < 1 << 64:
                raise self._bad_value("ptr", address)
        if self._objects is None:
            self._objects = {}
        self._objects[len(self._values)] = pointer
        return address

    def _checked_integer(self, kind: str, value: Any) -> int:
        try:
            return in_range("value", value, *_RANGES[kind])
        except ArgumentError as error:
            raise self._error(type(error), error.detail) from None

    def _checked_float(self, value: Any) -> float:
        on_host = not _is_device_array(value)
        scalar = value.item() if on_host and getattr(value, "shape", None) == () else value
        if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real):
            raise self._error(ArgumentTypeError, f"got {_described(value)}, allowed is a real number")
        try:
            return float(scalar)
        except OverflowError:
            raise self._bad_value("f32", value) from None


def _triple(name: str, dims: Sequence[int]) -> Grid:
    try:
        values = list(dims)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {dims!r}, allowed are three dimensions") from None
    if len(values) != 3:
        raise ArgumentValueError(f"{name}: got {values}, allowed are exactly three dimensions")
    x, y, z = (in_range(name, v, 1, _U32_MAX) for v in values)
    return (x, y, z)


def _is_device_array(value: Any) -> bool:
    """True for what could only be read with a synchronisation."""
    return hasattr(type(value), "__cuda_array_interface__")


def _described(value: Any) -> str:
    name = type(value).__name__
    return f"a {name} on a device" if _is_device_array(value) else f"{value!r} ({name})"


def as_integer(name: str, value: Any) -> int:
    """An int, or a host scalar that is one (NumPy's included, bools not), as an int.

    Raises:
        ArgumentTypeError: it is none; the message names it.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or _is_device_array(value):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {_described(value)}, allowed is an integer") from None


def in_range(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`as_integer` of a value from least to most (None: or any larger); ArgumentValueError for another."""
    number = as_integer(name, value)
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise ArgumentValueError(f"{name}: got {number}, allowed is {allowed}")
    return number


def flag(name: str, value: Any) -> bool:
    """A bool as it is.

    Raises:
        ArgumentTypeError: anything else, which would count as True or False without a word.
    """
    if value is not True and value is not False:
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed are True and False")
    return bool(value)
