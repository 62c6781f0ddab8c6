"""Compiling kernels with NVRTC, through CuPy's binding of it. Works without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupaged.backends.cupy import installation
from cupaged.errors import BackendUnavailableError, CompileError
from cupaged.source import KernelSource

# Architectures that every kernel must compile for (CI checks them without a GPU).
CHECKED_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120f")

OLDEST = 80  # compute capability, as major * 10 + minor
_FIXED_OPTIONS = ("-std=c++17", "-lineinfo")
# Chips whose code may be specific to a family (first chip -> all chips that run it) or to themselves.
# These suffixes unlock instructions; the families' came with NVRTC 12.9, and with it 103 and 121.
_FAMILIES = {100: (100, 103), 120: (120, 121)}
_FAMILY_MARKS = (103, 121)
_CHIP_SPECIFIC = (90, 100, 103, 120, 121)
_FIRST_WITH_BULK_COPIES = 90


@dataclass(frozen=True)
class Target:
    """What to ask NVRTC for.

    Attributes:
        arch: ``sm_NN`` (machine code) or ``compute_NN`` (PTX, which the driver compiles at load).
    """

    arch: str

    @property
    def is_ptx(self) -> bool:
        """True for PTX."""
        return self.arch.startswith("compute_")

    @property
    def has_bulk_copies(self) -> bool:
        """True where kernels may use bulk copies: a matter of the target, which may be older than the GPU."""
        return int(self.arch.partition("_")[2].rstrip("af")) >= _FIRST_WITH_BULK_COPIES


def choose_target(capability: tuple[int, int], supported: tuple[int, ...]) -> Target:
    """Best target for a GPU among what this NVRTC supports.

    Machine code where NVRTC knows the chip, its family or an earlier chip of the same generation; otherwise
    PTX of the newest it knows, for the driver to compile.

    Args:
        capability: compute capability (major, minor).
        supported: compute capabilities NVRTC supports, as major * 10 + minor.

    Raises:
        BackendUnavailableError: NVRTC supports nothing this GPU could run.
    """
    major, minor = capability
    wanted = major * 10 + minor
    for family, chips in _FAMILIES.items():
        if wanted in chips and family in supported and any(mark in supported for mark in _FAMILY_MARKS):
            return Target(f"sm_{family}f")
    older = [arch for arch in supported if OLDEST <= arch <= wanted]
    generation = [arch for arch in older if arch // 10 == major]
    if generation:
        best = max(generation)
        return Target(f"sm_{best}a" if best == wanted and best in _CHIP_SPECIFIC else f"sm_{best}")
    if older:
        return Target(f"compute_{max(older)}")
    if wanted < OLDEST:
        mend = installation.EMULATOR_HINT
    else:
        mend = f"NVRTC is too old for it; install a newer one with: {installation.install_command()}"
    raise BackendUnavailableError(
        f"this GPU has compute capability {major}.{minor}; cupaged needs 8.0 or later, and NVRTC "
        f"supports {', '.join(map(str, supported))}; {mend}"
    )


def binding() -> Any:
    """CuPy's NVRTC binding.

    Raises:
        BackendUnavailableError: CuPy or NVRTC is missing; the message has the command that installs it.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc
    except Exception as error:  # a damaged installation fails in any way
        raise installation.import_problem(error, installation.compiler_advice()) from error
    try:
        nvrtc.getVersion()
    except Exception as error:
        raise installation.nvrtc_problem(error, installation.compiler_advice()) from error
    return nvrtc


def version_text() -> str:
    """NVRTC's version, as in ``12.9``."""
    return ".".join(map(str, binding().getVersion()))


def supported_archs() -> tuple[int, ...]:
    """Compute capabilities this NVRTC can compile for."""
    return tuple(binding().getSupportedArchs())


def options(source: KernelSource, target: Target) -> tuple[str, ...]:
    """NVRTC options for a kernel. Denormals are kept: nothing asks for -ftz."""
    return (
        *_FIXED_OPTIONS,
        f"-arch={target.arch}",
        *(f"-I{folder}" for folder in source.include_dirs),
        *(f"-D{name}={value}" for name, value in source.defines),
    )


def compile_source(source: KernelSource, target: Target) -> bytes:
    """Machine code (a cubin) or PTX of a kernel's module.

    Raises:
        CompileError: with NVRTC's log.
    """
    return compile_with_log(source, target)[0]


def compile_with_log(source: KernelSource, target: Target, *more_options: str) -> tuple[bytes, str]:
    """`compile_source` with further options, and what NVRTC had to say."""
    nvrtc = binding()
    arguments = (*options(source, target), *more_options)
    program = nvrtc.createProgram(source.path.read_text(), str(source.path), (), ())
    try:
        nvrtc.compileProgram(program, arguments)
        code = nvrtc.getPTX(program) if target.is_ptx else nvrtc.getCUBIN(program)
        code = code.encode() if isinstance(code, str) else bytes(code)
        return code, _log(nvrtc, program)
    except nvrtc.NVRTCError as error:
        log = _log(nvrtc, program)
        if "libnvrtc-builtins" in log:  # half of NVRTC is missing
            raise installation.nvrtc_problem(RuntimeError(log)) from None
        raise CompileError(
            f"NVRTC {version_text()} could not compile {source.path.name} for {target.arch}: {error}",
            log=log,
            command=f"nvrtc {' '.join(arguments)} {source.path}",
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc: Any, program: int) -> str:
    """What NVRTC printed; its text ends with a zero byte, which is no part of it."""
    return str(nvrtc.getProgramLog(program)).replace("\0", "")
