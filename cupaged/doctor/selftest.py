"""A small case on each backend: write K and V into a paged cache, decode, compare with NumPy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupaged import ops
from cupaged.backends.cupy import installation
from cupaged.errors import BackendUnavailableError, CompileError, CupagedError

OK, FAILED, NOT_AVAILABLE = "OK", "FAILED", "not available"

_TOKENS, _Q_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 21, 4, 2, 64, 16
_MAX_ERROR = 5e-3
_AFTER_FAILURE = (
    "compile everything again: python -m cupaged cache --clear; if it stays, report it with the output of: "
    "python -m cupaged doctor --json"
)


@dataclass(frozen=True)
class Result:
    """How one backend did.

    Attributes:
        backend: its name.
        status: `OK`, `FAILED` or `NOT_AVAILABLE`.
        detail: what was compared, or what is wrong and how to mend it.
        seconds: how long it took, compiling included.
    """

    backend: str
    status: str
    detail: str
    seconds: float


def run_all() -> tuple[Result, ...]:
    """Test the emulator, then the GPU."""
    return (_tested("emulator", _make_emulator), _tested("cupy", _make_cupy))


def _make_emulator() -> Any:
    from cupaged.backends.emulator import EmulatorBackend

    return EmulatorBackend()


def _make_cupy() -> Any:
    from cupaged.backends.cupy import CupyBackend

    return CupyBackend()


def _tested(name: str, make: Callable[[], Any]) -> Result:
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cache that cannot be written is among the facts
            gpu = make()
            error = _relative_error(gpu)
        status = OK if error < _MAX_ERROR else FAILED
        target = "" if gpu.arch == gpu.name else f"compiled for {gpu.arch}, "
        detail = f"{target}write and decode, relative error to NumPy {error:.1e}"
        if status == FAILED:
            detail += f", allowed is {_MAX_ERROR:.0e}; {_AFTER_FAILURE}"
    except BackendUnavailableError as problem:
        status, detail = NOT_AVAILABLE, str(problem)
    except CompileError as problem:
        status, detail = FAILED, f"{problem}\n{_other_compiler(name)}"
    except Exception as problem:  # whatever goes wrong is the answer
        name_of_error = "" if isinstance(problem, CupagedError) else f"{type(problem).__name__}: "
        status, detail = FAILED, f"{name_of_error}{problem}\n{_AFTER_FAILURE}"
    return Result(name, status, detail, time.perf_counter() - start)


def _other_compiler(backend: str) -> str:
    if backend == "emulator":
        return "name another C++ compiler: export CXX=/path/to/g++"
    return f"install another NVRTC: {installation.install_command()}"


def _relative_error(gpu: Any) -> float:
    rng = np.random.default_rng(0)
    q, key, value = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((1, _Q_HEADS, _HEAD_DIM), *[(_TOKENS, _KV_HEADS, _HEAD_DIM)] * 2)
    )
    got = gpu.to_host(_decoded(gpu, q, key, value)).view(ml_dtypes.bfloat16)[0].astype(np.float64)
    expected = _attention(*(x.astype(np.float64) for x in (q[0], key, value)))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _decoded(gpu: Any, q: np.ndarray, key: np.ndarray, value: np.ndarray) -> Any:
    """BF16 output ``[1, q_heads, head_dim]`` on the device."""
    stream = gpu.null_stream()
    table = np.array([[2, 0]], np.int32)
    position = np.arange(_TOKENS)
    slots = table[0, position // _BLOCK].astype(np.int64) * _BLOCK + position % _BLOCK
    k_cache, v_cache = (gpu.zeros((3, _BLOCK, _KV_HEADS, _HEAD_DIM), ml_dtypes.bfloat16) for _ in range(2))
    row = _KV_HEADS * _HEAD_DIM
    ops.reshape_and_cache_bf16(
        gpu,
        gpu.kernel("reshape_and_cache_bf16", "reshape_and_cache_bf16"),
        gpu.asarray(key),
        gpu.asarray(value),
        k_cache,
        v_cache,
        gpu.asarray(slots),
        _TOKENS,
        _KV_HEADS,
        _HEAD_DIM,
        _BLOCK,
        row,
        row,
        stream,
    )
    output = gpu.empty(q.shape, ml_dtypes.bfloat16)
    ops.paged_decode_attn_bf16(
        gpu,
        gpu.kernel("paged_decode_attn_bf16", "paged_decode_attn_bf16"),
        gpu.asarray(q),
        k_cache,
        v_cache,
        output,
        gpu.asarray(table),
        gpu.asarray(np.array([_TOKENS], np.int32)),
        table.shape[1],
        1,
        _Q_HEADS,
        _KV_HEADS,
        _HEAD_DIM,
        _BLOCK,
        _HEAD_DIM**-0.5,
        _Q_HEADS * _HEAD_DIM,
        0,
        stream,
    )
    return output


def _attention(q: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Float64 attention of ``[heads, dim]`` over ``[tokens, kv_heads, dim]``."""
    k, v = (np.repeat(x, _Q_HEADS // _KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", q, k) / np.sqrt(_HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v))
