"""A GGUF file of a tiny random model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from examples.smollm2 import weights
from examples.smollm2.weights import ModelConfig

CONFIG = ModelConfig(
    name="tiny",
    num_layers=2,
    hidden_size=96,
    ffn_size=64,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rope_base=10000.0,
    rms_eps=1e-5,
    context_length=256,
    vocab_size=263,
)
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def tiny_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = weights.tensor_shapes(CONFIG)
    spread = {name: 1.0 if len(shape) == 1 else shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {
        name: (rng.normal(size=shape) * spread[name] + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", **extra: np.ndarray) -> None:
    letters = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    tokens = ["<|end|>", "<|user|>", "<|system|>", *letters, "ab", "abc", "Ġabc", "12"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(CONFIG.name)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.ffn_size)
    writer.add_head_count(CONFIG.num_q_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_rope_freq_base(CONFIG.rope_base)
    writer.add_layer_norm_rms_eps(CONFIG.rms_eps)
    writer.add_context_length(CONFIG.context_length)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "ab c", "Ġ abc", "1 2"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in (tiny_tensors() | extra).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
