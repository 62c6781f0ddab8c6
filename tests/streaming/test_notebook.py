"""The streaming notebook runs from its first cell to its last, at a small size on the emulator."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_and_draws(tmp_path: Path) -> None:
    script = ROOT / "examples" / "notebooks" / "streaming.py"
    environment = os.environ | {
        "CUPAGED_NOTEBOOK_TOKENS": "1024",
        "CUPAGED_NOTEBOOK_PICTURES": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulator: 1,024 tokens" in done.stdout
    assert len(re.findall(r"^(bf16|fp8|nvfp4) .* MiB", done.stdout, re.MULTILINE)) == 6
    assert "100% resident:     0.0 MiB streamed" in done.stdout
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    if importlib.util.find_spec("matplotlib") is None:
        assert "no pictures" in done.stdout
    else:
        assert drawn == {f"streaming_{name}.svg" for name in ("throughput", "timeline", "accuracy")}


def test_it_is_a_notebook_of_text_and_code() -> None:
    text = (ROOT / "examples" / "notebooks" / "streaming.py").read_text()
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    prose = [cell for cell in cells if cell.startswith(" [markdown]")]
    assert len(prose) >= 5
    for cell in prose:
        assert all(line.startswith("#") or not line.strip() for line in cell.splitlines()[1:])
