"""``cupaged demo``: what it says where something is missing, and a conversation of several turns."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cupaged import cli
from cupaged.cli import demo
from cupaged.cli.status import DONE, FAILED, MISSING, MissingError
from examples.smollm2 import chat
from examples.smollm2.chat import Conversation, ConversationFullError, Rate
from examples.smollm2.weights import ModelNotFoundError, find_model


@pytest.fixture(scope="module")
def has_model() -> None:
    try:
        find_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_two_turns_in_one_cache(has_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--say", "What is the capital of France?", "--say", "And of Italy?"]
    assert cli.main(["demo", "--backend", "emulator", "--format", "fp8", "--max-tokens", "8", *said]) == DONE
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "> What is the capital of France?",
        "The capital of France is Paris.",
        "> And of Italy?",
        "The capital of Italy is Rome.",
    ]
    about, first, second = captured.err.splitlines()
    assert "on emulator (asked for), fp8 cache, 11,520 bytes a token, room for 2,048 tokens" in about
    sizes = [line.split("KV cache ")[1] for line in (first, second)]
    assert sizes[0] == "44 tokens, 495 KiB"
    assert int(sizes[1].split()[0]) > 60


def test_the_cache_holds_what_was_said(has_model: None) -> None:
    """A second turn answers as if the whole conversation had been taken in at once."""
    options: dict[str, Any] = {"backend": "emulator", "format_name": "bf16", "context": 256, "model": None}
    talk, whole = Conversation.start(**options), Conversation.start(**options)
    question, follow_up = "Name a colour.", "Another one."
    answer = "".join(talk.answer(question, 4))  # cut short: its last token is not in the cache yet
    assert talk.rate.num_tokens == 4
    tokens = talk._turn_ids(follow_up)
    scores = talk._session.gpu.to_host(talk._take_in(tokens))
    tokenizer = talk._tokenizer
    text = tokenizer.chat_prompt(question) + answer + tokenizer.next_turn(question, answer, follow_up)
    at_once = whole._session.gpu.to_host(whole._take_in(tokenizer.encode(text)))
    assert talk._cache.length == whole._cache.length
    assert scores.argmax() == at_once.argmax()
    assert np.linalg.norm(scores - at_once) <= 2e-3 * np.linalg.norm(at_once)


def test_a_full_cache_ends_the_conversation(has_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--backend", "emulator", "--context", "48", "--max-tokens", "9"]
    assert cli.main([*arguments, "--say", "Say yes.", "--say", "And now say no, please."]) == FAILED
    assert "the cache room for 48; begin another" in capsys.readouterr().err


# ---- what is missing


def test_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingError, match=r"(?s)part of the repository.*make demo"):
        demo.find_example(tmp_path)
    monkeypatch.setattr(demo, "_EXAMPLE", Path("examples/smollm2/absent.py"))
    assert cli.main(["demo"]) == MISSING
    assert "make demo" in capsys.readouterr().err


def test_no_package_that_the_example_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "examples.smollm2.chat")
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(MissingError, match=r"needs the Python package rich\.live: pip install .*\[demo\]"):
        demo.find_example()


def test_no_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> Path:
        raise ModelNotFoundError("not installed. Install it with\n    pip install it")

    monkeypatch.setattr(chat, "find_model", none)
    assert cli.main(["demo"]) == MISSING
    assert "pip install it" in capsys.readouterr().err


# ---- turns and screens


def test_turns_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  two  \n"))
    assert list(chat.turns(None)) == ["one", "two"]


def test_turns_from_a_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    for typed, expected in (("one\ntwo\n\nthree\n", ["one", "two"]), ("one\n", ["one"])):
        monkeypatch.setattr(sys, "stdin", Keyboard(typed))
        assert list(chat.turns(None)) == expected


class Speaker:
    """A conversation with an answer of its own."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self._said = 0

    def answer(self, text: str, max_tokens: int) -> Iterator[str]:
        for self._said, piece in enumerate(self._pieces, 1):  # noqa: B020
            yield piece

    def status(self) -> str:
        return f"{self._said} pieces"


def test_a_live_answer_keeps_its_text_and_shows_the_status() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20, color_system=None)
    speaker = Speaker("Once upon ", "a time there was", " a cache.\n", "\nThe end")
    chat._show_live(console, speaker, speaker.answer("", 9))  # type: ignore[arg-type]
    shown = out.getvalue()
    assert "4 pieces" in shown
    for line in ("Once upon a time", "there was a cache.", "The end"):
        assert line in shown


def test_a_rate_needs_two_tokens() -> None:
    assert Rate(num_tokens=1, seconds=0.0).tokens_per_second is None
    assert Rate(num_tokens=5, seconds=2.0).tokens_per_second == 2.0


def test_errors_are_told_apart() -> None:
    assert not issubclass(ConversationFullError, chat.NO_MODEL)
