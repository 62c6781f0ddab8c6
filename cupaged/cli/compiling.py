"""``cupaged compile``: kernels for GPUs that are not here."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from cupaged.backends.cupy.nvrtc import CHECKED_TARGETS
from cupaged.cli.parsing import Commands, add_formats, add_shape, command, positive
from cupaged.cli.status import DONE
from cupaged.cli.terminal import Terminal
from cupaged.doctor import readable_bytes
from cupaged.formats import CacheLayout, cache_format


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "compile",
        summary="compile kernels ahead of time, for GPUs that are not here",
        description="Compiles what the attention of a model needs (decoder, writers, reading and copying of\n"
        "blocks) into a folder of cubins with a manifest. Needs NVRTC and no GPU. A program on a machine\n"
        "without NVRTC calls cupaged.ahead.load(FOLDER) before it makes a CupyBackend. Kernels that FOLDER\n"
        "has already stay; equal ones are replaced. NVRTC without a GPU is the extra nvrtc.",
        examples="  %(prog)s kernels/ --q-heads 32 --kv-heads 8 --head-dim 128 --arch sm_90a\n"
        "  %(prog)s kernels/ --formats fp8 nvfp4 --arch sm_80 sm_90a --block-size 32",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="made where it is missing, added to where it has kernels"
    )
    parser.add_argument("--q-heads", type=positive, default=32, metavar="N", help="query heads (32)")
    add_shape(parser)
    add_formats(parser)
    parser.add_argument("--query-tokens", type=positive, default=1, metavar="N",
                        help="tokens decoded of each sequence, 1 to 8 (1)")  # fmt: skip
    parser.add_argument("--max-seqs", type=positive, default=512, metavar="N",
                        help="most sequences of a batch; beyond 512 kernels are others (512)")  # fmt: skip
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], metavar="ARCH",
                        help=f"GPUs to compile for, as {' '.join(CHECKED_TARGETS)} (sm_90a)")  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Compile and say what was written."""
    from cupaged.ahead import KernelSet  # for this command alone

    kernels = KernelSet()
    for name in dict.fromkeys(options.formats):
        layout = CacheLayout(
            cache_format(name),
            options.kv_heads,
            options.head_dim,
            options.block_size,
            heads_first=options.heads_first,
        )
        kernels.add_cache(layout)
        kernels.add_decoder(
            layout, options.q_heads, max_seqs=options.max_seqs, query_tokens=options.query_tokens
        )
    with terminal.progress() as progress:
        manifest = kernels.save(options.folder, options.arch, progress=progress.reach)
    counts = Counter(kernel["arch"] for kernel in manifest["kernels"])
    files = {arch: {k["cubin"] for k in manifest["kernels"] if k["arch"] == arch} for arch in counts}
    sizes = {
        arch: sum((options.folder / name).stat().st_size for name in names) for arch, names in files.items()
    }
    rows = [
        [arch, f"{count}", f"{len(files[arch])}", readable_bytes(sizes[arch])]
        for arch, count in counts.items()
    ]
    terminal.table(["for", "kernels", "files", "size"], rows)
    terminal.note(f"to use them: cupaged.ahead.load({str(options.folder)!r})")
    return DONE
