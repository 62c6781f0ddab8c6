"""Registers, shared memory and spills of the package's kernels, as the assembler in NVRTC reports them.

    python -m tools.cubin_info [--arch sm_90a] [--spec head_dim=128] ... [NAME ...]

NAME is a module or an entry; without one, every kernel is shown. The kernels of `Decoder` have formats by
number, ``--spec key_format=2 --spec value_format=2`` for NVFP4. Needs NVRTC, but neither a GPU nor any tool
of the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cupaged.backends.cupy import nvrtc
from cupaged.registry import KernelEntry, check_constant, entries, limits_of_capability
from cupaged.registry.decode import planned_spec
from cupaged.source import KernelSource, kernels_dir, read_parameters

DEFAULT_SPEC = planned_spec(head_dim=128, gqa_ratio=4, block_size=16, num_kv_heads=8, joined=1)
VERBOSE = "--ptxas-options=-v"


@dataclass(frozen=True)
class Usage:
    """What one thread or block of a kernel takes.

    Attributes:
        entry: name of the kernel.
        registers: 32-bit registers a thread.
        shared: bytes of static shared memory a block.
        stack: bytes of stack a thread.
        spill_stores: bytes that a thread stores because registers ran out.
        spill_loads: bytes that it loads back.
    """

    entry: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


_PROPERTIES = re.compile(
    r"Function properties for (?P<entry>\S+)\s+.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"\s+ptxas info\s*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_log(log: str) -> dict[str, Usage]:
    """Usage of each entry in the log of a compilation with ``--ptxas-options=-v``.

    Raises:
        ValueError: the log does not tell.
    """
    usages = {}
    for match in _PROPERTIES.finditer(log):
        shared = _SHARED.search(match["rest"])
        usages[match["entry"]] = Usage(
            match["entry"],
            int(match["registers"]),
            int(shared[1]) if shared else 0,
            int(match["stack"]),
            int(match["stores"]),
            int(match["loads"]),
        )
    if not usages:
        raise ValueError(f"no kernel in the assembler's log: {log!r}")
    return usages


def constants_of(entry: KernelEntry, spec: Mapping[str, int], arch: str) -> dict[str, int]:
    """All constants of an entry, as shaped for an architecture, with those of `spec` that it takes.

    Raises:
        ArgumentValueError: the architecture has no room for it.
    """
    limits = limits_of_capability(int("".join(filter(str.isdigit, arch))), num_sms=1)
    return entry.constants({name: spec[name] for name in entry.spec_names}, limits)


def source_of(entry: KernelEntry, spec: Mapping[str, int], arch: str) -> KernelSource:
    """The source of an entry with the constants of `constants_of`."""
    constants = constants_of(entry, spec, arch)
    path = kernels_dir() / f"{entry.module}.cu"
    parameters = read_parameters(path, entry.entry, path.stat().st_mtime_ns)
    return KernelSource(path, entry.entry, parameters, entry.defines(constants))


def usage_of(source: KernelSource, arch: str) -> dict[str, Usage]:
    """Usage of every entry of a source, compiled for an architecture.

    Raises:
        CompileError: it does not compile.
    """
    return parse_log(nvrtc.compile_with_log(source, nvrtc.Target(arch), VERBOSE)[1])


def _rows(names: Sequence[str], spec: Mapping[str, int], arch: str) -> Iterator[Usage]:
    for entry in entries():
        if names and entry.module not in names and entry.entry not in names:
            continue
        yield usage_of(source_of(entry, spec, arch), arch)[entry.entry]


def _constant(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in DEFAULT_SPEC:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed are {', '.join(DEFAULT_SPEC)}, as NAME=VALUE"
        )
    try:
        check_constant(name, int(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return name, int(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, one line a kernel."""
    parser = argparse.ArgumentParser(description="Registers, shared memory and spills of kernels.")
    known = sorted({name for entry in entries() for name in (entry.module, entry.entry)})
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules or entries; all of them by default")
    parser.add_argument("--arch", default="sm_90a", help="target, as sm_90a")
    parser.add_argument("--spec", type=_constant, action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
    print(f"{'entry':36} {'registers':>9} {'shared':>7} {'stack':>6} {'stores':>7} {'loads':>6}")
    for usage in _rows(options.names, DEFAULT_SPEC | dict(options.spec), options.arch):
        print(
            f"{usage.entry:36} {usage.registers:9} {usage.shared:7} {usage.stack:6} "
            f"{usage.spill_stores:7} {usage.spill_loads:6}"
        )


if __name__ == "__main__":
    main()
