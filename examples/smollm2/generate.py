"""Run the model: the prompt densely, every later token through the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupaged.backends.base import GpuBackend
from examples.smollm2.bf16 import to_bf16
from examples.smollm2.model import Transformer, causal_attention
from examples.smollm2.paged_cache import LayerTokens, PagedCache


@dataclass
class _Prefill:
    """Dense attention that keeps each layer's keys and values for the cache."""

    xp: Any
    layers: list[LayerTokens] = field(default_factory=list)

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        assert layer == len(self.layers)
        self.layers.append(LayerTokens(to_bf16(k), to_bf16(v)))
        return causal_attention(self.xp, q, k, v)


class Session:
    """One sequence: a model and the cache that holds what it has seen.

    Args:
        model: the transformer.
        cache: an empty cache on the same device.
    """

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self.gpu = cache.gpu

    def prefill(self, tokens: Sequence[int]) -> Any:
        """Take in the first tokens, at least one.

        Returns:
            Scores of the next token, float32 ``[vocab_size]`` on the device.
        """
        attention = _Prefill(self._model.xp)
        hidden = self._model.hidden(tokens, 0, attention)
        self._cache.store_prompt(attention.layers)
        return self._model.logits(hidden[-1:])[0]

    def step(self, token: int) -> Any:
        """Take in one more token; attention goes through the decode kernels.

        Returns:
            Scores of the next token, float32 ``[vocab_size]`` on the device.
        """
        position = self._cache.length
        attention = self._cache.begin_step()
        return self._model.logits(self._model.hidden([token], position, attention))[0]


def sample(gpu: GpuBackend, scores: Any, temperature: float, rng: np.random.Generator) -> int:
    """Pick a token: the best one at temperature 0, else at random with weights e^(score / temperature).

    Args:
        gpu: the backend that ``scores`` live on.
        scores: float32 ``[vocab_size]``.
        temperature: >= 0.
        rng: source of randomness.
    """
    if temperature == 0:
        return int(scores.argmax())
    scaled = gpu.to_host(scores).astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    eos: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """Token ids of the answer, one by one, without the one that ends it.

    Args:
        session: with an empty cache that has room for ``len(prompt) + max_tokens`` tokens.
        prompt: token ids, at least one.
        max_tokens: longest answer.
        eos: id that ends an answer.
        temperature: see `sample`.
        seed: of the random numbers; equal seeds give equal answers.
    """
    rng = np.random.default_rng(seed)
    scores = session.prefill(prompt)
    for count in range(1, max_tokens + 1):
        token = sample(session.gpu, scores, temperature, rng)
        if token == eos:
            return
        yield token
        if count < max_tokens:
            scores = session.step(token)
