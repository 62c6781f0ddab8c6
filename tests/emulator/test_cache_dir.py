"""Where the cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged import cache_dir as module
from cupaged.cache_dir import cache_dir, write_atomically


def test_order_of_preference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "own"
    assert cache_dir().is_dir()
    monkeypatch.delenv("CUPAGED_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "cupaged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / "home" / ".cache" / "cupaged"


def test_one_warning_and_a_folder_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(obstacle / "below"))
    with pytest.warns(RuntimeWarning, match="cannot write to"):
        first = cache_dir()
    assert first.is_dir()
    assert cache_dir() == first  # a second warning would be an error


def test_write(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    write_atomically(target, b"one")
    write_atomically(target, b"two")
    assert target.read_bytes() == b"two"
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="compiled again"):
        write_atomically(tmp_path / "file" / "below", b"content")
