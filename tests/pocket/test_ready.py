"""The served build is found or made where there is room for it."""

from pathlib import Path

import pytest

from onebox.pocket import ready
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
