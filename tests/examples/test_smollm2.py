"""The real model: its tokeniser, and its text decoded through a paged cache on the emulator."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cupaged.formats import cache_format
from examples.smollm2 import demo
from examples.smollm2.dense_reference import dense_logits
from examples.smollm2.device import Device, choose_device
from examples.smollm2.evaluate import TEXT_FILE, ForcedRun, forced_run, log_softmax, perplexity
from examples.smollm2.model import Transformer
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import Checkpoint, ModelNotFoundError, find_model, load_checkpoint

# The first token is the only one taken in densely: contexts from 2 tokens to one more than FORCED, which
# crosses from a single pass over one block to several splits.
PREFILL, FORCED = 1, 130


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    try:
        return load_checkpoint(find_model())
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ChatTokenizer:
    return ChatTokenizer(checkpoint.tokenizer)


@pytest.fixture(scope="module")
def device() -> Device:
    return choose_device("emulator")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint, device: Device) -> Transformer:
    return Transformer(checkpoint, device.xp)


@pytest.fixture(scope="module")
def text_ids(tokenizer: ChatTokenizer) -> list[int]:
    return tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dense(checkpoint: Checkpoint, text_ids: list[int]) -> np.ndarray:
    """Dense float32 scores at the forced positions."""
    logits = dense_logits(checkpoint.config, checkpoint.tensors, text_ids[: PREFILL + FORCED])
    return logits[PREFILL:]


@pytest.fixture(scope="module")
def bf16_run(device: Device, model: Transformer, text_ids: list[int]) -> ForcedRun:
    return forced_run(device, model, "bf16", text_ids[: PREFILL + FORCED], prefill=PREFILL)


def test_bf16_cache_gives_the_dense_scores(bf16_run: ForcedRun, dense: np.ndarray) -> None:
    difference = bf16_run.logits.astype(np.float64) - dense
    assert np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(dense)
    each = np.linalg.norm(difference, axis=1) / np.linalg.norm(dense, axis=1)
    assert each.max() <= 3e-2, f"position {each.argmax()}: {each.max():.4f}"


def test_bf16_cache_keeps_the_best_token_where_it_is_clear(bf16_run: ForcedRun, dense: np.ndarray) -> None:
    second, best = np.partition(dense, -2, axis=1)[:, -2:].T
    clear = best - second > np.abs(bf16_run.logits - dense).max(axis=1)
    assert clear.sum() > FORCED // 2
    np.testing.assert_array_equal(bf16_run.logits.argmax(axis=1)[clear], dense.argmax(axis=1)[clear])


def test_perplexity_of_the_committed_text(
    bf16_run: ForcedRun, dense: np.ndarray, text_ids: list[int]
) -> None:
    successors = text_ids[PREFILL + 1 : PREFILL + FORCED + 1]
    paged = perplexity(log_softmax(bf16_run.logits), successors)
    assert paged < 40
    assert paged == pytest.approx(perplexity(log_softmax(dense), successors), rel=0.02)


@pytest.mark.parametrize(("name", "largest_kl"), [("fp8", 0.02), ("nvfp4", 0.2)])
def test_quantised_caches_stay_near_the_bf16_cache(
    name: str, largest_kl: float, device: Device, model: Transformer, text_ids: list[int], bf16_run: ForcedRun
) -> None:
    first, count = 64, 12
    run = forced_run(device, model, name, text_ids[: first + count], prefill=first)
    log_p = log_softmax(run.logits)
    log_q = log_softmax(bf16_run.logits[first - PREFILL :][:count])
    kl = (np.exp(log_q) * (log_q - log_p)).sum(axis=1).mean()
    assert 0 < kl < largest_kl
    assert run.kv_bytes_per_token < bf16_run.kv_bytes_per_token


def test_bytes_per_token(bf16_run: ForcedRun, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert bf16_run.kv_bytes_per_token == elements * cache_format("bf16").dtype.itemsize == 23040


def test_demo_answers_and_writes_json(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "out.json"
    arguments = ["--prompt", "What is the capital of France?", "--backend", "emulator"]
    limits = ["--max-tokens", "7", "--no-table", "--json", str(path)]
    result = CliRunner().invoke(demo.app, arguments + limits)
    assert result.exit_code == 0, result.output
    assert "Backend: emulator (asked for)" in result.output
    written = json.loads(path.read_text())
    assert written["backend"] == "emulator"
    assert written["answer"]["text"].startswith("The capital of France is Paris")
    assert written["answer"]["text"] in result.output


# Texts, and how the SmolLM pre-tokeniser cuts them: every number character alone, then words with one
# leading space, contractions, punctuation, and spaces of which the last goes to the word behind them.
CUT_TEXTS = [
    ("The capital of France is Paris.", ["The", " capital", " of", " France", " is", " Paris", "."]),
    ("It's 1,280 m", ["It", "'s", " ", "1", ",", "2", "8", "0", " m"]),
    ("  two\n\n  lines", [" ", " two", "\n\n ", " lines"]),
    ("naïve café – ½ 日本語 😀!", ["na\u00efve", " caf\u00e9", " –", " ", "½", " 日本語", " 😀!"]),
    ("def f(x):\n\treturn x", ["def", " f", "(", "x", "):", "\n", "\t", "return", " x"]),
    ("unbelievably antidisestablishmentarianism", ["unbelievably", " antidisestablishmentarianism"]),
]


@pytest.mark.parametrize(("text", "words"), CUT_TEXTS)
def test_token_ids_equal_a_naive_bpe(
    text: str, words: list[str], tokenizer: ChatTokenizer, checkpoint: Checkpoint
) -> None:
    assert "".join(words) == text
    ids = {token: index for index, token in enumerate(checkpoint.tokenizer.tokens)}
    ranks = {rule: rank for rank, rule in enumerate(checkpoint.tokenizer.merges)}
    expected = [ids[part] for word in words for part in naive_bpe(word, ranks)]
    assert tokenizer.encode(text) == expected


def naive_bpe(word: str, ranks: dict[str, int]) -> list[str]:
    """Merge the pair with the lowest rank, leftmost first, until no pair has one."""
    letters = byte_letters()
    parts = [letters[byte] for byte in word.encode()]
    while True:
        ranked = [(ranks.get(f"{a} {b}"), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        candidates = [(rank, i) for rank, i in ranked if rank is not None]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def byte_letters() -> dict[int, str]:
    """GPT-2's visible letter for each byte: itself where it prints, else the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


@pytest.mark.parametrize(
    "text", [text for text, _ in CUT_TEXTS] + ["", " ", "\r\n\t", "e\u0301 \u200b\u00a0"]
)
def test_text_survives_a_round_trip(text: str, tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids)) == text


def test_control_tokens_are_single_ids_and_hidden_from_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.eos == 2
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, *tokenizer.encode("user\nhi"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert tokenizer.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"


def test_stream_holds_back_incomplete_characters(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a 😀")
    assert "\ufffd" in tokenizer.decode(ids[:-1])
    assert list(tokenizer.stream(ids)) == ["a", " 😀"]
    assert "".join(tokenizer.stream(ids[:-1])) == tokenizer.decode(ids[:-1])


def test_chat_prompt(tokenizer: ChatTokenizer) -> None:
    turn = "<|im_start|>user\nHi {{ x }}<|im_end|>\n<|im_start|>assistant\n"
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.chat_prompt("Hi {{ x }}") == f"<|im_start|>system\n{default}<|im_end|>\n{turn}"
    assert tokenizer.chat_prompt("Hi {{ x }}", system="Be brief.") == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
    )
