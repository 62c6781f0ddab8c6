"""Every environment variable that the project reads: the one table that code, documentation and tests share.

``docs/environment.md`` is written from it (``python -m tools.environment_table``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: as it is set.
        default: what holds where it is not set, in words.
        meaning: what it changes, in words.
        reader: who looks at it: ``"package"``, ``"command line"``, ``"CUDA"`` or ``"repository"``.
    """

    name: str
    default: str
    meaning: str
    reader: str = "package"

    def get(self) -> str | None:
        """The value, without spaces around it; None where it is not set or empty."""
        return os.environ.get(self.name, "").strip() or None

    def is_on(self) -> bool:
        """Whether a switch is set to something other than ``0``."""
        return self.get() not in (None, "0")


CACHE_DIR = Variable(
    "CUPAGED_CACHE_DIR",
    "`$XDG_CACHE_HOME/cupaged`",
    "Folder of the compiled kernels, made where it is missing.",
)
CACHE_MAX_BYTES = Variable(
    "CUPAGED_CACHE_MAX_BYTES",
    "1073741824 (1 GiB)",
    "Cap on the size of that folder, in bytes; the least recently used kernels go first.",
)
NVTX = Variable(
    "CUPAGED_NVTX",
    "off",
    "Anything but `0`: each launch on a GPU is an NVTX range with the kernel's name, for a profiler's "
    "timeline. Read when a `CupyBackend` is made.",
)
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME", "`~/.cache`", "Folder of all caches, where `CUPAGED_CACHE_DIR` is not set."
)
HOME = Variable("HOME", "of the user's account", "Where `~` is.")
CXX = Variable(
    "CXX",
    "the first of `g++`, `c++`, `clang++` and the Python package `ziglang`",
    "C++ compiler of the emulator, with options if need be.",
)
CUDA_PATH = Variable(
    "CUDA_PATH",
    "the Python packages' own",
    "Where CuPy also looks for NVRTC; its headers are never used.",
    "CUDA",
)
CUDA_HOME = Variable("CUDA_HOME", "-", "The same, asked for after `CUDA_PATH`.", "CUDA")
CUDA_VISIBLE_DEVICES = Variable(
    "CUDA_VISIBLE_DEVICES", "all", "Which GPUs there are, and in which order; the driver reads it.", "CUDA"
)
NO_COLOR = Variable("NO_COLOR", "off", "Anything: no colour, whatever the output goes to.", "command line")
FORCE_COLOR = Variable(
    "FORCE_COLOR",
    "off",
    "Anything: errors in colour, also into a pipe or a file; tables and progress there stay plain.",
    "command line",
)
COMMIT = Variable(
    "CUPAGED_COMMIT",
    "what `git` says",
    "The commit that results of `python -m benchmarks` name.",
    "repository",
)
FUZZ_CASES = Variable("CUPAGED_FUZZ_CASES", "60", "Random cases that the test suite draws.", "repository")
TEST_NO_POOL = Variable(
    "CUPAGED_TEST_NO_POOL",
    "off",
    "Tests on a GPU allocate each array by itself, so that a memory checker sees where it ends.",
    "repository",
)
TEST_EVERY_LANE_ARRIVES = Variable(
    "CUPAGED_TEST_EVERY_LANE_ARRIVES",
    "off",
    "Tests on a GPU compile the ring so that a race checker can follow it (`kernels/ring/pipeline.cuh`).",
    "repository",
)
NOTEBOOK_TOKENS = Variable(
    "CUPAGED_NOTEBOOK_TOKENS", "the notebook's own", "Size of a notebook's context, in tokens.", "repository"
)
NOTEBOOK_PICTURES = Variable(
    "CUPAGED_NOTEBOOK_PICTURES", "none", "Folder that a notebook's pictures are written to.", "repository"
)

VARIABLES = (
    CACHE_DIR,
    CACHE_MAX_BYTES,
    NVTX,
    XDG_CACHE_HOME,
    HOME,
    CXX,
    CUDA_PATH,
    CUDA_HOME,
    CUDA_VISIBLE_DEVICES,
    NO_COLOR,
    FORCE_COLOR,
    COMMIT,
    FUZZ_CASES,
    TEST_NO_POOL,
    TEST_EVERY_LANE_ARRIVES,
    NOTEBOOK_TOKENS,
    NOTEBOOK_PICTURES,
)  # fmt: skip


def read_by(*readers: str) -> tuple[Variable, ...]:
    """The variables that these look at, in the table's order."""
    return tuple(variable for variable in VARIABLES if variable.reader in readers)
