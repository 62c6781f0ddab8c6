"""The README's tables of contexts beyond one GPU's memory: streamed ones, and several GPUs."""

from __future__ import annotations

from typing import Any

from tools.performance_tables import commit_of, table

Result = dict[str, Any]


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.1f}"


def streaming(result: Result | None) -> str:
    """From pinned memory against the link, from a file against the file's own rate."""
    output = (result or {}).get("output")
    if not output:
        return "Streaming decode: not measured."
    parts = [
        "`StreamingDecoder`, one sequence in pinned host memory, the same number of tokens in each format; a "
        f"plain copy from pinned memory gives {_gigabytes(output['link_bytes_per_s'])} GB/s in the same run."
        f"{commit_of(result)}"
    ]
    pinned = [
        [
            f"{row['format']}, tiles of {row['tile_bytes'] >> 20} MiB",
            f"{row['tokens']:,}",
            f"{_gigabytes(row['bytes_per_s'])} ({100 * row['share_of_link']:.0f}%)",
            f"{row['kv_tokens_per_s'] / 1e6:.1f}",
            f"{row['device_bytes'] / 2**20:.0f}",
            f"{100 * row['compute_hidden']:.0f}%",
        ]
        for row in output["rows"]
        if row["source"] == "pinned"
    ]
    header = [
        "from pinned memory", "tokens", "GB/s (share of the link)", "million tokens/s", "MiB on the GPU",
        "computing hidden",
    ]  # fmt: skip
    parts.append(table(header, pinned))
    files = [
        [f"{row['format']}, {row['io']}", *(_from_file(row, state) for state in ("cold", "cached"))]
        for row in output["rows"]
        if row["source"] == "file"
    ]
    if files:
        header = ["from a file", "cold: GB/s (share of reading it)", "in the page cache"]
        parts.append(table(header, files))
    return "\n\n".join(parts)


def _from_file(row: dict[str, Any], state: str) -> str:
    if f"{state}_bytes_per_s" not in row:
        return ""
    return f"{_gigabytes(row[f'{state}_bytes_per_s'])} ({100 * row[f'{state}_share_of_file']:.0f}%)"


def several_gpus(result: Result | None) -> str:
    """One sequence over several GPUs."""
    output = (result or {}).get("output")
    if not output or not output["rows"]:
        return "Two GPUs: not measured."
    body = [
        [
            f"{row['format']}, {row['partials']}",
            f"{row['one_gpu_us']:.0f}",
            f"{row['us']:.0f}",
            f"{row['share_of_one_gpu']:.2f} x",
            f"{row['ulps_from_one_gpu']:.2f}",
        ]
        for row in output["rows"]
    ]
    first = output["rows"][0]
    caption = (
        f"One sequence of {first['tokens']:,} tokens cut over {first['ranks']} GPUs, merged through NCCL, "
        f"microseconds.{commit_of(result)}\n\n"
    )
    header = ["what is merged", "one GPU", f"{first['ranks']} GPUs", "ratio", "BF16 ulp from one GPU"]
    return caption + table(header, body)
