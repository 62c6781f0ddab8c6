"""The decoder: one object that carries what the streaming decode kernels need beside their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupaged import ops
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import CacheLayout
from cupaged.launch import as_integer
from cupaged.ops._checks import check_scale
from cupaged.registry import find
from cupaged.registry.ring import MAX_PLANNED_SEQS

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend


class Decoder:
    """Decodes batches over one kind of cache.

    Work is dealt out on the device from ``seq_lens``: no host plan, no synchronisation, and a captured
    graph serves any lengths and tables up to ``max_seqs`` and the table's width. The workspace is allocated
    once, here (which waits for the device), and belongs to one stream at a time: two calls that may run at
    once need two decoders.

    Args:
        gpu: the backend.
        layout: format, KV heads, head_dim, block_size and block strides of the pools.
        num_q_heads: query heads, a multiple of the layout's num_kv_heads.
        max_seqs: the most sequences a call may have.

    Attributes:
        workspace_bytes: device memory that the decoder holds.

    Raises:
        ArgumentValueError: a shape that is not supported.
        CompileError: the kernel does not compile.
    """

    def __init__(self, gpu: GpuBackend, layout: CacheLayout, num_q_heads: int, max_seqs: int) -> None:
        if not isinstance(layout, CacheLayout):
            raise ArgumentTypeError(f"layout: got {layout!r}, allowed is a CacheLayout")
        num_q_heads = as_integer("num_q_heads", num_q_heads)
        max_seqs = as_integer("max_seqs", max_seqs)
        if not 1 <= max_seqs <= MAX_PLANNED_SEQS:
            raise ArgumentValueError(
                f"max_seqs: got {max_seqs}, allowed is 1 to {MAX_PLANNED_SEQS}; for more there are the "
                "single-pass and split-K launchers"
            )
        self._gpu: Any = gpu
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._max_seqs = max_seqs
        name = f"paged_decode_attn_planned_{layout.format.name}"
        self._kernel = self._gpu.kernel(name, name)
        self._launch = getattr(ops, name)
        chosen = self._kernel.warm(**self._spec())
        blocks = gpu.limits.num_sms * chosen.constants["blocks_per_sm"]
        parts = 2 * blocks * num_q_heads
        self._part_o = gpu.empty(parts * layout.head_dim, "float32")
        self._part_state = gpu.empty(parts * 2, "float32")
        self._counters = gpu.zeros(max_seqs, "uint32")
        gpu.synchronize()  # the counters are zero, whatever stream the first call comes on
        self.workspace_bytes = 4 * (parts * (layout.head_dim + 2) + max_seqs)

    def _spec(self) -> dict[str, int]:
        layout = self._layout
        return dict(
            find(self._kernel.entry, self._kernel.entry).specialise(
                {
                    "head_dim": layout.head_dim,
                    "block_size": layout.block_size,
                    "num_q_heads": self._num_q_heads,
                    "num_kv_heads": layout.num_kv_heads,
                    "data_section_bytes": layout.data_section_bytes,
                }
            )
        )

    def decode(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        output: Any,
        *,
        num_seqs: int,
        max_blocks_per_seq: int,
        stream: Any,
        lse: Any = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        q_stride: int | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Decode one query token of each sequence.

        Args:
            q: BF16 ``[num_seqs, num_q_heads, head_dim]``.
            k_cache, v_cache: pools of the decoder's layout.
            block_tables: int32 ``[num_seqs, max_blocks_per_seq]``.
            seq_lens: int32 ``[num_seqs]``.
            output: BF16 ``[num_seqs, num_q_heads, head_dim]``, written.
            num_seqs: sequences of this call, at most ``max_seqs``.
            max_blocks_per_seq: columns of block_tables.
            stream: int handle, CuPy stream, or object with ``__cuda_stream__``.
            lse: F32 ``[num_seqs, num_q_heads]``, written where given: the natural logarithm of the sum of
                exponentials of the scaled scores; -inf for an empty sequence.
            softmax_scale: factor on q k, 1 / sqrt(head_dim) by default.
            sliding_window: newest tokens attended; 0 attends to all.
            q_stride: elements between sequences of q, num_q_heads * head_dim by default.
            k_scale, v_scale: dequantisation scales of an FP8 cache, those it was written with; no other
                format has them.
            num_blocks: size of the pools; an id outside makes its row NaN.

        Raises:
            ArgumentValueError, ArgumentTypeError: before any launch; the message names the argument.
        """
        layout = self._layout
        num_seqs = as_integer("num_seqs", num_seqs)
        scale = (
            layout.head_dim**-0.5 if softmax_scale is None else check_scale("softmax_scale", softmax_scale)
        )
        if not 0 <= num_seqs <= self._max_seqs:
            raise ArgumentValueError(f"num_seqs: got {num_seqs}, this decoder takes 0 to {self._max_seqs}")
        name = layout.format.name
        given = k_scale is not None or v_scale is not None
        if name != "fp8" and given:
            raise ArgumentValueError(f"k_scale, v_scale: got {k_scale}, {v_scale}; a {name} cache has none")
        if name == "fp8" and (k_scale is None or v_scale is None):
            raise ArgumentValueError(
                f"k_scale, v_scale: got {k_scale}, {v_scale}; an fp8 cache needs both, as it was written"
            )
        self._launch(
            self._gpu,
            self._kernel,
            q,
            k_cache,
            v_cache,
            output,
            0 if lse is None else lse,
            self._part_o,
            self._part_state,
            self._counters,
            block_tables,
            seq_lens,
            max_blocks_per_seq,
            num_seqs,
            self._num_q_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            scale,
            *((k_scale, v_scale) if name == "fp8" else ()),
            self._num_q_heads * layout.head_dim if q_stride is None else q_stride,
            *self._strides(),
            sliding_window,
            stream,
            num_blocks=num_blocks,
        )

    def _strides(self) -> tuple[int, ...]:
        layout = self._layout
        if layout.format.name == "fp8":
            return (layout.cache_stride,)
        if layout.format.name == "nvfp4":
            return (layout.block_stride_bytes, layout.data_section_bytes)
        return ()
