"""Which source a result belongs to."""

from __future__ import annotations

import os
import subprocess


def source_commit(given: str | None = None) -> str:
    """The commit that is measured: as given, by CUPAGED_COMMIT, or by git where there is a repository."""
    known = given or os.environ.get("CUPAGED_COMMIT")
    if known:
        return known
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
