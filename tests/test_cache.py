"""Upkeep of the cache folder: size, cap, clearing, damage, and one compilation at a time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cupaged import cache, cache_dir
from cupaged.backends.cupy import cubin_cache


def _entry(folder: Path, name: str, num_bytes: int, age_s: float) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    used = time.time() - age_s
    os.utime(path, (used, used))
    return path


@pytest.fixture
def cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", "1000")


def test_size_counts_both_kinds_of_entries_and_nothing_else(tmp_path: Path) -> None:
    _entry(tmp_path, "cubin/a.bin", 100, 10)
    _entry(tmp_path, "emulator/b.so", 20, 30)
    for other in ("c.so", "cubin/notes.txt", "emulator/.half.so", "models/weights.bin"):
        _entry(tmp_path, other, 7, 0)
    assert [entry.path.name for entry in cache.entries(tmp_path)] == ["b.so", "a.bin"]
    assert cache.total_bytes(tmp_path) == 120
    assert cache.entries(tmp_path / "missing") == []


def test_clear_removes_entries_and_leaves_everything_else(tmp_path: Path) -> None:
    ours = [_entry(tmp_path, "cubin/a.bin", 100, 0), _entry(tmp_path, "emulator/b.so", 20, 0)]
    others = [
        _entry(tmp_path, name, 7, 10)
        for name in ("thesis.txt", "cubin/notes.txt", "models/weights.bin", "emulator/.build-x/half.so")
    ]
    assert cache.clear(tmp_path) == cache.Cleared(2, 120, ())
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _entry(tmp_path, "cubin/a.bin", 100, 0)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert cache.clear(tmp_path) == cache.Cleared(0, 0, (kept,))


@pytest.mark.usefixtures("cap")
def test_cap_removes_the_least_recently_used_of_all(tmp_path: Path) -> None:
    oldest = _entry(tmp_path, "emulator/oldest.so", 400, 900)
    used = _entry(tmp_path, "cubin/used.bin", 300, 800)
    old = _entry(tmp_path, "cubin/old.bin", 300, 700)
    cache.touch(used)
    written = _entry(tmp_path, "cubin/written.bin", 500, 0)
    cache.trim(written)
    assert not oldest.exists()
    assert not old.exists()
    assert used.exists()
    assert written.exists()
    assert cache.total_bytes(tmp_path) == 800


@pytest.mark.usefixtures("cap")
def test_cap_leaves_what_fits(tmp_path: Path) -> None:
    kept = [_entry(tmp_path, f"cubin/{i}.bin", 250, 900 + i) for i in range(4)]
    cache.trim(kept[0])
    assert all(path.exists() for path in kept)


@pytest.mark.usefixtures("cap")
def test_cap_never_removes_what_was_just_written_or_found(tmp_path: Path) -> None:
    fresh = _entry(tmp_path, "cubin/fresh.bin", 900, 5)
    written = _entry(tmp_path, "cubin/written.bin", 5000, 3000)
    cache.trim(written)
    assert fresh.exists()
    assert written.exists()


def test_machine_code_keeps_the_cap_and_is_noted_when_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", "0")
    other = _entry(tmp_path, "cubin/other.bin", 100, 3000)
    cubin_cache.write("new", b"code")
    [new] = cache.entries(tmp_path)
    assert not other.exists()
    os.utime(new.path, (0, 0))
    assert cubin_cache.read("new") == b"code"
    assert new.path.stat().st_mtime > 0


def test_cap_of_many_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", "5000")
    for i in range(200):
        _entry(tmp_path, f"emulator/{i}.so", 100, 1000 + i)
    written = [tmp_path / "cubin" / f"{i}.bin" for i in range(8)]
    failures: list[BaseException] = []

    def write(path: Path) -> None:
        try:
            cache_dir.write_atomically(path, bytes(100))
            cache.trim(path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(path,)) for path in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(path.exists() for path in written)
    assert cache.total_bytes(tmp_path) <= 5000


@pytest.mark.parametrize(("text", "value"), [("", 1 << 30), ("0", 0), (" 4096 ", 4096)])
def test_cap_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", text)
    assert cache.max_bytes() == value


@pytest.mark.parametrize("text", ["1G", "-1", "1e9", "²"])
def test_a_cap_that_is_no_number_warns(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    cache_dir.warn_once.cache_clear()
    monkeypatch.setenv("CUPAGED_CACHE_MAX_BYTES", text)
    with pytest.warns(RuntimeWarning, match="CUPAGED_CACHE_MAX_BYTES is '.*allowed is a number of bytes"):
        assert cache.max_bytes() == 1 << 30


def test_leftovers_of_processes_that_died_are_removed(tmp_path: Path) -> None:
    dead = _entry(tmp_path, "emulator/.build-dead/library.so", 10, 9000).parent
    os.utime(dead, (0, 0))
    half = _entry(tmp_path, "cubin/.a.bin.x1", 10, 9000)
    alive = _entry(tmp_path, "emulator/.build-alive/library.so", 10, 0)
    lock = _entry(tmp_path, "emulator/.lock", 0, 9000)
    cache.trim(_entry(tmp_path, "cubin/a.bin", 10, 0))
    assert not dead.exists()
    assert not half.exists()
    assert alive.exists()
    assert lock.exists()


def test_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(bytes(range(200)))
    assert not cache.is_intact(path)
    cache.seal(path)
    assert cache.is_intact(path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:10], b"", whole + b"x", whole[:5] + b"x" + whole[6:]):
        path.write_bytes(damaged)
        assert not cache.is_intact(path)
    assert not cache.is_intact(tmp_path / "missing")


def test_threads_take_turns_on_one_entry_but_not_on_two(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def enter(name: str) -> None:
        nonlocal inside, most
        with cache.one_at_a_time(tmp_path / "cubin" / name):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.05)
            with guard:
                inside -= 1

    def most_of(names: list[str]) -> int:
        nonlocal most
        most = 0
        threads = [threading.Thread(target=enter, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return most

    assert most_of(["a"] * 4) == 1
    assert most_of(["a", "b", "c", "d"]) > 1


def test_where_nothing_can_be_locked_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with cache.one_at_a_time(tmp_path / "file" / "a"), cache.one_at_a_time(tmp_path / "file" / "a"):
        pass
