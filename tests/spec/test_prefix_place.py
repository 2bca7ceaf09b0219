"""The directory of --prefix-dir: what it may be, what is refused, and that nothing is made of it before its time."""

import os
from pathlib import Path

import pytest

from onebox.spec.errors import UsageError
from onebox.spec.prefix_place import prefix_directory, prefix_directory_line


def test_none_is_off_and_auto_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prefix_directory(None) is prefix_directory("none") is None
    assert prefix_directory("auto") == tmp_path / "onebox" / "prefixes"


def test_a_path_becomes_absolute_and_is_not_made(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prefix_directory(Path("here")) == prefix_directory("here") == prefix_directory("~/here") == tmp_path / "here"
    assert prefix_directory("a/b/c") == tmp_path / "a/b/c"
    assert [*tmp_path.iterdir()] == []


def test_a_file_and_what_is_below_one_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(UsageError, match=r"file is not a directory; give another path"):
            prefix_directory(given)
    with pytest.raises(UsageError, match="is empty"):
        prefix_directory(" ")


def test_what_cannot_be_made_or_read_is_refused_and_what_can_only_be_read_is_not(monkeypatch, tmp_path):
    (tmp_path / "there").mkdir()
    denied = {tmp_path: os.W_OK, tmp_path / "there": os.W_OK}
    # The permissions of a file system do not hold for root.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & denied.get(Path(path), 0))
    with pytest.raises(UsageError, match=r"cannot be written, so .*new cannot be made there"):
        prefix_directory(tmp_path / "new")
    assert prefix_directory(tmp_path / "there") == tmp_path / "there"
    assert "which cannot be written; none is added" in prefix_directory_line(tmp_path / "there", 10**9)
    denied[tmp_path / "there"] = os.R_OK
    with pytest.raises(UsageError, match="there cannot be read"):
        prefix_directory(tmp_path / "there")


def test_the_start_tells_the_limit_and_the_room(tmp_path):
    line = prefix_directory_line(tmp_path / "new", 200 * 10**9)
    assert line.startswith(f"Prefixes on disk: {tmp_path}/new, at most 200.0 GB; ")
    assert line.endswith(" GB are free there.")
