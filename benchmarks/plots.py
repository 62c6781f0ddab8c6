"""Roofline bars: bandwidth of decode, ours and the peer's, below the read ceiling of the same run.

`python -m benchmarks.plots` draws benchmarks/results/performance.json into docs/images/decode_roofline.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.report import best_peer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "performance.json"
IMAGE = ROOT / "docs" / "images" / "decode_roofline.svg"
COLORS = {"bf16": "#4477aa", "fp8": "#228833", "nvfp4": "#cc6677"}


def bars(output: dict[str, Any]) -> dict[str, list[tuple[str, float, float | None]]]:
    """For each format: load, our TB/s, and the peer's where it was measured."""
    sets = output["sets"]
    found: dict[str, list[tuple[str, float, float | None]]] = {}
    for row in [*sets.get("table", []), *sets.get("long", [])]:
        if "bytes_per_us" not in row:
            continue
        peer = best_peer(sets.get("peer", []), row["load"], row["format"])
        other = row["bytes"] / peer["median_us"] / 1e6 if peer else None
        found.setdefault(row["format"], []).append((row["load"], row["bytes_per_us"] / 1e6, other))
    return found


def draw(output: dict[str, Any], image: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cupaged", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    formats = bars(output)
    ceiling = output["ceiling"]["read_bytes_per_us"] / 1e6
    names = list(dict.fromkeys(name for rows in formats.values() for name, _, _ in rows))
    size = (9, 1.1 + 0.22 * len(names))
    figure, axes = pyplot.subplots(1, len(formats), figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis, (fmt, rows) in zip(axes[0], formats.items(), strict=True):
        places = [names.index(name) for name, _, _ in rows]
        axis.barh(places, [ours for _, ours, _ in rows], color=COLORS[fmt])
        peers = [(place, peer) for place, (_, _, peer) in zip(places, rows, strict=True) if peer is not None]
        axis.plot([x for _, x in peers], [y for y, _ in peers], "k|", markersize=9, label="FlashInfer")
        axis.axvline(ceiling, color="gray", linestyle="--", linewidth=1, label="read ceiling")
        axis.set_title(fmt)
        axis.set_xlabel("TB/s of K and V (bars: cupaged)")
        axis.grid(axis="x", linewidth=0.3)
    axes[0][0].set_yticks(range(len(names)), [name.replace(" d128 page 16", "") for name in names])
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower left", fontsize=7)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--image", type=Path, default=IMAGE, help=".svg or .png")
    options = parser.parse_args()
    result = json.loads(options.json.read_text())
    draw(result.get("output", result), options.image)


if __name__ == "__main__":
    main()
