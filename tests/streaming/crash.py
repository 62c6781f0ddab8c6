"""Kills processes that write a file of blocks, at random points, and looks at what each leaves.

    python -m tests.streaming.crash FOLDER [--runs 200] [--seed 0]

Prints a line of JSON; exits with 1 where a file lost a block that its writer had been told was stored.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.formats import FP8, CacheLayout
from cupaged.streaming import FileStore, Tail

LAYOUT = CacheLayout(FP8, 2, 64, 16)
RECORD = 2 * LAYOUT.block_stride_bytes


def record(position: int) -> npt.NDArray[np.uint8]:
    """What block `position` holds."""
    return np.random.default_rng(position).integers(0, 255, RECORD, np.uint8)


def blocks(first: int, count: int) -> npt.NDArray[np.uint8]:
    """Records of so many blocks, from one on."""
    return np.stack([record(first + i) for i in range(count)])


def filled(path: Path, count: int, tail: int = 0, **options: Any) -> FileStore:
    """A store of so many blocks, and of so many tokens of the next."""
    store = FileStore.create(path, LAYOUT, **options)
    store.append(blocks(0, count))
    if tail:
        store.keep_tail(Tail(record(count), tail))
    return store


def write_for_ever(path: Path, seed: int, told: int) -> None:
    """Appends, now and then keeps a tail, and tells how many blocks are stored."""
    rng = np.random.default_rng(seed)
    store = FileStore.create(path, LAYOUT)
    while True:
        count = int(rng.integers(1, 40))
        store.append(blocks(store.num_blocks, count))
        os.pwrite(told, store.num_blocks.to_bytes(8, "little"), 0)
        if rng.random() < 0.3:
            store.keep_tail(Tail(record(store.num_blocks), 5))


def kill_one(path: Path, seed: int) -> int:
    """Blocks that the writer had stored for certain when it was killed."""
    told = os.memfd_create("told")
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(path, seed, told)
        finally:
            os._exit(3)
    while not os.fstat(told).st_size:  # until it has begun
        ended, status = os.waitpid(child, os.WNOHANG)
        assert not ended, f"the writer ended by itself: {status}"
        time.sleep(1e-4)
    time.sleep(float(np.random.default_rng(seed).uniform(0, 0.02)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    stored = int.from_bytes(os.pread(told, 8, 0), "little")
    os.close(told)
    return stored


def is_right(store: FileStore) -> bool:
    """Every block is what was written."""
    found = np.empty(store.num_blocks * RECORD, np.uint8)
    store.read(0, found)
    return all((row == record(i)).all() for i, row in enumerate(found.reshape(-1, RECORD)))


def examine(path: Path, stored: int) -> tuple[bool, int, int]:
    """Whether nothing is lost, also after appending more; blocks, and those dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        store = FileStore.open(path, writable=True)
    with store:
        blocks, dropped = store.num_blocks, store.dropped_blocks
        right = blocks >= stored and is_right(store)
        store.append(np.stack([record(blocks + i) for i in range(3)]))
    with FileStore.open(path) as again:
        return right and again.num_blocks == blocks + 3 and is_right(again), blocks, dropped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong, blocks, dropped = [], 0, 0
    for run in range(options.runs):
        path = options.folder / f"{run}.kv"
        seed = options.seed * 100_000 + run
        right, found, torn = examine(path, kill_one(path, seed))
        blocks += found
        dropped += torn
        if not right:
            wrong.append(seed)
        path.unlink()
    print(json.dumps({"runs": options.runs, "wrong": wrong, "blocks": blocks, "dropped_blocks": dropped}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
