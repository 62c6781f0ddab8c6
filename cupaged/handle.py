"""Kernel handles: a kernel family of one backend, and its specialisations."""

from __future__ import annotations

import functools
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
    check_constant,
    find,
)
from cupaged.source import KernelSource, Parameter, kernels_dir, read_parameters

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend, LoadedKernel

_STRUCT_CODES = {"ptr": "Q", "u32": "I", "i32": "i", "u64": "Q", "i64": "q", "f32": "f"}
_SIZES = {"ptr": 8, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f32": 4}
Value = int | float


class ParameterLayout:
    """Where each parameter lies in a packed buffer: natural size and alignment, in order."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.offsets: list[int] = []
        codes = ["="]
        position = 0
        for parameter in parameters:
            size = _SIZES[parameter.kind]
            padding = -position % size
            codes.append("x" * padding + _STRUCT_CODES[parameter.kind])
            self.offsets.append(position + padding)
            position += padding + size
        self.size = position
        self._struct = struct.Struct("".join(codes))

    def pack_into(self, buffer: bytearray, values: Sequence[Value]) -> None:
        """Write the values; their kinds and ranges have been checked."""
        self._struct.pack_into(buffer, 0, *values)


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


class KernelHandle:
    """A kernel of one backend: for the package's own, a family that picks its specialisation at launch.

    Made by ``gpu.kernel(module, entry)``. Compile-time constants given there are pinned: a launch whose
    scalars ask for others raises.

    Attributes:
        parameters: the entry's parameters, in order.
        layout: how they are packed.
        kinds: their kinds, in order.
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
        self._pinned = pinned
        self._index = {p.name: i for i, p in enumerate(self.parameters)}
        self._by_scalars: dict[tuple[Value, ...], Specialisation] = {}
        self._by_spec: dict[tuple[tuple[str, int], ...], Specialisation] = {}
        self._key_of: tuple[int, ...] = ()
        self.multiples: tuple[tuple[int, int], ...] = ()
        if known is not None:
            self._key_of = tuple(self._index[name] for name in known.scalar_names)
            self.multiples = tuple((self._index[name], m) for name, m in known.multiples.items())
            self._check_constants(known, pinned)

    def __repr__(self) -> str:
        pinned = "".join(f", {k}={v}" for k, v in self._pinned.items())
        return f"<KernelHandle {self.path.stem}:{self.entry} on {self.gpu.name}{pinned}>"

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
                raise ArgumentValueError(f"{self.entry}: got {sorted(spec)}, macros are given to gpu.kernel")
            return self.select([])
        self._check_constants(self.known, spec)
        full = {**self._pinned, **spec}
        self._check_pinned(full)
        if set(full) != set(self.known.spec_names):
            raise ArgumentValueError(
                f"{self.entry}: got constants {sorted(full)}, needed are {sorted(self.known.spec_names)}"
            )
        return self._specialise({name: int(full[name]) for name in self.known.spec_names})

    def _check_constants(self, known: KernelEntry, given: Mapping[str, int | str]) -> None:
        unknown = set(given) - set(known.spec_names)
        if unknown:
            allowed = ", ".join(known.spec_names) or "none"
            names = ", ".join(sorted(unknown))
            raise ArgumentValueError(
                f"{self.entry}: unknown compile-time constants {names}; allowed: {allowed}"
            )
        for name, value in given.items():
            check_constant(name, value)

    def _check_pinned(self, spec: Mapping[str, int | str]) -> None:
        for name, pinned in self._pinned.items():
            if spec[name] != pinned:
                raise ArgumentValueError(
                    f"{self.entry}: {name} is pinned to {pinned}, but this launch asks for {spec[name]}"
                )

    def select(self, values: Sequence[Value]) -> Specialisation:
        """The specialisation for these packed-order argument values; compiled if it is new."""
        key = tuple([values[i] for i in self._key_of])
        found = self._by_scalars.get(key)
        if found is None:
            found = self._by_scalars[key] = self._select_new(values)
        return found

    def _select_new(self, values: Sequence[Value]) -> Specialisation:
        if self.known is None:
            defines = tuple((name, str(value)) for name, value in self._pinned.items())
            source = KernelSource(self.path, self.entry, self.parameters, defines)
            return Specialisation(self.gpu.load(source))
        scalars = {name: int(values[self._index[name]]) for name in self.known.scalar_names}
        spec = self.known.specialise(scalars)
        self._check_pinned(spec)
        return self._specialise(spec)

    def _specialise(self, spec: dict[str, int]) -> Specialisation:
        known = self.known
        if known is None:
            raise ArgumentValueError(f"{self.entry}: not a kernel of the package")
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
        allowed = DTYPES[self.known.holds[name]]
        if str(dtype) not in allowed:
            raise ArgumentTypeError(f"{name}: got dtype {dtype}, allowed: {', '.join(allowed)}")
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
        """
        if isinstance(module, Path) or module.endswith(".cu"):
            return KernelHandle(self, Path(module).resolve(), entry, None, dict(spec))
        known = find(module, entry)
        return KernelHandle(self, kernels_dir() / f"{module}.cu", entry, known, dict(spec))


def check_grid(entry: str, grid: Grid) -> None:
    """Raise ArgumentValueError where a grid exceeds what CUDA can launch."""
    x, y, z = grid
    if x > MAX_GRID_X or y > MAX_GRID_YZ or z > MAX_GRID_YZ:
        raise ArgumentValueError(
            f"{entry}: got grid {grid}, allowed is at most ({MAX_GRID_X}, {MAX_GRID_YZ}, {MAX_GRID_YZ})"
        )
