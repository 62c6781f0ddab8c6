"""Structures that Python and the runtime share say of each other where the other half is."""

from __future__ import annotations

import re

import pytest

from tools.import_graph import ROOT

EMULATOR = ROOT / "cupaged" / "backends" / "emulator"
CLAIM = re.compile(r"(?:Filled in by|are known to) (\S+\.py)\b[^\n]*\n(?:struct|enum class) (\w+)")


def claims() -> list[tuple[str, str, str]]:
    """(header, structure, Python file) of each comment."""
    return [
        (path.relative_to(EMULATOR).as_posix(), name, file)
        for path in sorted((EMULATOR / "runtime").rglob("*.h"))
        for file, name in CLAIM.findall(path.read_text())
    ]


def test_there_are_claims() -> None:
    assert {name for _, name, _ in claims()} >= {"BufferRange", "Setup", "LaunchRequest", "FaultKind"}


@pytest.mark.parametrize(("header", "name", "file"), claims())
def test_the_file_named_has_the_other_half(header: str, name: str, file: str) -> None:
    text = (EMULATOR / file.rpartition("/")[2]).read_text()
    assert f"{name} in {header}" in text
