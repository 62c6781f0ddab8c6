"""What compares cache formats: their scales, the table, and the command."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cupaged.formats import FORMATS, cache_format
from examples.smollm2 import cache_kernels, demo, paged_cache
from examples.smollm2.bf16 import to_bf16
from examples.smollm2.device import Device
from examples.smollm2.evaluate import app, evaluate, forced_run
from examples.smollm2.generate import Session
from examples.smollm2.model import Transformer
from examples.smollm2.paged_cache import BLOCK_SIZE, PagedCache
from examples.smollm2.scales import absmax_scales
from examples.smollm2.weights import Checkpoint
from tests.examples.tiny_model import CONFIG, write_gguf

ROOT = Path(__file__).resolve().parents[2]


def test_every_format_is_offered() -> None:
    names = [fmt.name for fmt in FORMATS]
    assert list(cache_kernels.KERNELS) == list(typing.get_args(demo.Format)) == names


def test_a_cache_without_its_scales_is_refused(tiny: Checkpoint, device: Device) -> None:
    """With the scale 1, FP8's smallest step is near what keys and values are."""
    session = Session(Transformer(tiny, device.xp), PagedCache(device, tiny.config, "fp8", BLOCK_SIZE))
    with pytest.raises(ValueError, match="k_scale and v_scale: got None and None"):
        session.step(5)


def test_a_format_that_needs_scales_is_found_by_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tiny: Checkpoint, device: Device
) -> None:
    """FP8's bytes under another largest value: the prompt is scaled to that, with its class's headroom."""
    fp8 = cache_format("fp8")
    other = dataclasses.replace(fp8, largest=127.0)

    class Kernels(cache_kernels.Fp8Kernels):
        headroom = 2.0

    monkeypatch.setattr(paged_cache, "cache_format", lambda name: other)
    monkeypatch.setitem(cache_kernels.KERNELS, "fp8", Kernels)
    cache = PagedCache(device, tiny.config, "fp8", BLOCK_SIZE)
    key = to_bf16(np.full((3, CONFIG.num_kv_heads, CONFIG.head_dim), -4.0, np.float32))
    cache.store_prompt([paged_cache.LayerTokens(key, 2 * key & 0)] * CONFIG.num_layers)
    assert {(pools.k_scale, pools.v_scale) for pools in cache.pools} == {(2.0 * 4.0 / 127.0, 1.0)}
    monkeypatch.setattr(Kernels, "headroom", None)
    with pytest.raises(TypeError, match="headroom: got None; fp8 needs scales"):
        PagedCache(device, tiny.config, "fp8", BLOCK_SIZE)


def test_scales_reach_the_largest_value(device: Device) -> None:
    tensors = [to_bf16(np.array([[[1.0, -3.0]]] * n, np.float32)) for n in (1, 5)]
    assert absmax_scales(device.gpu, tensors, 6.0, 1.5, device.gpu.null_stream()) == [0.75, 0.75]


def test_the_table_agrees_with_the_scores(tiny: Checkpoint, device: Device) -> None:
    tokens = np.random.default_rng(9).integers(0, CONFIG.vocab_size, 129).tolist()
    model = Transformer(tiny, device.xp)
    seen: list[str] = []
    rows = evaluate(device, model, tokens, on_format=seen.append)
    assert seen == [row.format for row in rows] == ["bf16", "fp8", "nvfp4"]
    log_p = {}
    for row, values in zip(rows, (2, 1, 0.5 + 1 / 16), strict=True):
        logits = forced_run(device, model, row.format, tokens[:128], prefill=28).logits.astype(np.float64)
        log_p[row.format] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        p, log_q = np.exp(log_p["bf16"]), log_p[row.format]
        losses = [-log_q[i, tokens[29 + i]] for i in range(100)]
        assert row.num_tokens == 100
        assert row.perplexity == pytest.approx(np.exp(np.mean(losses)))
        assert row.kl_to_bf16 == pytest.approx((p * np.log(p / np.exp(log_q))).sum() / 100, abs=1e-12)
        assert row.top1_agreement == np.mean(p.argmax(axis=1) == log_q.argmax(axis=1))
        assert row.kv_bytes_per_token == 2 * CONFIG.num_layers * CONFIG.num_kv_heads * 64 * values
        assert row.tokens_per_second > 0
    assert rows[0].kl_to_bf16 == 0 < rows[1].kl_to_bf16 < rows[2].kl_to_bf16


def test_some_formats_and_tokens(tiny: Checkpoint, device: Device) -> None:
    tokens = np.random.default_rng(9).integers(0, CONFIG.vocab_size, 40).tolist()
    rows = evaluate(device, Transformer(tiny, device.xp), tokens, formats=["nvfp4"], forced=3)
    assert [(row.format, row.num_tokens) for row in rows] == [("bf16", 3), ("nvfp4", 3)]
    with pytest.raises(ValueError, match="formats: got 'int3'; allowed are bf16"):
        evaluate(device, Transformer(tiny, device.xp), tokens, formats=["fp8", "int3"])
    with pytest.raises(ValueError, match="forced: got 0"):
        evaluate(device, Transformer(tiny, device.xp), tokens, forced=0)


def test_the_command_compares_along_a_text_of_ones_own(tmp_path: Path) -> None:
    model, text = tmp_path / "tiny.gguf", tmp_path / "mine.txt"
    write_gguf(model)
    text.write_text("abc " * 30)
    arguments = [str(text), "--model", str(model), "--backend", "emulator", "--formats", "fp8"]
    shown = CliRunner().invoke(app, [*arguments, "--tokens", "2"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "2 forced tokens of mine.txt" in shown.output
    assert [name in shown.output for name in ("bf16", "fp8", "nvfp4")] == [True, True, False]
    for wrong, message in (("9999", "the model takes 228"), ("200", "more than 228")):
        refused = CliRunner().invoke(app, [*arguments, "--tokens", wrong], env={"COLUMNS": "200"})
        assert refused.exit_code == 2
        assert message in refused.output


def test_the_modules_that_the_guides_name_say_something() -> None:
    for module, code, said in (
        ("examples.smollm2.evaluate", 0, "--formats"),
        ("benchmarks.accuracy", 1, "a library"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert said in done.stdout + done.stderr


def test_make_help_lists_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(" ".join(phony).split()) - {"help", "compiler"}


def test_the_table_needs_a_long_enough_text(tiny: Checkpoint, device: Device) -> None:
    with pytest.raises(ValueError, match="128 tokens; more than 128"):
        evaluate(device, Transformer(tiny, device.xp), [5] * 128)
