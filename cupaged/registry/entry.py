"""What a kernel entry is, and the device facts that its constants and geometry depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cupaged.registry.terms import named

Grid = tuple[int, int, int]
Scalars = Mapping[str, int]
Constants = Mapping[str, int]

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535

# Allowed array dtypes by what a pointer parameter holds. Narrow formats come typed or as raw bits.
DTYPES: dict[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "uint16"),
    "fp8": ("float8_e4m3fn", "uint8"),
    "nvfp4": ("uint8",),
    "bytes": ("uint8", "float8_e4m3fn", "uint16", "bfloat16"),  # a pool of any format
    "half": ("bfloat16", "uint16", "float16"),  # q and output; which of them, the specialisation says
    "f16": ("float16",),
    "f32": ("float32",),
    "u32": ("uint32",),
    "i32": ("int32",),
    "i64": ("int64",),
}


_AS_BITS = {("bfloat16", "uint16"): "BF16", ("float8_e4m3fn", "uint8"): "E4M3"}


def dtype_names(allowed: Sequence[str]) -> str:
    """Dtypes for a message, with what unsigned integers among them stand for."""
    bits = [
        f"{raw} ({name} as bits)" for (typed, raw), name in _AS_BITS.items() if {typed, raw} <= {*allowed}
    ]
    told = {text.split()[0]: text for text in bits}
    return ", ".join(told.get(dtype, dtype) for dtype in allowed)


@dataclass(frozen=True)
class DeviceLimits:
    """What kernels are shaped by.

    Attributes:
        num_sms: streaming multiprocessors.
        shared_per_block: most shared memory a block may use, in bytes.
        shared_per_sm: shared memory of a multiprocessor, in bytes.
        bulk_copies: whether it has ``cp.async.bulk`` and transaction barriers (sm_90 and later).
        capability: compute capability, major * 10 + minor; 0 where there is none.
        cooperative_threads: most threads of a co-operative launch; None where only the room on the
            multiprocessors limits them.
    """

    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    bulk_copies: bool
    capability: int = 0
    cooperative_threads: int | None = None


# Shared memory by compute capability: (a block, a multiprocessor), in KiB.
_SHARED_KIB = {80: (163, 164), 86: (99, 100), 87: (163, 164), 89: (99, 100), 90: (227, 228), 100: (227, 228),
               103: (227, 228), 120: (99, 100), 121: (99, 100)}  # fmt: skip


def limits_of_capability(capability: int, num_sms: int) -> DeviceLimits:
    """Limits of a compute capability (major * 10 + minor), for compiling without a device."""
    known = max((c for c in _SHARED_KIB if c <= capability), default=80)
    block, sm = _SHARED_KIB[known]
    return DeviceLimits(num_sms, block * 1024, sm * 1024, capability >= 90, capability)


def unknown_device() -> DeviceLimits:
    """A device of which nothing is known: expressions name its multiprocessors ``num_sms``."""
    return replace(limits_of_capability(0, 0), num_sms=named("num_sms"))


def grid_of_two(values: tuple[int, ...], constants: Constants, limits: DeviceLimits) -> Grid:
    """A block for each pair of two scalars."""
    return (values[0], values[1], 1)


@dataclass(frozen=True)
class KernelEntry:
    """One entry point of one module.

    "Constants" below are a specialisation's spec with what is derived from it.

    Attributes:
        module: stem of the ``.cu`` file.
        entry: function name.
        spec_names: compile-time constants that callers may pin; each is the macro ``SPEC_<NAME>``.
        specialise: spec from the launch's scalars; raises ArgumentValueError for what is unsupported. None
            where a handle must pin every constant.
        derived: further constants that follow from the spec and the device (never pinned).
        scalar_names: the scalars that `specialise` reads.
        block: threads from the constants.
        grid_names: the scalars that `grid` reads.
        grid: grid from the scalars, the constants and the device's `num_sms`; a zero in it means that there
            is nothing to do. It calculates with ``+ - * //``, `smaller`, `larger` and `div_ceil`, so that
            `grid_expressions` can ask it with terms.
        holds: what each pointer parameter holds (a key of `DTYPES`); all are checked if given as arrays.
        multiples: parameter -> what its value must be a multiple of (bytes for pointers).
        strided: pointer parameters that may have any stride along their first axis.
        nullable: pointer parameters that may be null: where one of the arguments named is 0, or always where
            none is named.
        shared_mem: bytes of dynamic shared memory from the constants.
        cooperative: its blocks wait for each other, so all must be resident at once.
        overlapping: it waits by itself for the kernel before, and may be launched while that one ends.
    """

    module: str
    entry: str
    spec_names: tuple[str, ...]
    specialise: Callable[[Scalars], dict[str, int]] | None
    scalar_names: tuple[str, ...]
    block: Callable[[Constants], Grid]
    grid_names: tuple[str, ...]
    grid: Callable[[tuple[int, ...], Constants, DeviceLimits], Grid]
    holds: Mapping[str, str]
    multiples: Mapping[str, int] = field(default_factory=dict)
    derived: Callable[[Constants, DeviceLimits], dict[str, int]] = lambda spec, limits: {}
    strided: frozenset[str] = frozenset()
    nullable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared_mem: Callable[[Constants], int] = lambda constants: 0
    cooperative: bool = False
    overlapping: bool = False

    def constants(self, spec: Constants, limits: DeviceLimits) -> dict[str, int]:
        """Every compile-time constant of a specialisation."""
        return {**spec, **self.derived(spec, limits)}

    def grid_expressions(self, constants: Constants) -> tuple[str, str, str]:
        """`grid` as integer expressions of the scalars' names and ``num_sms``."""
        x, y, z = self.grid(tuple(map(named, self.grid_names)), constants, unknown_device())
        return str(x), str(y), str(z)

    @staticmethod
    def defines(constants: Constants) -> tuple[tuple[str, str], ...]:
        """Macro definitions of a specialisation."""
        return tuple((f"SPEC_{name.upper()}", str(value)) for name, value in constants.items())
