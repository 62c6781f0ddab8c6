"""An independent forward pass to test against: float32 NumPy, no cache, every position at once.

It shares no code with `model.py` and takes another road to the same function: the rows of Q and K are
put back into the order of the original checkpoint, whose rotary embedding turns the first half of a head
against the second, and attention runs head by head over a full causal mask.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from examples.smollm2.weights import Float32, ModelConfig


def dense_logits(config: ModelConfig, tensors: dict[str, Float32], tokens: npt.ArrayLike) -> Float32:
    """Next-token scores after each token of a text.

    Args:
        config: hyper-parameters.
        tensors: weights under their GGUF names.
        tokens: ids, ``[num_tokens]``.

    Returns:
        float32 ``[num_tokens, vocab_size]``.
    """
    embedding = tensors["token_embd.weight"]
    stream = embedding[np.asarray(tokens)]
    for index in range(config.num_layers):
        weight = {
            name: tensors[f"blk.{index}.{name}.weight"]
            for name in (
                "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
                "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
            )
        }  # fmt: skip
        normed = _normalise(stream, weight["attn_norm"], config.rms_eps)
        stream = stream + _attention(config, weight, normed)
        normed = _normalise(stream, weight["ffn_norm"], config.rms_eps)
        gate = np.einsum("ti,oi->to", normed, weight["ffn_gate"], optimize=True)
        up = np.einsum("ti,oi->to", normed, weight["ffn_up"], optimize=True)
        swish = gate * np.exp(-np.logaddexp(0, -gate))
        stream = stream + np.einsum("ti,oi->to", swish * up, weight["ffn_down"], optimize=True)
    final = _normalise(stream, tensors["output_norm.weight"], config.rms_eps)
    logits = final.dot(tensors.get("output.weight", embedding).transpose())
    return np.asarray(logits, dtype=np.float32)


def unpermute_rows(weight: Float32, num_heads: int) -> Float32:
    """Rows of a Q or K matrix from GGUF order (pairs side by side) to checkpoint order (halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def rotate_halves(head: Float32, base: float) -> Float32:
    """Rotary embedding of one head at positions 0, 1, ...: ``[num_tokens, head_dim]``, halves paired."""
    num_tokens, size = head.shape
    frequency = np.exp(-np.log(base) * np.arange(size // 2) / (size // 2))
    angle = np.outer(np.arange(num_tokens), np.tile(frequency, 2))
    swapped = np.concatenate([-head[:, size // 2 :], head[:, : size // 2]], axis=1)
    return np.asarray(head * np.cos(angle) + swapped * np.sin(angle), dtype=np.float32)


def _attention(config: ModelConfig, weight: dict[str, Float32], x: Float32) -> Float32:
    size = config.head_dim
    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
    queries = np.split(x.dot(unpermute_rows(weight["attn_q"], q_heads).T), q_heads, axis=1)
    keys = np.split(x.dot(unpermute_rows(weight["attn_k"], kv_heads).T), kv_heads, axis=1)
    values = np.split(x.dot(weight["attn_v"].T), kv_heads, axis=1)
    visible = np.tri(len(x), dtype=bool)
    outputs = []
    for index, query in enumerate(queries):
        shared = index * kv_heads // q_heads
        rotated_q = rotate_halves(query, config.rope_base)
        rotated_k = rotate_halves(keys[shared], config.rope_base)
        scores = rotated_q.dot(rotated_k.T) / np.float32(np.sqrt(size))
        weights = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
        outputs.append((weights / weights.sum(axis=1, keepdims=True)).dot(values[shared]))
    return np.asarray(np.concatenate(outputs, axis=1).dot(weight["attn_output"].T), dtype=np.float32)


def _normalise(x: Float32, weight: Float32, eps: float) -> Float32:
    norm = np.linalg.norm(x, axis=1, keepdims=True) / np.sqrt(x.shape[1])
    return np.asarray(x / np.sqrt(norm**2 + eps) * weight, dtype=np.float32)
