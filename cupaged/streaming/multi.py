"""Several GPUs: each rank decodes its part of every sequence, and the partial results are merged.

Ranks are processes, one for each GPU. They exchange (m, l, o), head_dim + 2 floats for each query head, by a
communicator's all-gather; each then merges the parts in the order of the ranks, so that all have the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cupaged.errors import ArgumentTypeError, BackendUnavailableError
from cupaged.launch import in_range
from cupaged.streaming.arguments import MOST_BLOCKS, MOST_RANKS
from cupaged.streaming.step import States, Step

# (address of what this rank sends, address of what all receive, F32 elements that a rank sends)
Exchange = tuple[int, int, int]


class Communicator(Protocol):
    """What the ranks exchange by."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, exchanges: Sequence[Exchange], stream: int) -> None:
        """Queue all-gathers of device arrays: rank r's elements arrive as part r of each receiver."""


class NcclCommunicator:
    """NCCL, by CuPy's binding of it.

    Args:
        gpu: a `CupyBackend` on this rank's device.
        size: number of ranks.
        rank: of this process, 0 to size - 1.
        unique_id: what `NcclCommunicator.unique_id` gave on one rank, the same on all.

    Raises:
        BackendUnavailableError: NCCL is missing, or the ranks cannot connect.
    """

    def __init__(self, gpu: Any, size: int, rank: int, unique_id: tuple[int, ...]) -> None:
        size, rank = _place(size, rank)
        self._nccl = _nccl()
        self._gpu = gpu
        self.rank = rank
        self.size = size
        import cupy

        try:
            with cupy.cuda.Device(gpu.device):
                self._communicator = self._nccl.NcclCommunicator(size, unique_id, rank)
        except self._nccl.NcclError as error:
            raise BackendUnavailableError(f"NCCL: rank {rank} of {size} cannot join: {error}") from error

    @staticmethod
    def unique_id() -> tuple[int, ...]:
        """An id of a new group of ranks: to be made on one and given to all, by whatever started them."""
        found: tuple[int, ...] = _nccl().get_unique_id()
        return found

    @classmethod
    def from_mpi(cls, gpu: Any, communicator: Any) -> NcclCommunicator:
        """The ranks of an mpi4py communicator, as ``MPI.COMM_WORLD``."""
        rank = communicator.Get_rank()
        unique_id = communicator.bcast(cls.unique_id() if rank == 0 else None, root=0)
        return cls(gpu, communicator.Get_size(), rank, unique_id)

    def all_gather(self, exchanges: Sequence[Exchange], stream: int) -> None:
        """One grouped call."""
        import cupy

        with cupy.cuda.Device(self._gpu.device):
            self._nccl.groupStart()
            try:
                for source, target, count in exchanges:
                    self._communicator.allGather(source, target, count, self._nccl.NCCL_FLOAT32, stream)
            finally:
                self._nccl.groupEnd()

    def close(self) -> None:
        """Leave the group."""
        self._communicator.destroy()


def _nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except Exception as error:  # a damaged installation fails in any way
        raise BackendUnavailableError(f"NCCL needs CuPy: {error}") from error
    if not nccl.available:
        raise BackendUnavailableError(
            "NCCL cannot be loaded; install it with: pip install 'cupaged[nccl12]' (or 'cupaged[nccl13]', as "
            "CuPy's CUDA version)"
        )
    return nccl


def _place(size: int, rank: int) -> tuple[int, int]:
    size = in_range("size", size, 1, MOST_RANKS)
    return size, in_range("rank", rank, 0, size - 1)


def check_communicator(communicator: Communicator) -> None:
    """Raise ArgumentTypeError or ArgumentValueError for what ranks cannot exchange by."""
    for name in ("rank", "size", "all_gather"):
        if not hasattr(communicator, name):
            raise ArgumentTypeError(
                f"communicator: got {communicator!r}, allowed is a Communicator: it has no {name}"
            )
    _place(communicator.size, communicator.rank)


def local_blocks(num_blocks: int, rank: int, size: int) -> tuple[int, int]:
    """First block and end of a rank's part of a sequence: contiguous, and equal to within one block.

    Raises:
        ArgumentValueError, ArgumentTypeError: no such rank, or no number of blocks.
    """
    size, rank = _place(size, rank)
    num_blocks = in_range("num_blocks", num_blocks, 0, MOST_BLOCKS)
    return num_blocks * rank // size, num_blocks * (rank + 1) // size


class RankMerge:
    """Merges states over the ranks.

    Args:
        gpu: the backend.
        communicator: of the ranks.
        like: states of one rank, one a row.
    """

    def __init__(self, gpu: Any, communicator: Communicator, like: States) -> None:
        check_communicator(communicator)
        rows, _, heads, head_dim = like.o.shape
        self._gpu = gpu
        self._communicator = communicator
        self._gathered = States(gpu, rows * communicator.size, 1, heads, head_dim)
        self._merged = States(gpu, rows, 1, heads, head_dim)

    def merge(self, step: Step, states: States, num_rows: int, stream: int) -> States:
        """States of all ranks' tokens; all ranks must call it, with as many rows."""
        address = self._gpu.pointer
        exchanges = [
            (int(address(own)), int(address(all_ranks)), own.size // own.shape[0] * num_rows)
            for own, all_ranks in zip(states.arrays, self._gathered.arrays, strict=True)
        ]
        self._communicator.all_gather(exchanges, stream)
        step.merge_ranks(self._gathered, self._merged, num_rows, self._communicator.size, stream)
        return self._merged
