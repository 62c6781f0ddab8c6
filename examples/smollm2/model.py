"""The transformer in NumPy or CuPy, float32; attention is the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from examples.smollm2.weights import Checkpoint


class Attention(Protocol):
    """Attention over the tokens of one forward call and whatever the callable keeps of earlier ones."""

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Attend.

        Args:
            layer: index of the layer.
            q: float32 ``[num_tokens, num_q_heads, head_dim]``, rotated.
            k: float32 ``[num_tokens, num_kv_heads, head_dim]``, rotated.
            v: float32 ``[num_tokens, num_kv_heads, head_dim]``.

        Returns:
            float32 ``[num_tokens, num_q_heads, head_dim]``.
        """


@dataclass(frozen=True)
class _Layer:
    # Matrices are [out_features, in_features]; those that share an input are stacked, one product each.
    attn_norm: Any
    qkv: Any
    attn_output: Any
    ffn_norm: Any
    gate_up: Any
    down: Any


class Transformer:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Args:
        checkpoint: hyper-parameters and weights.
        xp: the array module, ``numpy`` or ``cupy``; weights are copied to it once.
    """

    def __init__(self, checkpoint: Checkpoint, xp: Any) -> None:
        self.config = checkpoint.config
        self.xp = xp
        tensors = checkpoint.tensors
        self._embedding = xp.asarray(tensors["token_embd.weight"])
        self._output_norm = xp.asarray(tensors["output_norm.weight"])
        # Tied weights: without a matrix of its own, the output layer is the embedding.
        self._output = xp.asarray(tensors["output.weight"]) if "output.weight" in tensors else self._embedding
        self._layers = [self._load_layer(tensors, i) for i in range(self.config.num_layers)]
        self._cos, self._sin = self._rotary_tables()

    def _load_layer(self, tensors: dict[str, Any], index: int) -> _Layer:
        def get(*names: str) -> Any:
            parts = [tensors[f"blk.{index}.{name}.weight"] for name in names]
            return self.xp.asarray(np.concatenate(parts) if len(parts) > 1 else parts[0])

        return _Layer(
            attn_norm=get("attn_norm"),
            qkv=get("attn_q", "attn_k", "attn_v"),
            attn_output=get("attn_output"),
            ffn_norm=get("ffn_norm"),
            gate_up=get("ffn_gate", "ffn_up"),
            down=get("ffn_down"),
        )

    def _rotary_tables(self) -> tuple[Any, Any]:
        """cos and sin of position * base^(-2i/head_dim): float32 ``[context_length, 1, head_dim / 2]``."""
        exponents = np.arange(0, self.config.head_dim, 2) / self.config.head_dim
        frequencies = self.config.rope_base**-exponents
        angles = np.arange(self.config.context_length)[:, None, None] * frequencies
        return tuple(self.xp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))

    def hidden(self, tokens: Sequence[int] | Any, start: int, attention: Attention) -> Any:
        """Final normalised hidden states of consecutive tokens.

        Args:
            tokens: ids, ``[num_tokens]``: a sequence, or an integer array of this model's module.
            start: position of the first of them.
            attention: called once a layer, in order.

        Returns:
            float32 ``[num_tokens, hidden_size]``.

        Raises:
            ValueError: the positions go beyond the model's context length.
        """
        ids = self.xp.asarray(tokens)
        stop = start + len(ids)
        if stop > self.config.context_length:
            limit = self.config.context_length
            raise ValueError(f"position {stop - 1} is beyond the model's context of {limit} tokens")
        cos, sin = self._cos[start:stop], self._sin[start:stop]
        x = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            attended = attention(index, q, k, v).reshape(len(ids), -1)
            x = x + attended @ layer.attn_output.T
            x = x + self._feed_forward(layer, x)
        return self._rms_norm(x, self._output_norm)

    def logits(self, hidden: Any) -> Any:
        """Next-token scores: float32 ``[num_tokens, vocab_size]`` of ``[num_tokens, hidden_size]``."""
        return hidden @ self._output.T

    def _project(self, layer: _Layer, x: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
        cfg = self.config
        heads = self._rms_norm(x, layer.attn_norm) @ layer.qkv.T
        heads = heads.reshape(len(x), cfg.num_q_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
        first_v = cfg.num_q_heads + cfg.num_kv_heads
        rotated = self._rotate(heads[:, :first_v], cos, sin)
        return rotated[:, : cfg.num_q_heads], rotated[:, cfg.num_q_heads :], heads[:, first_v:]

    def _rotate(self, heads: Any, cos: Any, sin: Any) -> Any:
        # GGUF stores the rows of Q and K so that the two members of a rotated pair are neighbours.
        even, odd = heads[..., 0::2], heads[..., 1::2]
        rotated = self.xp.empty_like(heads)
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = even * sin + odd * cos
        return rotated

    def _feed_forward(self, layer: _Layer, x: Any) -> Any:
        gate_up = self._rms_norm(x, layer.ffn_norm) @ layer.gate_up.T
        gate, up = gate_up[:, : self.config.ffn_size], gate_up[:, self.config.ffn_size :]
        # gate * sigmoid(gate), in a form that cannot overflow
        swish = gate * (0.5 * self.xp.tanh(0.5 * gate) + 0.5)
        return (swish * up) @ layer.down.T

    def _rms_norm(self, x: Any, weight: Any) -> Any:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean_square + self.config.rms_eps) * weight


def causal_attention(xp: Any, q: Any, k: Any, v: Any, *, rows: int = 256) -> Any:
    """Dense causal grouped-query attention of tokens over themselves.

    Args:
        xp: array module of the arrays.
        q: float32 ``[num_tokens, num_q_heads, head_dim]``.
        k: float32 ``[num_tokens, num_kv_heads, head_dim]``.
        v: as ``k``.
        rows: queries taken at a time, which bounds the memory for scores.

    Returns:
        float32, the shape of ``q``.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim).transpose(1, 2, 0, 3)
    keys = k.transpose(1, 2, 0)[:, None]
    values = v.transpose(1, 0, 2)[:, None]
    positions = xp.arange(num_tokens)
    out = xp.empty_like(q)
    for first in range(0, num_tokens, rows):
        last = min(first + rows, num_tokens)
        scores = grouped[:, :, first:last] @ keys[..., :last] * np.float32(head_dim**-0.5)
        scores = xp.where(positions[None, :last] > positions[first:last, None], -np.inf, scores)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = weights @ values[:, :, :last]
        out[first:last] = attended.transpose(2, 0, 1, 3).reshape(last - first, num_q_heads, head_dim)
    return out
