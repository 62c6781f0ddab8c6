"""Faults put into copies of the kernels, one at a time: does a test of this folder fail? `--list` shows them.

`python -m tests.edges.mutations [name ...]` copies the tree, changes one line, and runs the edge tests on the
emulator until one fails. Exit status 1 where a fault is not found. Text that is not in the sources any more
is an error: the list must follow them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_lengths.py", "test_merge.py", "test_formats.py", "test_memory.py", "test_sanitize.py")


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: what is wrong.
        file: under ``kernels/``.
        right: text that is replaced, where it first stands.
        wrong: by what.
        tests: those that look for such faults (``-k``): all others would only take time.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    Mutation("window-by-one", "attention/lengths.cuh", "end - window :", "end - window + 1u :", "window"),
    Mutation("window-one-more", "attention/lengths.cuh", "end - window :", "end - window - 1u :", "window"),
    Mutation(
        "last-token-lost",
        "attention/lengths.cuh",
        "const u32 end = seq_len > after ? seq_len - after : 0u;",
        "const u32 end = seq_len > after + 1u ? seq_len - after - 1u : seq_len;",
        "token_count",
    ),
    Mutation(
        "length-one-beyond",
        "attention/lengths.cuh",
        "static_cast<u64>(seq_len) <=",
        "static_cast<u64>(seq_len) <= 1u +",
        "narrow",
    ),
    Mutation(
        "split-leaves-a-tile",
        "attention/lengths.cuh",
        "(index + 1u) / parts",
        "(index + 1u) / (parts + 1u)",
        "parts",
    ),
    Mutation(
        "bad-block-is-block-0",
        "ring/pipeline.cuh",
        "invalid |= order",
        "invalid |= false && order",
        "outside",
    ),
    Mutation(
        "bad-block-of-a-tile-is-block-0",
        "cache/page_walk.cuh",
        "return {(valid ? id : 0u) * geometry.block_stride, valid};",
        "return {(valid ? id : 0u) * geometry.block_stride, true};",
        "outside",
    ),
    Mutation(
        "block-offset-of-32-bits",
        "cache/page_walk.cuh",
        "id : 0u) * geometry.block_stride",
        "id : 0u) * static_cast<u32>(geometry.block_stride)",
        "far_out",
    ),
    Mutation(
        "readable-block-of-32-bits",
        "ring/pipeline.cuh",
        "block < pools.num_blocks ? block : 0u; }",
        "block < pools.num_blocks ? block & 0x1ffffu : 0u; }",
        "far_out",
    ),
    Mutation("lse-in-log2", "ring/results.cuh", "state.log2_sum() * LN_2", "state.log2_sum()", "mean"),
    Mutation(
        "workspace-in-log2",
        "attention/online_softmax.cuh",
        "reference * LN_2",
        "reference",
        "merge_in_float64",
    ),
    Mutation("sums-not-moved", "attention/online_softmax.cuh", "sum *= factor;", "", "float64"),
    Mutation("no-division", "attention/online_softmax.cuh", "ptx::reciprocal_approx(sum);", "1.0f;", "mean"),
    Mutation("k-scale-lost", "paged_decode_attn_fp8.cu", "inv_sqrt_d * k_scale", "inv_sqrt_d", "fp8_scales"),
    Mutation(
        "v-scale-lost", "paged_decode_attn_planned.cu", "v_scale * ValueFormat", "ValueFormat", "fp8_scales"
    ),
    Mutation(
        "slot-not-checked",
        "cache/write.cuh",
        "static_cast<u64>(slot) >= problem.num_slots",
        "false",
        "every_class",
    ),
    Mutation(
        "slot-offset-of-32-bits",
        "cache/write.cuh",
        "block * geometry.block_stride + data_offset",
        "static_cast<u32>(block * geometry.block_stride) + data_offset",
        "far_out",
    ),
    Mutation(
        "last-split-left-out",
        "attention/reduce.cuh",
        "if (first + i < num_splits)",
        "if (first + i + 1u < num_splits || num_splits == 1u)",
        "float64",
    ),
)


def caught_by(mutation: Mutation, folder: Path) -> str | None:
    """The first test that fails with the fault in place, or None."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=ignored)
    path = tree / "kernels" / mutation.file
    text = path.read_text()
    if mutation.right not in text:
        raise SystemExit(f"{mutation.name}: {mutation.right!r} does not occur in {mutation.file}")
    path.write_text(text.replace(mutation.right, mutation.wrong, 1))
    tests = [f"tests/edges/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
               "-k", f"({mutation.tests}) and not cupy and not 1048576", *tests]  # fmt: skip
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return f"a crash of the emulator, signal {-done.returncode}"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else None


def main() -> int:
    """Exit status 1 where a fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    missed = 0
    for mutation in chosen:
        if options.list:
            print(f"{mutation.name}: {mutation.file}")
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = caught_by(mutation, Path(folder))
        missed += found is None
        print(f"{mutation.name}: {found or 'NOT FOUND'} ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
