"""What a cache format costs: the model forced along a text, its scores compared with the BF16 cache's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.smollm2.device import Device
from examples.smollm2.generate import Session
from examples.smollm2.model import Transformer
from examples.smollm2.paged_cache import PagedCache
from examples.smollm2.weights import Float32

TEXT_FILE = Path(__file__).with_name("text.txt")
FORMATS = ("bf16", "fp8", "nvfp4")

# Tokens of the text taken in densely, and those fed through the decode kernels after them: the last of
# these sees a context of 128 tokens.
PREFILL_TOKENS = 28
FORCED_TOKENS = 100


@dataclass(frozen=True)
class FormatResult:
    """One row of the table.

    Attributes:
        format: cache format.
        kv_bytes_per_token: keys, values and scales of one token in all layers.
        tokens_per_second: decode steps a second.
        top1_agreement: share of positions where the best token is that of the BF16 cache.
        perplexity: of the forced tokens' successors.
        kl_to_bf16: mean over positions of KL(BF16 cache || this format), nats.
        num_tokens: positions all of these are taken over.
    """

    format: str
    kv_bytes_per_token: int
    tokens_per_second: float
    top1_agreement: float
    perplexity: float
    kl_to_bf16: float
    num_tokens: int


@dataclass(frozen=True)
class ForcedRun:
    """Scores along a text: float32 ``[num_tokens, vocab_size]``, and what they took.

    Attributes:
        logits: row i are the scores after forced token i.
        seconds: wall-clock time of the decode steps.
        kv_bytes_per_token: of the cache.
    """

    logits: Float32
    seconds: float
    kv_bytes_per_token: int


def forced_run(
    device: Device, model: Transformer, format_name: str, tokens: Sequence[int], *, prefill: int
) -> ForcedRun:
    """Feed a text: its first ``prefill`` tokens densely, each later one through the decode kernels.

    Args:
        device: where to run.
        model: on that device.
        format_name: of the cache.
        tokens: ids of the text.
        prefill: at least 1 and less than ``len(tokens)``.
    """
    cache = PagedCache(device, model.config, format_name, len(tokens))
    session = Session(model, cache)
    session.prefill(tokens[:prefill])
    device.gpu.synchronize()
    begin = time.perf_counter()
    rows = [device.gpu.to_host(session.step(token)) for token in tokens[prefill:]]
    seconds = time.perf_counter() - begin
    return ForcedRun(np.stack(rows), seconds, cache.bytes_per_token)


def evaluate(
    device: Device,
    model: Transformer,
    tokens: Sequence[int],
    *,
    on_format: Callable[[str], None] = lambda _: None,
) -> list[FormatResult]:
    """The table: one row for each of `FORMATS` over the same forced tokens.

    Args:
        device: where to run.
        model: on that device.
        tokens: ids of a text, more than ``PREFILL_TOKENS + FORCED_TOKENS``.
        on_format: told each format's name before its run.

    Raises:
        ValueError: the text is too short.
    """
    last = PREFILL_TOKENS + FORCED_TOKENS
    if len(tokens) <= last:
        raise ValueError(f"the text has {len(tokens)} tokens; more than {last} are needed")
    successors = np.asarray(tokens[PREFILL_TOKENS + 1 : last + 1])
    results: list[FormatResult] = []
    baseline: npt.NDArray[np.float64] | None = None
    # One step before the clock runs: on a GPU the array module compiles its own kernels when first used.
    forced_run(device, model, FORMATS[0], tokens[: PREFILL_TOKENS + 1], prefill=PREFILL_TOKENS)
    for name in FORMATS:
        on_format(name)
        run = forced_run(device, model, name, tokens[:last], prefill=PREFILL_TOKENS)
        log_p = log_softmax(run.logits)
        baseline = log_p if baseline is None else baseline
        results.append(_compare(name, run, log_p, baseline, successors))
    return results


def _compare(
    name: str,
    run: ForcedRun,
    log_p: npt.NDArray[np.float64],
    baseline: npt.NDArray[np.float64],
    successors: npt.NDArray[np.int64],
) -> FormatResult:
    return FormatResult(
        format=name,
        kv_bytes_per_token=run.kv_bytes_per_token,
        tokens_per_second=len(log_p) / run.seconds,
        top1_agreement=float((log_p.argmax(axis=1) == baseline.argmax(axis=1)).mean()),
        perplexity=perplexity(log_p, successors),
        kl_to_bf16=float((np.exp(baseline) * (baseline - log_p)).sum(axis=1).mean()),
        num_tokens=len(log_p),
    )


def log_softmax(logits: Float32) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities, row by row, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def perplexity(log_p: npt.NDArray[np.float64], successors: npt.ArrayLike) -> float:
    """e^(mean negative log-probability) of the token that follows each row."""
    rows = np.arange(len(log_p))
    return float(np.exp(-log_p[rows, np.asarray(successors)].mean()))
