"""Small arrays of integers that a streaming decoder hands to its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.streaming.device import Device
from cupaged.streaming.sequence import StreamedSequence


@dataclass(frozen=True)
class ResidentTable:
    """Blocks on the GPU of some sequences, as addresses of device arrays.

    Attributes:
        table: int32 ``[num_rows, capacity]``.
        counts: int32 ``[num_rows]``.
        valid_slots: int32 ``[num_rows]``, tokens of each row's last block.
        capacity: columns; 0 where no row has a block.
    """

    table: int
    counts: int
    valid_slots: int
    capacity: int


class UploadBuffer:
    """An array on the device that the host rewrites now and then.

    A new content is copied in the order of the stream; it must be the stream of the kernels that read it.
    """

    def __init__(self, gpu: Any, device: Device) -> None:
        self._gpu = gpu
        self._device = device
        self._copied = device.event()
        self._host = np.empty(0, np.uint8)
        self._memory: Any = None

    def put(self, content: npt.NDArray[Any], stream: int) -> int:
        """Address of a copy of the content."""
        self._copied.synchronize()
        if content.nbytes > self._host.size:
            self._gpu.synchronize()  # what is replaced may still be read
            size = max(4096, 2 * content.nbytes)
            host, memory = self._device.pinned(size), self._gpu.empty(size, "uint8")
            self._host, self._memory = host, memory  # both or neither: where one is missing, neither is used
        address = int(self._gpu.pointer(self._memory))
        host = self._host[: content.nbytes]
        host[...] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._device.to_device(address, host, stream)
        self._copied.record(stream)
        return address


class Tables:
    """The tables of a decoder's resident blocks, and its slot mappings."""

    def __init__(self, gpu: Any, device: Device) -> None:
        self._table, self._counts, self._slots = (UploadBuffer(gpu, device) for _ in range(3))
        self._uploaded: tuple[object, ...] = ()
        self._address = 0

    def forget(self) -> None:
        """Resident blocks changed."""
        self._uploaded = ()

    def slots(self, slots: Sequence[int], stream: int) -> int:
        """Address of a slot mapping, int64 ``[num_tokens]``."""
        return self._slots.put(np.array(slots, np.int64), stream)

    def resident(self, sequences: Sequence[StreamedSequence], block_size: int, stream: int) -> ResidentTable:
        """Resident blocks, and behind them the tail where it has tokens."""
        tails = np.array([s.tail_tokens for s in sequences], np.int32)
        counts = np.array([len(s.resident) for s in sequences], np.int32) + (tails > 0)
        capacity = int(counts.max(initial=0))
        if capacity == 0:
            return ResidentTable(0, 0, 0, 0)
        width = 1 + max(len(s.resident) for s in sequences)
        key = (*sequences, stream)
        if key != self._uploaded:
            table = np.full((len(sequences), width), -1, np.int32)
            for row, sequence in zip(table, sequences, strict=True):
                row[: len(sequence.resident)] = sequence.resident
                row[len(sequence.resident)] = sequence.tail_record
            self.forget()  # where `put` fails, what the old address holds is not known
            self._address = self._table.put(table, stream)
            self._uploaded = key
        valid = np.where(tails > 0, tails, block_size).astype(np.int32)
        address = self._counts.put(np.concatenate([counts.astype(np.int32), valid]), stream)
        return ResidentTable(self._address, address, address + 4 * len(sequences), width)
