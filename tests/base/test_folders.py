"""Folders that processes share: whole files, the least recently used ones go, and others' files stay."""

import os
import time

import pytest

from sdy_jax.base.files import SharedFolder, Size


@pytest.fixture
def folder(tmp_path):
    return SharedFolder(tmp_path / "kept", (".entry", ".other"), limit=100)


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def test_what_is_written_is_read(folder):
    assert folder.read("a.entry") is None
    folder.write("a.entry", b"first")
    folder.write("a.entry", b"second")
    assert folder.read("a.entry") == b"second"
    assert names(folder) == ["a.entry"]


def test_the_least_recently_used_ones_go(folder):
    for number, name in enumerate("abc"):
        folder.write(f"{name}.entry", bytes(40))
        os.utime(folder.path / f"{name}.entry", (number, number))
        if name == "b":
            assert folder.read("a.entry") is not None  # which is used now
    assert names(folder) == ["a.entry", "c.entry"]
    assert folder.size == Size(2, 80)


def test_the_newest_stays_however_large(folder):
    folder.write("a.entry", bytes(10))
    folder.write("b.entry", bytes(1000))
    assert names(folder) == ["b.entry"]


def test_what_a_killed_process_left_goes_after_a_while(folder):
    folder.write("a.entry", b"x")
    for name, age in (("old", 10**6), ("new", 0)):
        path = folder.path / f".{name}.0123456789abcdef.new"
        path.write_bytes(b"half")
        os.utime(path, (os.stat(path).st_mtime - age,) * 2)
    folder.write("b.entry", b"y")
    assert names(folder) == [".new.0123456789abcdef.new", "a.entry", "b.entry"]


@pytest.mark.parametrize("jump", [-(10**6), 10**6])
def test_a_clock_that_jumps_loses_nothing_that_was_finished(folder, monkeypatch, jump):
    folder.write("a.entry", b"before")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    monkeypatch.setattr(os, "utime", lambda path, utime=os.utime: utime(path, (now() + jump,) * 2))
    assert folder.read("a.entry") == b"before"
    folder.write("b.entry", b"after")
    assert (folder.read("a.entry"), folder.read("b.entry")) == (b"before", b"after")
    assert names(folder) == ["a.entry", "b.entry"]


def test_to_clear_it_removes_its_own_files_only(folder):
    folder.write("a.entry", bytes(3))
    folder.write("a.other", bytes(4))
    for name in ("notes.txt", ".hidden.new"):
        (folder.path / name).write_text("mine")
    assert folder.clear() == Size(2, 7)
    assert names(folder) == [".hidden.new", "notes.txt"]
    assert folder.clear() == folder.size == Size(0, 0)


def test_a_folder_that_is_not_there_is_empty(folder):
    assert folder.size == Size(0, 0)
    folder.remove("a.entry")
    assert folder.clear() == Size(0, 0)
