"""Decode of caches in the memory of several GPUs, each of which holds a part of every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupaged.decode import Decoder
from cupaged.errors import ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.merge import merge_states
from cupaged.ops._checks import check_num_blocks, check_size
from cupaged.pointers import DevicePtr
from cupaged.streaming.device import device_of
from cupaged.streaming.multi import Communicator, RankMerge
from cupaged.streaming.pool import rows_of
from cupaged.streaming.step import States, Step, check_scales
from cupaged.streaming.tables import UploadBuffer


class ContextParallelDecoder:
    """Decodes batches whose sequences are cut over ranks; every rank gets the whole result.

    Args:
        gpu: this rank's backend.
        layout: of the pools.
        num_q_heads: query heads, a multiple of the layout's num_kv_heads.
        communicator: of the ranks.
        max_seqs: the most sequences a call may have.
        k_scale, v_scale: dequantisation scales of an FP8 cache; no other format has them.
        partials: what the ranks exchange. ``"states"``: (m, l, o) in F32, from the streaming step.
            ``"outputs"``: outputs in BF16 and their LSE, from `cupaged.decode.Decoder`, which is faster; each
            part is rounded to BF16 before it is merged.

    Raises:
        ArgumentValueError: a shape that is not supported.
        CompileError: a kernel does not compile.
    """

    def __init__(
        self,
        gpu: Any,
        layout: CacheLayout,
        num_q_heads: int,
        communicator: Communicator,
        *,
        max_seqs: int = 1,
        k_scale: float | None = None,
        v_scale: float | None = None,
        partials: str = "states",
    ) -> None:
        self._gpu = gpu
        self._layout = layout
        self._max_seqs = max_seqs
        self._num_q_heads = num_q_heads
        scales = check_scales(layout.format.name, k_scale, v_scale)
        self._part: _States | _Outputs
        if partials == "states":
            self._part = _States(gpu, layout, num_q_heads, communicator, max_seqs, scales)
        elif partials == "outputs":
            self._part = _Outputs(gpu, layout, num_q_heads, communicator, max_seqs, scales)
        else:
            raise ArgumentValueError(f"partials: got {partials!r}, allowed are 'states' and 'outputs'")

    def decode(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        seq_lens: Sequence[int],
        output: Any,
        *,
        max_blocks_per_seq: int,
        num_blocks: int,
        stream: Any,
        softmax_scale: float | None = None,
    ) -> None:
        """Decode one query token of each sequence; all ranks call it together.

        Args:
            q: BF16 ``[num_seqs, num_q_heads, head_dim]``, contiguous, the same on all ranks.
            k_cache, v_cache: this rank's pools.
            block_tables: int32 ``[num_seqs, max_blocks_per_seq]`` on the device, this rank's blocks.
            seq_lens: on the host, tokens that this rank has of each sequence; 0 is allowed.
            output: BF16 ``[num_seqs, num_q_heads, head_dim]``, written.
            max_blocks_per_seq: columns of block_tables.
            num_blocks: blocks of the pools.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            softmax_scale: factor on q k, 1 / sqrt(head_dim) by default.

        Raises:
            ArgumentValueError, ArgumentTypeError: the message names the argument.
        """
        rows = len(seq_lens)
        if rows > self._max_seqs:
            raise ArgumentValueError(f"seq_lens: got {rows} sequences, this decoder takes {self._max_seqs}")
        lengths = np.array(seq_lens, np.int64)
        most = max_blocks_per_seq * self._layout.block_size
        if rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
            raise ArgumentValueError(
                f"seq_lens: got {int(lengths.min())} to {int(lengths.max())}, allowed is 0 to {most}"
            )
        elements = rows * self._num_q_heads * self._layout.head_dim
        check_size("q", q, elements)
        check_size("output", output, elements)
        check_size("block_tables", block_tables, rows * max_blocks_per_seq)
        check_num_blocks(num_blocks)
        if rows:
            handle = self._gpu.stream_handle(stream)
            self._part.decode(
                q, k_cache, v_cache, block_tables, lengths, output, max_blocks_per_seq, num_blocks,
                softmax_scale, handle,
            )  # fmt: skip


class _States:
    """Partial results as running states of the streaming step."""

    def __init__(
        self,
        gpu: Any,
        layout: CacheLayout,
        num_q_heads: int,
        communicator: Communicator,
        max_seqs: int,
        scales: tuple[float, float],
    ) -> None:
        self._gpu = gpu
        self._layout = layout
        self._step = Step(gpu, layout, num_q_heads, *scales)
        splits = self._step.splits_for(max_seqs)
        self._states = States(gpu, max_seqs, splits, num_q_heads, layout.head_dim)
        self._merged = States(gpu, max_seqs, 1, num_q_heads, layout.head_dim)
        self._ranks = RankMerge(gpu, communicator, self._merged)
        self._lengths = UploadBuffer(gpu, device_of(gpu))

    def decode(
        self, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, lengths: Any, output: Any,
        max_blocks_per_seq: int, num_blocks: int, scale: float | None, stream: int,
    ) -> None:  # fmt: skip
        rows, block_size = len(lengths), self._layout.block_size
        counts = -(-lengths // block_size)
        valid = lengths - np.maximum(counts - 1, 0) * block_size
        address = self._lengths.put(np.concatenate([counts, valid]).astype(np.int32), stream)
        pool_bytes = num_blocks * self._layout.block_stride_bytes
        pools = [rows_of(self._gpu, pool, pool_bytes, 0, 1) for pool in (k_cache, v_cache)]
        table = rows_of(self._gpu, block_tables, 4, 0, rows * max_blocks_per_seq).address
        query_bytes = 2 * self._step.num_q_heads * self._layout.head_dim
        self._states.clear(rows, stream)
        self._step.fold(
            rows_of(self._gpu, q, query_bytes, 0, rows), pools[0], pools[1], num_blocks,
            table, address, self._states, 0, rows, max_blocks_per_seq, scale, stream, address + 4 * rows,
        )  # fmt: skip
        self._step.merge(self._states, self._merged, rows, stream)
        merged = self._ranks.merge(self._step, self._merged, rows, stream)
        self._step.finalize(merged, output, rows, stream)


class _Outputs:
    """Partial results as outputs in BF16 with their LSE."""

    def __init__(
        self,
        gpu: Any,
        layout: CacheLayout,
        num_q_heads: int,
        communicator: Communicator,
        max_seqs: int,
        scales: tuple[float, float],
    ) -> None:
        self._gpu = gpu
        self._communicator = communicator
        self._decoder = Decoder(gpu, layout, num_q_heads, max_seqs)
        is_fp8 = layout.format.name == "fp8"
        self._scales = scales if is_fp8 else (None, None)
        row = (num_q_heads, layout.head_dim)
        self._output = gpu.empty((max_seqs, *row), "uint16")
        self._lse = gpu.empty((max_seqs, num_q_heads), "float32")
        ranks = communicator.size * max_seqs
        self._outputs = gpu.empty(ranks * row[0] * row[1], "uint16")
        self._lses = gpu.empty(ranks * num_q_heads, "float32")
        self._lengths = UploadBuffer(gpu, device_of(gpu))
        self._row = row

    def decode(
        self, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, lengths: Any, output: Any,
        max_blocks_per_seq: int, num_blocks: int, scale: float | None, stream: int,
    ) -> None:  # fmt: skip
        rows, (heads, head_dim), address = len(lengths), self._row, self._gpu.pointer
        device_lengths = self._lengths.put(lengths.astype(np.int32), stream)
        self._decoder.decode(
            q, k_cache, v_cache, block_tables, DevicePtr(device_lengths, 4 * rows), self._output,
            num_seqs=rows, max_blocks_per_seq=max_blocks_per_seq, stream=stream, lse=self._lse,
            softmax_scale=scale, num_blocks=num_blocks, k_scale=self._scales[0],
            v_scale=self._scales[1],
        )  # fmt: skip
        self._communicator.all_gather(
            [
                (int(address(self._output)), int(address(self._outputs)), rows * heads * head_dim // 2),
                (int(address(self._lse)), int(address(self._lses)), rows * heads),
            ],
            stream,
        )
        ranks = self._communicator.size
        outputs = self._outputs[: ranks * rows * heads * head_dim].reshape(ranks, rows, heads, head_dim)
        lses = self._lses[: ranks * rows * heads].reshape(ranks, rows, heads)
        target = output.reshape(rows, heads, head_dim)
        merge_states(self._gpu, outputs, lses, target, stream=stream)
