"""Decode of caches in the memory of several GPUs, each of which holds a part of every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.decode import Decoder
from cupaged.decode_kernels import MAX_SEQS
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer, in_range
from cupaged.ops._checks import check_score_scale
from cupaged.ops._kernels import kernel_of
from cupaged.ops.merge import merge_states_bf16
from cupaged.pointers import DevicePtr
from cupaged.streaming.arguments import MOST_BLOCKS, device_pool, device_rows, lengths_of
from cupaged.streaming.device import device_of
from cupaged.streaming.multi import Communicator, RankMerge, check_communicator
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
        if partials not in _PARTIALS:
            raise ArgumentValueError(f"partials: got {partials!r}, allowed are 'states' and 'outputs'")
        if not isinstance(layout, CacheLayout):
            raise ArgumentTypeError(f"layout: got {layout!r}, allowed is a CacheLayout")
        check_communicator(communicator)
        self._gpu = gpu
        self._layout = layout
        self._max_seqs = in_range("max_seqs", max_seqs, 1, MAX_SEQS)
        self._num_q_heads = as_integer("num_q_heads", num_q_heads)
        self._scales = check_scales(layout.format.name, k_scale, v_scale)
        self._lengths = UploadBuffer(gpu, device_of(gpu))
        self._part = _PARTIALS[partials](
            gpu, layout, self._num_q_heads, communicator, self._max_seqs, self._scales
        )

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
            ArgumentValueError, ArgumentTypeError: before anything runs here; the message names the argument.
                Other ranks, whose arguments were right, wait for this one.
        """
        width = in_range("max_blocks_per_seq", max_blocks_per_seq, 0, MOST_BLOCKS)
        blocks = in_range("num_blocks", num_blocks, 0, MOST_BLOCKS)
        lengths = lengths_of("seq_lens", seq_lens, width * self._layout.block_size)
        rows, row = len(lengths), (self._num_q_heads, self._layout.head_dim)
        if rows > self._max_seqs:
            raise ArgumentValueError(f"seq_lens: got {rows} sequences, this decoder takes {self._max_seqs}")
        gpu, handle = self._gpu, self._gpu.stream_handle(stream)
        if softmax_scale is not None:
            softmax_scale = check_score_scale("softmax_scale", softmax_scale, self._scales[0])
        call = _Call(
            q=device_rows(gpu, "q", q, "bf16", rows, row, handle),
            k_cache=device_pool(gpu, "k_cache", k_cache, self._layout, blocks, handle),
            v_cache=device_pool(gpu, "v_cache", v_cache, self._layout, blocks, handle),
            block_tables=device_rows(gpu, "block_tables", block_tables, "i32", rows, (width,), handle),
            lengths=lengths,
            output=device_rows(gpu, "output", output, "bf16", rows, row, handle, writable=True),
            max_blocks_per_seq=width,
            num_blocks=blocks,
            scale=softmax_scale,
            stream=handle,
        )
        if rows:
            self._part.decode(call, self._lengths)


@dataclass(frozen=True)
class _Call:
    """Checked arguments of `ContextParallelDecoder.decode`."""

    q: DevicePtr
    k_cache: Any
    v_cache: Any
    block_tables: DevicePtr
    lengths: npt.NDArray[np.int64]
    output: DevicePtr
    max_blocks_per_seq: int
    num_blocks: int
    scale: float | None
    stream: int


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
        self._layout = layout
        self._step = Step(gpu, layout, num_q_heads, *scales)
        splits = self._step.splits_for(max_seqs)
        self._states = States(gpu, max_seqs, splits, num_q_heads, layout.head_dim)
        self._merged = States(gpu, max_seqs, 1, num_q_heads, layout.head_dim)
        self._ranks = RankMerge(gpu, communicator, self._merged)

    def decode(self, call: _Call, buffer: UploadBuffer) -> None:
        rows, block_size, stream = len(call.lengths), self._layout.block_size, call.stream
        counts = -(-call.lengths // block_size)
        valid = call.lengths - np.maximum(counts - 1, 0) * block_size
        address = buffer.put(np.concatenate([counts, valid]).astype(np.int32), stream)
        self._states.clear(rows, stream)
        self._step.fold(
            call.q, call.k_cache, call.v_cache, call.num_blocks, call.block_tables.address, address,
            self._states, 0, rows, call.max_blocks_per_seq, call.scale, stream, address + 4 * rows,
        )  # fmt: skip
        self._step.merge(self._states, self._merged, rows, stream)
        merged = self._ranks.merge(self._step, self._merged, rows, stream)
        self._step.finalize(merged, call.output, rows, stream)


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
        self._row = row

    def decode(self, call: _Call, buffer: UploadBuffer) -> None:
        rows, (heads, head_dim), address = len(call.lengths), self._row, self._gpu.pointer
        device_lengths = buffer.put(call.lengths.astype(np.int32), call.stream)
        self._decoder.decode(
            call.q, call.k_cache, call.v_cache, call.block_tables, DevicePtr(device_lengths, 4 * rows),
            self._output, num_seqs=rows, max_blocks_per_seq=call.max_blocks_per_seq, stream=call.stream,
            lse=self._lse, softmax_scale=call.scale, num_blocks=call.num_blocks, k_scale=self._scales[0],
            v_scale=self._scales[1],
        )  # fmt: skip
        self._communicator.all_gather(
            [
                (int(address(self._output)), int(address(self._outputs)), rows * heads * head_dim // 2),
                (int(address(self._lse)), int(address(self._lses)), rows * heads),
            ],
            call.stream,
        )
        merge_states_bf16(
            self._gpu, kernel_of(self._gpu, "merge_states", "merge_states_bf16"), self._outputs, self._lses,
            call.output, 0, self._communicator.size, rows * heads, head_dim, rows * heads * head_dim,
            rows * heads, call.stream,
        )  # fmt: skip


_PARTIALS: dict[str, type[_States | _Outputs]] = {"states": _States, "outputs": _Outputs}
