"""A conversation of several turns over one paged KV cache: ``cupaged demo``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from examples.smollm2.device import choose_device
from examples.smollm2.generate import Session, sample
from examples.smollm2.model import Transformer
from examples.smollm2.paged_cache import PagedCache
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import (
    ModelNotFoundError,
    UnsupportedModelError,
    find_model,
    load_checkpoint,
)

NO_MODEL = (ModelNotFoundError, UnsupportedModelError)


class ConversationFullError(RuntimeError):
    """The cache has no room for another turn."""


@dataclass
class Rate:
    """How fast an answer comes.

    Attributes:
        num_tokens: generated so far.
        prompt_tokens: of the turn, taken in before the first of them.
        prompt_seconds: how long that took.
        seconds: since the first token.
    """

    num_tokens: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None before there is one."""
        return (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 and self.seconds > 0 else None


class Conversation:
    """Turns of a user and a model. Everything said stays in the cache; nothing is computed twice.

    Args:
        session: the model with an empty cache.
        cache: that cache.
        tokenizer: of the model.
        context: tokens that the cache has room for.
        system: system prompt; None leaves the model's own.
        temperature: see `examples.smollm2.generate.sample`.
        seed: of the random numbers.
        about: model and backend, in words.

    Attributes:
        rate: of the newest answer.
    """

    def __init__(
        self, session: Session, cache: PagedCache, tokenizer: ChatTokenizer, context: int, *,
        system: str | None = None, temperature: float = 0.0, seed: int = 0, about: str = "",
    ) -> None:  # fmt: skip
        self._session, self._cache, self._tokenizer, self._context = session, cache, tokenizer, context
        self._system, self._temperature = system, temperature
        self._rng = np.random.default_rng(seed)
        self._about = about
        self._last_turn: tuple[str, str] | None = None
        self._pending: list[int] = []  # said, but not in the cache yet
        self.rate = Rate()

    @classmethod
    def start(
        cls, *, backend: str, format_name: str, context: int, model: Path | None, **options: Any
    ) -> Conversation:
        """Load the model and make the cache.

        Raises:
            ModelNotFoundError, UnsupportedModelError: of `NO_MODEL`.
            BackendUnavailableError: the backend asked for by name cannot run here.
        """
        checkpoint = load_checkpoint(model or find_model())
        device = choose_device(backend)
        context = min(context, checkpoint.config.context_length)
        cache = PagedCache(device, checkpoint.config, format_name, context)
        session = Session(Transformer(checkpoint, device.xp), cache)
        about = f"{checkpoint.config.name} on {device.gpu.name} ({device.reason}), {format_name} cache"
        return cls(session, cache, ChatTokenizer(checkpoint.tokenizer), context, about=about, **options)

    def introduction(self) -> str:
        """What talks, and what its cache takes."""
        return (
            f"{self._about}, {self._cache.bytes_per_token:,} bytes a token, room for {self._context:,} tokens"
        )

    def status(self) -> str:
        """Speed of the newest answer and size of the cache, in a line."""
        rate, length = self.rate, self._cache.length
        speed = "" if rate.tokens_per_second is None else f"{rate.tokens_per_second:.1f} tokens/s, "
        kib = length * self._cache.bytes_per_token / 1024
        return f"{rate.num_tokens} tokens, {speed}KV cache {length:,} tokens, {kib:,.0f} KiB"

    def answer(self, text: str, max_tokens: int) -> Iterator[str]:
        """The model's answer, piece by piece.

        Args:
            text: the user's turn.
            max_tokens: longest answer.

        Raises:
            ConversationFullError: the turn and one token do not fit into the cache.
        """
        ids = self._turn_ids(text)
        room = self._context - self._cache.length - len(ids)
        if room < 1:
            raise ConversationFullError(
                f"the conversation has {self._cache.length:,} tokens, the cache room for {self._context:,}; "
                "begin another, or give it more with --context"
            )
        begin = time.perf_counter()
        scores = self._take_in(ids)
        self.rate = Rate(prompt_tokens=len(ids), prompt_seconds=time.perf_counter() - begin)
        pieces = []
        for piece in self._tokenizer.stream(self._generated(scores, min(max_tokens, room))):
            pieces.append(piece)
            yield piece
        self._last_turn = (text, "".join(pieces))

    def _turn_ids(self, text: str) -> list[int]:
        if self._last_turn is None:
            return self._tokenizer.encode(self._tokenizer.chat_prompt(text, system=self._system))
        between = self._tokenizer.next_turn(*self._last_turn, text, system=self._system)
        return self._pending + self._tokenizer.encode(between)

    def _take_in(self, ids: list[int]) -> Any:
        """Put a turn into the cache; the first at once, later ones, which attend over the cache, by token."""
        self._pending = []
        if self._cache.length == 0:
            return self._session.prefill(ids)
        scores = None
        for token in ids:
            scores = self._session.step(token)
        return scores

    def _generated(self, scores: Any, max_tokens: int) -> Iterator[int]:
        first = 0.0
        for count in range(1, max_tokens + 1):
            token = sample(self._session.gpu, scores, self._temperature, self._rng)
            if token == self._tokenizer.eos:
                return  # the template's next turn begins with it
            now = time.perf_counter()
            first = first or now
            self.rate.num_tokens, self.rate.seconds = count, now - first
            self._pending = [token]
            yield token
            if count < max_tokens:
                self._pending = []
                scores = self._session.step(token)


def turns(given: list[str] | None) -> Iterator[str]:
    """The user's turns: those given, or those typed, or the lines of what is piped in."""
    if given is not None:
        for text in given:
            print(f"> {text}")
            yield text
    elif sys.stdin.isatty():
        while text := _typed():
            yield text
    else:
        yield from (line.strip() for line in sys.stdin if line.strip())


def _typed() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def talk(conversation: Conversation, said: Iterable[str], max_tokens: int, *, live: bool) -> None:
    """Answer each turn; live: with speed and cache size below the growing text, else after it on stderr."""
    console = Console(highlight=False)
    for text in said:
        pieces = conversation.answer(text, max_tokens)
        if live:
            _show_live(console, conversation, pieces)
            continue
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
        print(conversation.status(), file=sys.stderr)


def _show_live(console: Console, conversation: Conversation, pieces: Iterable[str]) -> None:
    line = ""

    def shown() -> Group:
        return Group(Text(line), Text(conversation.status(), style="dim"))

    with Live(shown(), console=console, auto_refresh=False) as display:
        for piece in pieces:
            *whole, line = Text(line + piece).wrap(console, console.width)
            line = line.plain
            for finished in whole:
                console.print(finished)
            display.update(shown(), refresh=True)
