# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A million tokens on a small GPU budget
#
# A decode step reads every cached token once. Where the cache does not fit in GPU memory, it can pass
# through a small scratch pool instead, tile by tile: the link to the host then sets the speed, and a narrower
# format is faster in proportion. This notebook holds a context in pinned host memory, decodes with it in
# BF16, FP8 and NVFP4, and looks at throughput, overlap and accuracy.
#
# `jupytext --to notebook examples/notebooks/streaming.py` makes a notebook of it. Without a GPU it runs on
# the emulator at a small size: the figures of speed then mean nothing, those of accuracy do.

# %%
import os
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from cupaged import BackendUnavailableError, CupyBackend, EmulatorBackend
from cupaged.formats import FORMATS, FP8, CacheLayout
from cupaged.streaming import PinnedStore, StreamingDecoder, Trace, decode_records, encode_records

try:
    import matplotlib.pyplot as plt
except ImportError:  # tables only
    plt = None

try:
    gpu = CupyBackend()
    tokens, tile_sizes = 1 << 20, [4 << 20, 16 << 20, 64 << 20]  # bytes of K and V
except BackendUnavailableError as error:
    print(f"no GPU ({error}); using the emulator")
    gpu = EmulatorBackend()
    tokens, tile_sizes = 2048, [1 << 16, 1 << 17]
tokens = int(os.environ.get("CUPAGED_NOTEBOOK_TOKENS", tokens))
pictures = (
    Path(os.environ["CUPAGED_NOTEBOOK_PICTURES"]) if "CUPAGED_NOTEBOOK_PICTURES" in os.environ else None
)

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 128, 16
SLOTS = 4  # tiles in flight
PERIOD = min(tokens, 8192)  # the content repeats, so that one period gives the right result
stream = gpu.null_stream()
rng = np.random.default_rng(0)
key, value = (rng.standard_normal((PERIOD, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
q = rng.standard_normal((1, Q_HEADS, HEAD_DIM)).astype(ml_dtypes.bfloat16)
print(f"{gpu.name}: {tokens:,} tokens")


# %% [markdown]
# ## The right result
#
# Float64 attention over unquantised K and V, and over what each format holds of them. The distance of the
# two is what quantisation costs; the distance of the decoder's output to the second is rounding.


# %%
def attention(key, value):
    """Float64, one query: [num_q_heads, head_dim]."""
    keys, values = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("hd,thd->ht", q[0].astype(np.float64), keys) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def distance(a, b):
    """Relative L2."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


exact = attention(key, value)
layouts = {fmt.name: CacheLayout(fmt, KV_HEADS, HEAD_DIM, BLOCK) for fmt in FORMATS}
scales = {name: {"k_scale": 0.01, "v_scale": 0.01} if name == FP8.name else {} for name in layouts}
records = {name: encode_records(layout, key, value, **scales[name])[0] for name, layout in layouts.items()}
held = {
    name: attention(*decode_records(layouts[name], records[name], PERIOD, **scales[name])) for name in layouts
}


# %% [markdown]
# ## Streaming
#
# One pinned store for each format, and a decoder whose device memory is four tiles of scratch. The trace says
# when each tile was copied and computed.


# %%
def measure(name, tile_bytes):
    """A step's seconds, relative errors, device memory and time line."""
    layout = layouts[name]
    store = PinnedStore(gpu, layout, tokens // BLOCK)
    for _ in range(tokens // PERIOD):
        store.append(records[name])
    decoder = StreamingDecoder(
        gpu, layout, Q_HEADS, scratch_bytes=SLOTS * tile_bytes, tiles_in_flight=SLOTS, **scales[name]
    )
    sequence = decoder.open(store)
    query, output = gpu.asarray(q), gpu.empty(q.shape, ml_dtypes.bfloat16)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        decoder.decode(query, [sequence], output, stream=stream)
        gpu.synchronize()
        seconds.append(time.perf_counter() - begin)
    trace = Trace()
    decoder.decode(query, [sequence], output, stream=stream, trace=trace)
    got = gpu.to_host(output).view(ml_dtypes.bfloat16)[0].astype(np.float64)
    return {
        "format": name,
        "tile_bytes": tile_bytes,
        "bytes": store.num_blocks * records[name].shape[1],
        "seconds": min(seconds),
        "rounding": distance(got, held[name]),
        "quantisation": distance(held[name], exact),
        "device_bytes": decoder.device_bytes,
        "timeline": trace.rows(),
    }


results = [measure(name, tile) for name in layouts for tile in tile_sizes]
header = ("tile", 9), ("cache", 9), ("on GPU", 9), ("GB/s", 7), ("M tokens/s", 11), ("rounding", 9)
print(f"{'format':7}", *(f"{name:>{width}}" for name, width in header), "quantisation")
for row in results:
    mib = [row[name] / (1 << 20) for name in ("tile_bytes", "bytes", "device_bytes")]
    print(
        f"{row['format']:7} {mib[0]:5.2f} MiB {mib[1]:5.0f} MiB {mib[2]:5.0f} MiB "
        f"{row['bytes'] / row['seconds'] / 1e9:7.2f} {tokens / row['seconds'] / 1e6:11.2f} "
        f"{row['rounding']:9.1e} {row['quantisation']:.1e}"
    )
if not all(row["rounding"] < 5e-3 for row in results):
    raise SystemExit("an error is larger than rounding explains")


# %% [markdown]
# ## Pictures
#
# Throughput by format and tile: the bars of one format are level once a tile is large enough to cover what a
# copy costs beside its bytes. The time line shows whether the link is busy without gaps, and how much of the
# computing is hidden behind it.


# %%
def save(figure, name):
    """To a file where a folder is named."""
    figure.tight_layout()
    if pictures is not None:
        figure.savefig(pictures / f"{name}.svg")


def draw_throughput():
    figure, axes = plt.subplots(figsize=(7, 3.5))
    width = 0.8 / len(tile_sizes)
    for i, tile in enumerate(tile_sizes):
        rates = [tokens / row["seconds"] / 1e6 for row in results if row["tile_bytes"] == tile]
        places = np.arange(len(rates)) + width * (i - (len(tile_sizes) - 1) / 2)
        axes.bar(places, rates, width, label=f"tiles of {tile / (1 << 20):g} MiB")
    axes.set_xticks(range(len(layouts)), list(layouts))
    axes.set_ylabel("million tokens a second")
    axes.legend()
    save(figure, "streaming_throughput")


def draw_timeline():
    figure, axes = plt.subplots(figsize=(7, 2.5))
    rows = next(row for row in results if row["tile_bytes"] == tile_sizes[0])["timeline"][:24]
    copies = [(row["copy_begin"], row["copy_end"] - row["copy_begin"]) for row in rows]
    steps = [(row["step_begin"], row["step_end"] - row["step_begin"]) for row in rows]
    axes.broken_barh(copies, (1, 0.8), edgecolor="white")
    axes.broken_barh(steps, (0, 0.8), color="tab:orange", edgecolor="white")
    axes.set_yticks([1.4, 0.4], ["copy", "compute"])
    axes.set_xlabel("ms since the first copy")
    save(figure, "streaming_timeline")


def draw_accuracy():
    figure, axes = plt.subplots(figsize=(7, 3))
    rows = [row for row in results if row["tile_bytes"] == tile_sizes[0]]
    for i, kind in enumerate(("rounding", "quantisation")):
        axes.bar(np.arange(len(rows)) + 0.4 * (i - 0.5), [row[kind] for row in rows], 0.4, label=kind)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [row["format"] for row in rows])
    axes.set_ylabel("relative L2 error")
    axes.legend()
    save(figure, "streaming_accuracy")


if plt is None:
    print("matplotlib is not installed: no pictures")
else:
    draw_throughput()
    draw_timeline()
    draw_accuracy()

# %% [markdown]
# ## Blocks that stay
#
# Room on the GPU that is left over keeps each sequence's first blocks: they are used in place, and only the
# rest travels. Half of the context resident halves the bytes on the link.


# %%
def with_resident(name, share):
    layout = layouts[name]
    store = PinnedStore(gpu, layout, tokens // BLOCK)
    for _ in range(tokens // PERIOD):
        store.append(records[name])
    decoder = StreamingDecoder(
        gpu, layout, Q_HEADS, scratch_bytes=SLOTS * tile_sizes[-1], tiles_in_flight=SLOTS,
        resident_bytes=int(share * store.num_blocks) * records[name].shape[1], **scales[name],
    )  # fmt: skip
    sequence = decoder.open(store)
    query, output = gpu.asarray(q), gpu.empty(q.shape, ml_dtypes.bfloat16)
    moved = []
    decoder.decode(query, [sequence], output, stream=stream, progress=lambda done, total: moved.append(total))
    begin = time.perf_counter()
    decoder.decode(query, [sequence], output, stream=stream)
    gpu.synchronize()
    seconds = time.perf_counter() - begin
    got = gpu.to_host(output).view(ml_dtypes.bfloat16)[0].astype(np.float64)
    return seconds, moved[-1] if moved else 0, distance(got, held[name])


for share in (0.0, 0.5, 1.0):
    seconds, moved, error = with_resident("bf16", share)
    mib = moved / (1 << 20)
    print(f"{share:4.0%} resident: {mib:7.1f} MiB streamed, {seconds * 1e3:8.2f} ms, error {error:.1e}")
    if not error < 5e-3:
        raise SystemExit("an error is larger than rounding explains")
