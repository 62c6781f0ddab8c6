"""Kernel handles: a kernel family of one backend, and its specialisations."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.errors import ArgumentTypeError, ArgumentValueError, KernelSourceError
from cupaged.registry import (
    DTYPES,
    MAX_GRID_X,
    MAX_GRID_YZ,
    Constants,
    Grid,
    KernelEntry,
    NullPointers,
    check_constant,
    dtype_names,
    find,
)
from cupaged.source import KernelSource, Parameter, kernels_dir, read_parameters

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend, LoadedKernel

_STRUCT_CODES = {"ptr": "Q", "u32": "I", "i32": "i", "u64": "Q", "i64": "q", "f32": "f"}
PARAMETER_BYTES = {"ptr": 8, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4}
Value = int | float


class ParameterLayout:
    """Where each parameter lies in a packed buffer: natural size and alignment, in order."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.offsets: list[int] = []
        codes = ["="]
        position = 0
        for parameter in parameters:
            size = PARAMETER_BYTES[parameter.kind]
            padding = -position % size
            codes.append("x" * padding + _STRUCT_CODES[parameter.kind])
            self.offsets.append(position + padding)
            position += padding + size
        self.size = position
        self.struct = struct.Struct("".join(codes))

    def pack_into(self, buffer: bytearray, values: Sequence[Value]) -> None:
        """Write the values; their kinds and ranges have been checked."""
        self.struct.pack_into(buffer, 0, *values)


@functools.lru_cache(maxsize=256)
def _layout(parameters: tuple[Parameter, ...]) -> ParameterLayout:
    """One layout for all handles of a kernel: every thread keeps pointers for each layout it has met."""
    return ParameterLayout(parameters)


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel with its geometry.

    Attributes:
        loaded: the backend's kernel.
        block: threads, or None for kernels of the user's own.
        grid: grid from the launch's argument values, or None for kernels of the user's own.
        shared_mem: bytes of dynamic shared memory the kernel itself asks for.
        cooperative: its blocks must all be resident at once.
        overlapping: it may be launched while the kernel before ends.
        constants: its compile-time constants.
    """

    loaded: LoadedKernel
    block: Grid | None = None
    grid: Callable[[Sequence[Value]], Grid] | None = None
    shared_mem: int = 0
    cooperative: bool = False
    overlapping: bool = False
    constants: Constants = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What the scalars of a launch decide, checked once for each set of them.

    Attributes:
        loaded: the backend's kernel.
        grid: blocks, or None for kernels of the user's own.
        block: threads, or None for kernels of the user's own.
        shared_mem: bytes of dynamic shared memory the kernel itself asks for.
        cooperative: its blocks must all be resident at once.
        overlapping: it may be launched while the kernel before ends.
        empty: there is nothing to do.
    """

    loaded: LoadedKernel
    grid: Grid | None = None
    block: Grid | None = None
    shared_mem: int = 0
    cooperative: bool = False
    overlapping: bool = False
    empty: bool = False


_MAX_PLANS = 4096  # of a handle; a plan is a few hundred bytes


class KernelHandle:
    """A kernel of one backend: for the package's own, a family that picks its specialisation at launch.

    Made by ``gpu.kernel(module, entry)``. Compile-time constants given there are pinned: a launch whose
    scalars ask for others raises.

    A handle of a kernel of your own knows its parameters' kinds and nothing of what they point to: arrays
    given for its pointers may have any dtype, shape and strides, and only their addresses are taken.

    Attributes:
        parameters: the entry's parameters, in order.
        layout: how they are packed.
        kinds: their kinds, in order.
        pack: all arguments as the driver takes them, in one run of bytes; their kinds and ranges are checked.
        pointer_multiples: (position, bytes that the address must be a multiple of).
        calls: what the package's launchers keep of calls with this handle, by launcher.
        nulls: which pointers may be null.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        path: Path,
        entry: str,
        known: KernelEntry | None,
        pinned: dict[str, int | str],
    ) -> None:
        self.gpu = gpu
        self.path = path
        self.entry = entry
        self.known = known
        try:
            self.parameters = read_parameters(path, entry, path.stat().st_mtime_ns)
        except OSError as error:
            raise KernelSourceError(f"{path}: cannot be read ({error.strerror})") from None
        self.layout = _layout(self.parameters)
        self.kinds = [p.kind for p in self.parameters]
        self.pack = self.layout.struct.pack
        self._pinned = pinned
        self._index = {p.name: i for i, p in enumerate(self.parameters)}
        self._by_spec: dict[tuple[tuple[str, int], ...], Specialisation] = {}
        self._plans: dict[Any, LaunchPlan] = {}
        self.calls: dict[Any, Any] = {}
        self._accepted_dtypes: set[tuple[int, Any]] = set()
        self._plan_key: Callable[[Sequence[Value]], Any] = _picker(())
        self._scalar_multiples: tuple[tuple[int, int], ...] = ()
        self.pointer_multiples: tuple[tuple[int, int], ...] = ()
        self.nulls = NullPointers(self.parameters, None if known is None else known.nullable)
        if known is not None:
            multiples = [(self._index[name], multiple) for name, multiple in known.multiples.items()]
            self.pointer_multiples = tuple(m for m in multiples if self.kinds[m[0]] == "ptr")
            self._scalar_multiples = tuple(m for m in multiples if self.kinds[m[0]] != "ptr")
            names = (*known.scalar_names, *known.grid_names)
            deciding = {self._index[name] for name in names} | {i for i, _ in self._scalar_multiples}
            self._plan_key = _picker(tuple(sorted(deciding)))
            self._check_constants(known, pinned)

    def __repr__(self) -> str:
        pinned = "".join(f", {k}={v}" for k, v in self._pinned.items())
        return f"<KernelHandle {self.path.stem}:{self.entry} on {self.gpu.name}{pinned}>"

    @property
    def pinned(self) -> Mapping[str, int | str]:
        """The compile-time constants given when it was made."""
        return self._pinned

    @property
    def owns_geometry(self) -> bool:
        """True for the package's kernels, whose grid and block follow from the launch's scalars."""
        return self.known is not None

    def warm(self, **spec: int) -> Specialisation:
        """Compile and load a specialisation ahead of its first launch (as inside a graph capture).

        Args:
            **spec: every compile-time constant of the kernel that is not pinned already.

        Raises:
            ArgumentValueError: a constant is missing or unknown.
            CompileError: the kernel does not compile.
        """
        if self.known is None:
            if spec:
                raise ArgumentValueError(
                    f"got {sorted(spec)}, macros are given to gpu.kernel", kernel=self.entry
                )
            return self._own()
        self._check_constants(self.known, spec)
        full = {**self._pinned, **spec}
        self._check_pinned(full)
        if set(full) != set(self.known.spec_names):
            raise ArgumentValueError(
                f"got constants {sorted(full)}, needed are {sorted(self.known.spec_names)}", kernel=self.entry
            )
        return self._specialise({name: int(full[name]) for name in self.known.spec_names})

    def _check_constants(self, known: KernelEntry, given: Mapping[str, int | str]) -> None:
        unknown = set(given) - set(known.spec_names)
        if unknown:
            allowed = ", ".join(known.spec_names) or "none"
            names = ", ".join(sorted(unknown))
            raise ArgumentValueError(
                f"unknown compile-time constants {names}; allowed: {allowed}", kernel=self.entry
            )
        for name, value in given.items():
            check_constant(name, value)

    def _check_pinned(self, spec: Mapping[str, int | str]) -> None:
        for name, pinned in self._pinned.items():
            if spec[name] != pinned:
                raise ArgumentValueError(
                    f"{name} is pinned to {pinned}, but this launch asks for {spec[name]}", kernel=self.entry
                )

    def plan(self, values: Sequence[Value]) -> LaunchPlan:
        """What these packed-order argument values decide; their kinds and ranges have been checked.

        Raises:
            ArgumentValueError: a shape, a grid or a scalar's multiple that is not supported.
            CompileError: the specialisation is new and does not compile.
        """
        key = self._plan_key(values)
        found = self._plans.get(key)
        if found is None:
            found = self._new_plan(values)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = found
        return found

    def _new_plan(self, values: Sequence[Value]) -> LaunchPlan:
        chosen = self.select(values)
        if chosen.grid is None or chosen.block is None:
            return LaunchPlan(chosen.loaded)
        grid = chosen.grid(values)
        check_grid(self.entry, grid)
        empty = 0 in grid
        for index, multiple in () if empty else self._scalar_multiples:
            if values[index] % multiple:
                raise self.misaligned(index, values[index], multiple)
        return LaunchPlan(
            chosen.loaded,
            grid,
            chosen.block,
            chosen.shared_mem,
            chosen.cooperative,
            chosen.overlapping,
            empty,
        )

    def misaligned(self, index: int, value: Value, multiple: int) -> ArgumentValueError:
        """The error for an argument that is no multiple of what its kernel asks for."""
        parameter = self.parameters[index]
        if parameter.kind == "ptr":
            got, unit = f"{value:#x}", "address, in bytes,"
        else:
            got, unit = str(value), "value"
        return ArgumentValueError(f"{parameter.name}: got {got}, its {unit} must be a multiple of {multiple}")

    def select(self, values: Sequence[Value]) -> Specialisation:
        """The specialisation for these packed-order argument values; compiled if it is new."""
        if self.known is None:
            return self._own()
        if self.known.specialise is None:
            return self.warm()
        scalars = {name: int(values[self._index[name]]) for name in self.known.scalar_names}
        spec = self.known.specialise(scalars)
        self._check_pinned(spec)
        return self._specialise(spec)

    def _own(self) -> Specialisation:
        """The one specialisation of a kernel of the user's."""
        found = self._by_spec.get(())
        if found is None:
            defines = tuple((name, str(value)) for name, value in self._pinned.items())
            source = KernelSource(self.path, self.entry, self.parameters, defines)
            found = self._by_spec[()] = Specialisation(self.gpu.load(source))
        return found

    def grid_of(self, **scalars: int) -> Grid:
        """Grid of a launch with these scalars, all that the registry's entry reads; nothing is compiled."""
        known = self.known
        if known is None:
            raise ArgumentValueError("not a kernel of the package", kernel=self.entry)
        limits = self.gpu.limits
        spec = self._pinned if known.specialise is None else known.specialise(scalars)
        constants = known.constants({name: int(spec[name]) for name in known.spec_names}, limits)
        return known.grid(tuple(scalars[name] for name in known.grid_names), constants, limits)

    def _specialise(self, spec: dict[str, int]) -> Specialisation:
        known = self.known
        if known is None:
            raise ArgumentValueError("not a kernel of the package", kernel=self.entry)
        key = tuple(spec.items())
        found = self._by_spec.get(key)
        if found is None:
            limits = self.gpu.limits
            constants = known.constants(spec, limits)
            source = KernelSource(self.path, self.entry, self.parameters, known.defines(constants))
            indices = tuple(self._index[name] for name in known.grid_names)
            grid = known.grid

            def grid_of(values: Sequence[Value]) -> Grid:
                return grid(tuple([int(values[i]) for i in indices]), constants, limits)

            found = self._by_spec[key] = Specialisation(
                self.gpu.load(source),
                known.block(constants),
                grid_of,
                known.shared_mem(constants),
                known.cooperative,
                known.overlapping,
                constants,
            )
        return found

    def check_array(self, position: int, array: Any) -> None:
        """Dtype and contiguity of an array object given for a pointer parameter.

        Raises:
            ArgumentTypeError: wrong dtype; the message names parameter, dtype and what is allowed.
            ArgumentValueError: strides that the kernel cannot follow.
        """
        dtype = getattr(array, "dtype", None)
        if self.known is None or position >= len(self.parameters) or dtype is None:
            return
        name = self.parameters[position].name
        if name not in self.known.holds or isinstance(array, np.generic):
            return  # not a pointer, which `launch` reports; or an address as a NumPy integer
        if (position, dtype) not in self._accepted_dtypes:  # a dtype's name is slow to make
            allowed = DTYPES[self.known.holds[name]]
            if str(dtype) not in allowed:
                raise ArgumentTypeError(f"{name}: got dtype {dtype}, allowed: {dtype_names(allowed)}")
            self._accepted_dtypes.add((position, dtype))
        strides, shape = getattr(array, "strides", None), array.shape
        if strides is None or 0 in shape:
            return  # an array type without strides is contiguous; an empty array has no elements to reach
        expected = dtype.itemsize
        for axis in range(len(shape) - 1, -1, -1):
            free = axis == 0 and len(shape) > 1 and name in self.known.strided and strides[0] >= expected
            if shape[axis] > 1 and strides[axis] != expected and not free:
                raise ArgumentValueError(
                    f"{name}: got strides {strides} (bytes) for shape {shape}, allowed is C order"
                    + (" with any larger stride along the first axis" if name in self.known.strided else "")
                )
            expected *= shape[axis]


def _picker(indices: tuple[int, ...]) -> Callable[[Sequence[Value]], Any]:
    """A function that takes the values at these positions, as something hashable."""
    return operator.itemgetter(*indices) if indices else lambda values: ()


class HandleFactory:
    """Gives a backend its ``kernel`` method."""

    def kernel(self: Any, module: str | Path, entry: str, **spec: int | str) -> KernelHandle:
        """Handle of a kernel.

        Args:
            module: stem of one of the package's ``.cu`` files, or a path of a ``.cu`` file of your own.
            entry: name of the ``extern "C" __global__`` function.
            **spec: compile-time constants to pin. For a file of your own: macros, passed as ``-D``.

        Raises:
            KernelSourceError: no such kernel, or parameters that launches do not support.
            ArgumentValueError: an unknown constant.
            ArgumentTypeError: names that are none.
        """
        for name, given in (("module", module), ("entry", entry)):
            if not isinstance(given, (str, Path)):
                raise ArgumentTypeError(f"{name}: got {given!r}, allowed is a name")
        if isinstance(module, Path) or module.endswith(".cu"):
            return KernelHandle(self, Path(module).resolve(), entry, None, dict(spec))
        known = find(module, entry)
        return KernelHandle(self, kernels_dir() / f"{module}.cu", entry, known, dict(spec))


def check_grid(entry: str, grid: Grid) -> None:
    """Raise ArgumentValueError where a grid exceeds what CUDA can launch."""
    x, y, z = grid
    if x > MAX_GRID_X or y > MAX_GRID_YZ or z > MAX_GRID_YZ:
        raise ArgumentValueError(
            f"got grid {grid}, allowed is at most ({MAX_GRID_X}, {MAX_GRID_YZ}, {MAX_GRID_YZ})", kernel=entry
        )
