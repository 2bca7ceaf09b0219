"""The served build is found or made where there is room for it."""

from pathlib import Path

import pytest

from onebox.pocket import builds, ready
from onebox.spec.errors import WriteError


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """(the user's cache, the temporary one); builds are empty directories, and only the second can hold them."""
    first, second = tmp_path / "user", tmp_path / "temporary"
    monkeypatch.setattr(ready, "user_cache_directory", lambda: first)
    monkeypatch.setattr(ready, "temporary_cache_directory", lambda: second)

    def make(_, target: Path):
        if first in target.parents:
            raise WriteError(f"{target.parent} has no room for the pocket model.")
        target.mkdir(parents=True)

    monkeypatch.setattr(ready, "_make", make)
    return first, second


def test_a_full_cache_moves_the_build_to_the_temporary_directory_and_says_so(caches, caplog):
    made = ready.pocket_checkpoint()
    assert made.parent == caches[1]
    assert "has no room" in caplog.text
    assert str(made) in caplog.text
    caplog.clear()
    assert ready.pocket_checkpoint() == made
    assert not caplog.text


def test_a_build_in_a_cache_that_cannot_be_written_is_used(caches):
    made = ready.pocket_checkpoint()
    kept = caches[0] / made.name
    kept.mkdir(parents=True)
    assert ready.pocket_checkpoint() == kept


def test_without_room_anywhere_it_is_a_sentence(caches, monkeypatch):
    monkeypatch.setattr(ready, "temporary_cache_directory", lambda: caches[0] / "below")
    with pytest.raises(WriteError, match="has no room for the pocket model"):
        ready.pocket_checkpoint()


@pytest.fixture
def build_ends(monkeypatch, tmp_path):
    """Makes every build end as the given shell commands do."""

    def replace(commands: str) -> Path:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{commands}\n")
        program.chmod(0o755)
        monkeypatch.setattr(ready.sys, "executable", str(program))
        return tmp_path / "cache"

    return replace


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        (f"exit {builds.NO_ROOM}", "onebox has no room for the pocket model; free some, or set XDG_CACHE_HOME"),
        ("echo No space left on device; exit 1", "could not be built in .*onebox: No space left on device"),
        ("kill -9 $$", "the process that builds it ended with status -9"),
        ("exit 0", "could not be written: No such file"),
    ],
)
def test_a_build_that_fails_is_a_sentence_and_leaves_nothing(build_ends, commands, message):
    cache = build_ends(commands)
    with pytest.raises(WriteError, match=message):
        ready.pocket_checkpoint(cache)
    assert list((cache / "onebox").iterdir()) == []


def test_a_build_that_another_process_has_made_meanwhile_is_used(build_ends, monkeypatch):
    cache = build_ends("exit 1")
    made = cache / "onebox" / "pocket-x-0"
    monkeypatch.setattr(ready, "_content_hash", lambda: "0")
    build_ends(f"mkdir {made}; echo Directory not empty; exit 1")
    assert ready.pocket_checkpoint(cache, "x") == made


def test_the_exit_status_for_a_full_disk_has_one_meaning():
    assert ready._NO_ROOM == builds.NO_ROOM
