"""What every specialisation of the package's kernels takes, compiled as for a GPU; none is needed.

    python -m tools.cubin_table [--arch sm_90a] [--jobs 2] [--json FILE] [NAME ...]

NAME is a module or an entry; by default all are compiled, over the shapes of the benchmarks and of usual
models, and `Decoder`'s kernels also over what else it can be asked for. The exit status is 1 where registers
are spilled to local memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.loads import LONG, TABLE, variants
from cupaged.backends.cupy import nvrtc
from cupaged.registry import KernelEntry, entries, find, limits_of_capability
from cupaged.registry.decode import is_joined, planned_spec
from cupaged.registry.ring import FORMATS
from cupaged.registry.rules import LATENCY_LEVELS
from tools import cubin_info

HEAD_DIMS, KV_HEADS, RATIOS = (64, 128, 256), (1, 2, 4, 8), (1, 4, 8, 16)
BLOCK_SIZE = 16
_SECTION_PADDING = 256  # bytes between the sections of an NVFP4 block that is not joined
_BF16, _FP8, _NVFP4 = range(len(FORMATS))

# What the kernels of `Decoder` can be asked for beside one query token over one BF16 format.
FEATURES: tuple[dict[str, int], ...] = (
    {"query_tokens": 4, "causal": 1},
    {"query_tokens": 8, "key_format": _NVFP4, "value_format": _NVFP4},
    {"key_format": _FP8, "value_format": _NVFP4},
    {"key_format": _NVFP4, "value_format": _BF16},
    {"heads_first": 1},
    {"heads_first": 1, "key_format": _NVFP4, "value_format": _NVFP4},
    {"soft_cap": 1},
    {"query_f16": 1, "key_format": _FP8, "value_format": _FP8},
    {"many": 1},
)


@dataclass(frozen=True)
class Shape:
    """What specialisations follow from."""

    num_kv_heads: int
    gqa_ratio: int
    head_dim: int
    block_size: int

    def scalars(self, padding: int) -> dict[str, int]:
        """A launch's scalars; `padding`: bytes between the values and the scales of an NVFP4 block."""
        values = self.block_size * self.num_kv_heads * self.head_dim // 2
        return {
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "num_q_heads": self.num_kv_heads * self.gqa_ratio,
            "num_kv_heads": self.num_kv_heads,
            "gqa_ratio": self.gqa_ratio,
            "data_section_bytes": values + padding,
        }


@dataclass(frozen=True)
class Row:
    """One specialisation of one entry.

    Attributes:
        entry: name of the kernel.
        spec: its compile-time constants that callers choose.
        threads: of a block.
        registers: 32-bit registers a thread.
        static_shared: bytes a block.
        dynamic_shared: bytes a block.
        stack: bytes of local memory a thread, spilled registers among them.
        spill_stores: bytes that a thread stores because registers ran out.
        spill_loads: bytes that it loads back.
        code: bytes of instructions.
    """

    entry: str
    spec: dict[str, int]
    threads: int
    registers: int
    static_shared: int
    dynamic_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    code: int

    @property
    def spills(self) -> bool:
        """Whether registers ran out."""
        return self.spill_stores > 0 or self.spill_loads > 0

    def text(self) -> str:
        """A line under `HEADER`; constants that are 0 are left out."""
        spec = " ".join(f"{name}={value}" for name, value in self.spec.items() if value)
        return (
            f"{self.entry:34} {spec:70} {self.threads:7} {self.registers:9} {self.static_shared:7} "
            f"{self.dynamic_shared:7} {self.stack:6} {self.spill_stores:6} {self.spill_loads:6} {self.code:7}"
        )


HEADER = (
    f"{'entry':34} {'constants':70} {'threads':>7} {'registers':>9} {'static':>7} "
    f"{'dynamic':>7} {'stack':>6} {'stores':>6} {'loads':>6} {'code':>7}"
)


# What is compiled together: a module, entries of it, and the constants that these share.
Spec = tuple[tuple[str, int], ...]
Unit = tuple[str, tuple[str, ...], Spec]


def shapes() -> list[Shape]:
    """Every pair of usual sizes at blocks of 16, and what the benchmarks measure."""
    found = [
        Shape(heads, ratio, head_dim, BLOCK_SIZE)
        for head_dim, heads, ratio in itertools.product(HEAD_DIMS, KV_HEADS, RATIOS)
    ]
    for load in (*TABLE, *LONG, *variants()):
        ratio = load.num_q_heads // load.num_kv_heads
        found.append(Shape(load.num_kv_heads, ratio, load.head_dim, load.block_size))
    return list(dict.fromkeys(found))


def specialisations(entry: KernelEntry, shape: Shape) -> Iterator[dict[str, int]]:
    """The specs that launches of this shape ask for."""
    if entry.specialise is None:
        yield from _pinned_specialisations(entry, shape)
        return
    for padding in (0, _SECTION_PADDING):
        scalars = shape.scalars(padding)
        yield entry.specialise({name: scalars[name] for name in entry.scalar_names})


def _pinned_specialisations(entry: KernelEntry, shape: Shape) -> Iterator[dict[str, int]]:
    """As `Decoder` pins them: every format, for batches of any size; all features at the usual shape."""
    spec = {name: value for name, value in asdict(shape).items() if name in entry.spec_names}
    if not entry.shared_mem(entry.constants(planned_spec(**spec), limits_of_capability(90, 1))):
        yield planned_spec(**spec)  # no cache is read
        return
    for fmt, latency in itertools.product(
        range(len(FORMATS)), range(LATENCY_LEVELS if entry.cooperative else 1)
    ):
        own = {"key_format": fmt, "value_format": fmt, "latency": latency}
        yield planned_spec(**spec, **own)
        section = shape.scalars(0)["data_section_bytes"]
        if fmt == _NVFP4 and is_joined(shape.block_size, shape.num_kv_heads, shape.head_dim, section):
            yield planned_spec(**spec, **own, joined=1)
    if shape == Shape(8, 4, 128, BLOCK_SIZE):
        yield from (planned_spec(**spec, **feature) for feature in FEATURES)


def units(names: Sequence[str]) -> list[Unit]:
    """What is to be compiled, each once."""
    found: dict[tuple[str, Spec, str], list[str]] = {}
    for entry, shape in itertools.product(entries(), shapes()):
        if names and entry.module not in names and entry.entry not in names:
            continue
        # Entries whose constants beyond the spec differ are compiled apart.
        alone = entry.entry if "num_kv_heads" in entry.spec_names else ""
        for spec in specialisations(entry, shape):
            constants = tuple((name, spec[name]) for name in entry.spec_names)
            members = found.setdefault((entry.module, constants, alone), [])
            if entry.entry not in members:
                members.append(entry.entry)
    return [(module, tuple(members), spec) for (module, spec, _), members in found.items()]


def compile_unit(unit: Unit, arch: str) -> list[Row]:
    """Rows of the entries of one unit.

    Raises:
        CompileError: it does not compile.
    """
    module, members, pairs = unit
    spec = dict(pairs)
    source = cubin_info.source_of(find(module, members[0]), spec, arch)
    code, log = nvrtc.compile_with_log(source, nvrtc.Target(arch), cubin_info.VERBOSE)
    usages, sizes = cubin_info.parse_log(log), code_sizes(code)
    rows = []
    for name in members:
        entry, usage = find(module, name), usages[name]
        constants = cubin_info.constants_of(entry, spec, arch)
        measured = (usage.registers, usage.shared, entry.shared_mem(constants), usage.stack)
        spilled = (usage.spill_stores, usage.spill_loads)
        rows.append(Row(name, spec, entry.block(constants)[0], *measured, *spilled, sizes[name]))
    return rows


def code_sizes(cubin: bytes) -> dict[str, int]:
    """Bytes of instructions of each entry: the sections ``.text.<entry>`` of a 64-bit little-endian ELF file.

    Raises:
        ValueError: it is not one.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    sizes = {}
    for header in headers:
        start = names_at + header[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            sizes[name.removeprefix(".text.")] = header[5]
    return sizes


def compiled(work: Sequence[Unit], arch: str, jobs: int) -> Iterator[Row]:
    """Rows of all units, in their order."""
    if jobs == 1:
        for unit in work:
            yield from compile_unit(unit, arch)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for rows in pool.map(compile_unit, work, itertools.repeat(arch)):
            yield from rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a specialisation spills."""
    parser = argparse.ArgumentParser(description="Registers, shared memory, spills and code size of kernels.")
    known = sorted({name for entry in entries() for name in (entry.module, entry.entry)})
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules or entries; all of them by default")
    parser.add_argument("--arch", default="sm_90a", help="target, as sm_90a")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}, allowed is 1 or more")
    work = units(options.names)
    rows = []
    print(HEADER)
    for row in compiled(work, options.arch, options.jobs):
        print(row.text(), flush=True)
        rows.append(row)
    spilling = [row for row in rows if row.spills]
    print(f"{len(rows)} specialisations, of which {len(spilling)} spill")
    for row in spilling:
        print(row.text())
    if options.json:
        table = {
            "arch": options.arch,
            "nvrtc": nvrtc.version_text(),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
