"""The kernels behind a `Decoder`, with the workspace that each needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cupaged.errors import ArgumentValueError
from cupaged.handle import KernelHandle
from cupaged.ops import planned
from cupaged.ops.planned import Inputs
from cupaged.registry.decode import check_resident, latency_levels, planned_problem
from cupaged.registry.ring import MAX_PLANNED_SEQS, TILE_TOKENS, latency_level
from cupaged.registry.rules import LATENCY_LEVELS

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

MODULE = "paged_decode_attn_planned"
MAX_SEQS = 1 << 20
_MAX_POSITIONS = 2**32  # of a plan: tiles of all sequences, and what beginning each counts for


# By backend, what was loaded on it. Threads cost more than looking a loaded kernel up.
_loaded: WeakKeyDictionary[Any, set[tuple[object, ...]]] = WeakKeyDictionary()


def _handles(gpu: GpuBackend, *kernels: tuple[str, dict[str, int]]) -> tuple[KernelHandle, ...]:
    """Loaded handles of (entry, constants). New ones are compiled side by side: each takes about a second."""
    handles = {(entry, *spec.items()): gpu.kernel(MODULE, entry, **spec) for entry, spec in kernels}
    loaded = _loaded.setdefault(gpu, set())
    new = [handle for key, handle in handles.items() if key not in loaded]
    if len(new) > 1:
        with ThreadPoolExecutor(len(new)) as pool:
            list(pool.map(KernelHandle.warm, new))
    for handle in handles.values():
        handle.warm()
    loaded.update(handles)
    return tuple(handles.values())


class PlannedKernels:
    """Equal shares of the batch for every block, planned on the device and merged there.

    Args:
        gpu: the backend.
        spec: compile-time constants, from `cupaged.registry.decode.planned_spec`.
        max_seqs: the most sequences of a call.

    Attributes:
        workspace_bytes: device memory held.

    Raises:
        ArgumentValueError: more blocks than the device can have at once.
    """

    def __init__(self, gpu: GpuBackend, spec: dict[str, int], max_seqs: int) -> None:
        self._gpu: Any = gpu
        many = int(max_seqs > MAX_PLANNED_SEQS)
        spec = spec | {"many": many}
        entry = "paged_decode_attn_planned"
        # Reading a plan that another launch has made is no case for small stages.
        levels = (0,) * LATENCY_LEVELS if many else latency_levels(spec, gpu.limits)
        for level in levels:
            check_resident(spec | {"latency": level}, gpu.limits)
        lowest = sorted(set(levels))
        plan = [("paged_decode_attn_plan", spec | {"latency": 0})] if many else []
        handles = _handles(gpu, *((entry, spec | {"latency": level}) for level in lowest), *plan)
        self._kernels = [handles[lowest.index(level)] for level in levels]  # by latency level
        self._plan = handles[-1] if many else None
        self._sequence_cost = self._kernels[0].warm().constants["sequence_cost"]
        self._block_size = spec["block_size"]
        parts = max(_num_parts(handle) for handle in self._kernels)
        slices = max(handle.grid_of(num_seqs=1)[1] for handle in self._kernels)
        self._arrays = (
            gpu.empty(parts * spec["head_dim"], "float32"),
            gpu.empty(parts * 2, "float32"),
            gpu.zeros(max_seqs * slices, "uint32"),
            gpu.empty(2 * max_seqs + 1 if many else 0, "uint32"),
        )
        self._workspace = tuple(gpu.pointer(array) if array.size else 0 for array in self._arrays)
        gpu.synchronize()  # the counters are zero, whatever stream the first call comes on
        self.workspace_bytes: int = sum(4 * int(array.size) for array in self._arrays)

    def launch(self, inputs: Inputs, output: Any, lse: Any, sinks: Any, stream: Any) -> None:
        """Decode one batch."""
        capacity = inputs.num_seqs * inputs.max_blocks_per_seq * self._block_size
        if capacity // TILE_TOKENS + inputs.num_seqs * (self._sequence_cost + 1) >= _MAX_POSITIONS:
            raise ArgumentValueError(
                f"num_seqs, max_blocks_per_seq: got {inputs.num_seqs}, {inputs.max_blocks_per_seq}, room for "
                f"{capacity} tokens; a plan counts fewer than 2^32 tiles of {TILE_TOKENS}"
            )
        kernel = self._kernels[latency_level(capacity)]
        if self._plan is not None:
            planned.paged_decode_attn_plan(self._gpu, self._plan, inputs, self._workspace[3], stream)
        part_o, part_state, counters, plan = self._workspace
        planned.paged_decode_attn_planned(
            self._gpu, kernel, inputs, output, lse, part_o, part_state, counters, plan, sinks, stream
        )

    def restore(self, stream: Any) -> None:
        """The workspace as it was before a launch that ended in the middle, as only the emulator's do.

        Blocks that counted themselves in would be counted again in the next launch.
        """
        counters = self._arrays[2]
        self._gpu.memset(self._workspace[2], 0, counters.nbytes, self._gpu.stream_handle(stream))


def _num_parts(kernel: KernelHandle) -> int:
    """Rows of a launch's workspace: two parts of every query row for each block of a slice."""
    columns, slices, _ = kernel.grid_of(num_seqs=1)
    constants = kernel.warm().constants
    problem = planned_problem(constants)
    rows = min(problem.head_rows, 8 * constants["block_head_tiles"]) * constants["block_heads"]
    return 2 * columns * slices * rows


class ChunkedKernels:
    """Chunks of fixed size, merged in their order: a sequence's result is the same bits in any batch.

    Args:
        gpu: the backend.
        spec: compile-time constants, from `cupaged.registry.decode.planned_spec`.
        max_seqs: the most sequences of a call.
        split_tokens: tokens of a chunk, a multiple of 16.
        max_tokens: the longest sequence.

    Attributes:
        workspace_bytes: device memory held.
    """

    def __init__(
        self, gpu: GpuBackend, spec: dict[str, int], max_seqs: int, split_tokens: int, max_tokens: int
    ) -> None:
        self._gpu: Any = gpu
        self._split_tokens = split_tokens
        self._max_tokens = max_tokens
        entries = ("paged_decode_attn_chunked", "paged_decode_attn_merge_chunks")
        self._decode, self._merge = _handles(gpu, *((entry, spec) for entry in entries))
        rows = spec["num_kv_heads"] * spec["gqa_ratio"] * spec["query_tokens"]
        chunks = max_seqs * rows * -(-max_tokens // split_tokens)
        self._states = gpu.empty(chunks * (spec["head_dim"] + 2), "float32")
        self._block_size = spec["block_size"]
        self.workspace_bytes: int = 4 * int(self._states.size)

    def launch(self, inputs: Inputs, output: Any, lse: Any, sinks: Any, stream: Any) -> None:
        """Decode one batch."""
        capacity = inputs.max_blocks_per_seq * self._block_size
        if capacity > self._max_tokens:
            raise ArgumentValueError(
                f"max_blocks_per_seq: got {inputs.max_blocks_per_seq}, this decoder's workspace is for "
                f"{self._max_tokens // self._block_size}"
            )
        chunks = max(1, -(-capacity // self._split_tokens))
        tiles = self._split_tokens // TILE_TOKENS
        planned.paged_decode_attn_chunked(
            self._gpu, self._decode, inputs, self._states, sinks, chunks, tiles, stream
        )
        planned.paged_decode_attn_merge_chunks(
            self._gpu, self._merge, inputs, self._states, output, lse, sinks, chunks, tiles, stream
        )

    def restore(self, stream: Any) -> None:
        """Nothing: each launch writes what it reads."""


def kernels_of(
    gpu: GpuBackend, spec: dict[str, int], max_seqs: int, chunks: tuple[int, int] | None
) -> PlannedKernels | ChunkedKernels:
    """The kernels of a decoder, by tokens of a chunk and of the longest sequence, where there are chunks."""
    if chunks is None:
        return PlannedKernels(gpu, spec, max_seqs)
    return ChunkedKernels(gpu, spec, max_seqs, *chunks)
