"""Every way in which the package decodes a `PagedCase`, behind one function.

A path is ``single``, ``splits<n>`` (split-K and its reduction), ``decoder``, or, without a window,
``tiled<n>`` (tiles of n blocks, then the finalisation). Outputs lie between guard bytes.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupaged import ops
from cupaged.decode import Decoder
from cupaged.formats import BF16, FP8, CacheFormat
from tests.poison import Guarded, PagedCase
from tests.rig import DeviceGuarded, Rig, UploadedCase, upload_case

PATHS = ("single", "splits1", "splits2", "splits7", "decoder", "tiled1", "tiled3")
DECODER_SEQS = 64
HOST_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_MODULES = {"attention_finalize": "paged_decode_attn_tiled"}

_decoders: weakref.WeakKeyDictionary[Rig, dict[object, Decoder]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Decoded:
    """What a path gave.

    Attributes:
        out: bfloat16 ``[num_seqs, num_q_heads, head_dim]``, or as a decoder was asked.
        lse: F32 of the same shape without head_dim, where the path has it.
        workspace: F32 ``[num_seqs, num_q_heads, num_splits, head_dim + 2]`` of a split path.
    """

    out: npt.NDArray[Any]
    lse: npt.NDArray[np.float32] | None = None
    workspace: npt.NDArray[np.float32] | None = None


def path_format_pairs() -> list[tuple[str, CacheFormat]]:
    """(path, format) for all that exist."""
    from cupaged.formats import FORMATS

    return [(path, fmt) for path in PATHS for fmt in FORMATS if offers(path, fmt)]


def offers(path: str, fmt: CacheFormat, window: int = 0) -> bool:
    """Whether the path decodes such a cache."""
    return not path.startswith("tiled") or window == 0


@functools.cache
def _parameters(launcher: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Positional names between ``kernel`` and ``stream``, and the keyword-only ones."""
    found = inspect.signature(getattr(ops, launcher)).parameters.values()
    positional = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    return tuple(positional[2:-1]), frozenset(p.name for p in found if p.kind is p.KEYWORD_ONLY)


def call(rig: Rig, launcher: str, stream: Any = None, /, **named: Any) -> None:
    """Call a launcher with those of the named arguments that it has."""
    positional, keywords = _parameters(launcher)
    module = _MODULES.get(launcher, launcher.replace("splitk_", ""))
    if "reduce" in module:
        module = "paged_decode_attn_reduce"
    getattr(ops, launcher)(
        rig.gpu,
        rig.kernel(module, launcher),
        *[named[name] for name in positional],
        rig.stream if stream is None else stream,
        **{name: value for name, value in named.items() if name in keywords},
    )


def arguments(up: UploadedCase) -> dict[str, Any]:
    """What the launchers call the parts of a case."""
    case, layout = up.case, up.case.layout
    return {
        "q": up.q,
        "k_cache": up.k.array,
        "v_cache": up.v.array,
        "block_tables": up.tables,
        "seq_lens": up.lengths,
        "max_blocks_per_seq": case.max_blocks_per_seq,
        "num_seqs": case.num_seqs,
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "inv_sqrt_d": case.inv_sqrt_d,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        "q_stride": case.q_stride,
        "cache_stride": layout.block_stride_bytes // (2 if layout.format == BF16 else 1),
        "block_stride_bytes": layout.block_stride_bytes,
        "data_section_bytes": layout.data_section_bytes,
        "sliding_window": case.window,
        "num_blocks": case.num_blocks,
    }


def guarded_nan(rig: Rig, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceGuarded:
    """NaN between guard bytes; uint16 is BF16."""
    host = Guarded.allocate(shape, dtype)
    host.array.reshape(-1).view(np.uint8)[...] = 0xFF
    return rig.upload_guarded(host)


def run(rig: Rig, case: PagedCase, path: str, **changed: Any) -> Decoded:
    """Upload a case, decode it, and check that nothing but the outputs changed."""
    up = upload_case(rig, case)
    found = run_uploaded(up, path, **changed)
    up.assert_pools_untouched()
    return found


def run_uploaded(up: UploadedCase, path: str, /, stream: Any = None, **changed: Any) -> Decoded:
    """Decode a case that is on the device, with some of the launcher's arguments changed."""
    rig, shape = up.rig, up.case.q.shape
    named = arguments(up) | changed
    if path == "decoder":
        return decode_case(up, None, stream, **changed)
    output = guarded_nan(rig, shape, np.uint16)
    if path.startswith("tiled"):
        lse = _run_tiled(up, named | {"output": output.array}, int(path[5:]), stream)
        return _finished(rig, output, lse=lse)
    fmt = up.case.layout.format.name
    if path == "single":
        call(rig, f"paged_decode_attn_{fmt}", stream, **named, output=output.array)
        return _finished(rig, output)
    splits = int(path.removeprefix("splits"))
    workspace = guarded_nan(rig, (*shape[:2], splits, shape[2] + 2), np.float32)
    named |= {"workspace": workspace.array, "output": output.array, "num_splits": splits}
    call(rig, f"paged_decode_attn_splitk_{fmt}", stream, **named)
    call(rig, f"paged_decode_attn_reduce_{'nvfp4' if fmt == 'nvfp4' else 'fp8'}", stream, **named)
    rig.assert_guards_intact(workspace)
    return _finished(rig, output, workspace=rig.download(workspace.array))


def _finished(rig: Rig, output: DeviceGuarded, dtype: str = "bfloat16", **parts: Any) -> Decoded:
    rig.assert_guards_intact(output)
    bits = rig.download(output.array).view(np.uint16)
    return Decoded(bits.view(HOST_DTYPES[dtype]), **parts)


def kept_decoder(rig: Rig, key: object, make: Callable[[], Decoder]) -> Decoder:
    """The rig's decoder of a kind, made once."""
    kept = _decoders.setdefault(rig, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def decoder_of(rig: Rig, case: PagedCase) -> Decoder:
    """The rig's decoder for such cases."""
    max_seqs = max(DECODER_SEQS, case.num_seqs)
    key = (case.layout, case.num_q_heads, max_seqs)
    return kept_decoder(rig, key, lambda: Decoder(rig.gpu, case.layout, case.num_q_heads, max_seqs))


def decode_guarded(
    rig: Rig, decoder: Decoder, shape: tuple[int, ...], arguments: dict[str, Any], dtype: str = "bfloat16"
) -> Decoded:
    """Decode into an output and an LSE of NaN between guard bytes: how every test runs a `Decoder`.

    Args:
        rig: the backend.
        decoder: of that backend.
        shape: of the output, ``[..., num_q_heads, head_dim]``.
        arguments: of `Decoder.decode`; an output or LSE among them takes the place of the guarded one.
        dtype: of the output, "bfloat16" or "float16".
    """
    output = guarded_nan(rig, shape, np.uint16 if dtype == "bfloat16" else np.float16)
    lse = guarded_nan(rig, shape[:-1], np.float32)
    decoder.decode(**{"output": output.array, "lse": lse.array, **arguments})
    rig.assert_guards_intact(lse)
    return _finished(rig, output, dtype, lse=rig.download(lse.array))


def decode_case(
    up: UploadedCase, decoder: Decoder | None = None, stream: Any = None, /, **changed: Any
) -> Decoded:
    """Decode a case that is on the device, by the rig's decoder for such cases or another."""
    decoder = decoder or decoder_of(up.rig, up.case)
    return decode_guarded(up.rig, decoder, up.case.q.shape, decoder_arguments(up, stream, **changed))


def decoder_arguments(up: UploadedCase, stream: Any = None, /, **changed: Any) -> dict[str, Any]:
    """What `Decoder.decode` calls the parts of a case, but for its outputs."""
    named = arguments(up) | changed
    names = ["q", "k_cache", "v_cache", "block_tables", "seq_lens", "num_seqs", "max_blocks_per_seq",
             "sliding_window", "q_stride", "num_blocks"]  # fmt: skip
    names += ["k_scale", "v_scale"] if up.case.layout.format == FP8 else []
    return {
        **{name: named[name] for name in names},
        "softmax_scale": named["inv_sqrt_d"],
        "stream": up.rig.stream if stream is None else stream,
    }


def _run_tiled(up: UploadedCase, named: dict[str, Any], capacity: int, stream: Any) -> Any:
    """Tiles of `capacity` blocks straight from the paged pools; lengths are the host's. Returns the LSE."""
    rig, case = up.rig, up.case
    heads, dim, size = case.layout.num_kv_heads, case.layout.head_dim, case.layout.block_size
    fmt = case.layout.format.name
    states = {
        "m_state": rig.gpu.asarray(np.full(case.q.shape[:2], -np.inf, np.float32)),
        "l_state": rig.gpu.zeros(case.q.shape[:2], np.float32),
        "o_state": rig.gpu.zeros(case.q.shape, np.float32),
    }
    named = named | states | {
        "q": rig.upload(case.q),
        "k_pool": named["k_cache"],
        "v_pool": named["v_cache"],
        "gqa_ratio": case.num_q_heads // heads,
        "tile_capacity": capacity,
        "blk_stride": named["cache_stride"],
        "tok_stride": heads * dim,
        "kvh_stride": dim,
        "last_block_valid_slots": size,
    }  # fmt: skip
    for ids, counts, valid in _tiles(case, capacity):
        call(
            rig,
            "paged_decode_attn_tiled" + {"bf16": ""}.get(fmt, f"_{fmt}"),
            stream,
            **named,
            tile_blocks=rig.upload(ids),
            tile_block_counts=rig.upload(counts),
            last_block_valid_slots_per_seq=rig.upload(valid),
        )
    call(rig, "attention_finalize", stream, **named)
    m, total = (rig.download(states[name]).astype(np.float64) for name in ("m_state", "l_state"))
    with np.errstate(divide="ignore"):
        return (m + np.log(total)).astype(np.float32)


def _tiles(case: PagedCase, capacity: int) -> Any:
    """Per tile: ids ``[num_seqs, capacity]``, counts, and tokens of the last block of each sequence.

    A length beyond the table asks for more blocks than a tile has.
    """
    size, width = case.layout.block_size, case.max_blocks_per_seq
    lengths = case.seq_lens.astype(np.int64)
    blocks = -(-lengths // size)
    for first in range(0, max(1, width), capacity):
        ids = np.full((case.num_seqs, capacity), case.options.unused_column, np.int32)
        part = case.block_tables[:, first : first + capacity]
        ids[:, : part.shape[1]] = part
        counts = np.clip(blocks - first, 0, capacity)
        last = (counts > 0) & (first + counts == blocks)
        valid = np.where(last, lengths - (blocks - 1) * size, size)
        outside = (lengths < 0) | (blocks > width)
        counts = np.where(outside, capacity + 1, counts)
        yield ids, counts.astype(np.int32), valid.astype(np.int32)
