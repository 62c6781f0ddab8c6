"""Which shapes are supported."""

from __future__ import annotations

from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.registry.entry import Scalars
from cupaged.registry.terms import div_ceil

SUPPORTED_HEAD_DIMS = tuple(range(16, 257, 16))
MAX_BLOCK_SIZE = 256
MAX_GQA_RATIO = 128
MAX_QUERY_TOKENS = 8
MAX_GROUP_TOKENS = 24  # of query tokens that all see the whole sequence
LATENCY_LEVELS = 4  # shapes of a kernel for smaller and smaller batches

_FLAGS = ("joined", "heads_first", "causal", "soft_cap", "query_f16", "many")


def head_tiles(gqa_ratio: int) -> int:
    """Groups of 8 query heads that one warp works on."""
    return div_ceil(gqa_ratio, 8)


def check_head_dim(head_dim: int) -> None:
    """Raise ArgumentValueError unless kernels exist for this head_dim."""
    if head_dim not in SUPPORTED_HEAD_DIMS:
        allowed = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
        raise ArgumentValueError(f"head_dim: got {head_dim}, allowed are {allowed}")


def check_block_size(block_size: int) -> None:
    """Raise ArgumentValueError unless kernels exist for this block_size."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ArgumentValueError(f"block_size: got {block_size}, allowed is 1 to {MAX_BLOCK_SIZE}")


def head_dim_spec(scalars: Scalars) -> dict[str, int]:
    """The spec of kernels that are compiled for a head_dim alone."""
    check_head_dim(scalars["head_dim"])
    return {"head_dim": scalars["head_dim"]}


def check_constant(name: str, value: int | str) -> None:
    """Raise ArgumentValueError, or ArgumentTypeError, for a compile-time constant no kernel can have."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: got {value!r}, allowed is an int")
    if name == "head_dim":
        check_head_dim(value)
    elif name == "block_size":
        check_block_size(value)
    elif name == "num_kv_heads" and value < 1:
        raise ArgumentValueError(f"num_kv_heads: got {value}, allowed is 1 or more")
    elif name in _FLAGS and value not in (0, 1):
        raise ArgumentValueError(f"{name}: got {value}, allowed are 0 and 1")
    elif name in ("key_format", "value_format") and value not in (0, 1, 2):
        raise ArgumentValueError(f"{name}: got {value}, allowed are 0 (bf16), 1 (fp8) and 2 (nvfp4)")
    elif name == "latency" and value not in range(LATENCY_LEVELS):
        raise ArgumentValueError(f"latency: got {value}, allowed are 0 to {LATENCY_LEVELS - 1}")
    elif name == "query_tokens" and not 1 <= value <= MAX_GROUP_TOKENS:
        raise ArgumentValueError(f"{name}: got {value}, allowed is 1 to {MAX_GROUP_TOKENS}")
    elif name == "gqa_ratio" and not 1 <= value <= MAX_GQA_RATIO:
        raise ArgumentValueError(f"gqa_ratio: got {value}, allowed is 1 to {MAX_GQA_RATIO}")


def gqa_ratio(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads a KV head.

    Raises:
        ArgumentValueError: not a whole ratio of 1 to 128, or no heads at all.
    """
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {num_q_heads}, {num_kv_heads}; "
            "num_q_heads must be a positive multiple of num_kv_heads"
        )
    ratio = num_q_heads // num_kv_heads
    if ratio > MAX_GQA_RATIO:
        raise ArgumentValueError(
            f"num_q_heads, num_kv_heads: got {num_q_heads}, {num_kv_heads} (ratio {ratio}); "
            f"allowed are ratios of 1 to {MAX_GQA_RATIO}"
        )
    return ratio
