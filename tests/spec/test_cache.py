"""The cache directory follows the XDG standard."""

import os
import resource
from pathlib import Path

import pytest

from onebox.spec.cache import (
    redirect_kernel_cache,
    temporary_cache_directory,
    user_cache_directory,
    writable_cache_directory,
)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_an_absolute_xdg_cache_home_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert user_cache_directory() == tmp_path / "caches" / "onebox"


def test_without_xdg_cache_home_it_is_in_the_home_directory(monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_directory() == home / ".cache" / "onebox"


@pytest.mark.parametrize("value", ["", ".", "caches", "../caches"])
def test_an_empty_or_relative_value_is_ignored(monkeypatch, home, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache_directory() == home / ".cache" / "onebox"


def test_asking_makes_no_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    user_cache_directory()
    assert not (tmp_path / "caches").exists()


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory / f"onebox-cache-{os.getuid()}"


def make_unusable(monkeypatch, tmp_path):
    """Also for root, who may write everywhere: a file is where the directory should be."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))


def test_a_cache_with_room_is_used(monkeypatch, tmp_path, temporary):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert writable_cache_directory("a/b", 1 << 21) == tmp_path / "onebox" / "a" / "b"
    assert [*(tmp_path / "onebox" / "a" / "b").iterdir()] == []
    assert not temporary.exists()


def test_where_it_cannot_be_written_the_temporary_directory_takes_its_place(monkeypatch, tmp_path, temporary, caplog):
    make_unusable(monkeypatch, tmp_path)
    assert writable_cache_directory("a", 100) == temporary / "a"
    assert "cannot be written" in caplog.text
    assert str(temporary / "a") in caplog.text


def test_a_full_disk_is_noticed(monkeypatch, tmp_path, temporary):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert writable_cache_directory("a", 1 << 19) == tmp_path / "onebox" / "a"
        assert writable_cache_directory("a", 1 << 21) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_a_home_nothing_is_raised(monkeypatch, temporary):
    def raise_error():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", raise_error)
    assert writable_cache_directory("a", 100) == temporary / "a"


def test_a_temporary_cache_that_others_can_write_is_not_used(monkeypatch, tmp_path, temporary):
    make_unusable(monkeypatch, tmp_path)
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        temporary_cache_directory()
    assert writable_cache_directory("a", 100) is None


def test_tritons_cache_is_redirected_only_where_it_cannot_be_written(monkeypatch, tmp_path, temporary):
    monkeypatch.setattr("onebox.spec.cache.KERNEL_ROOM_BYTES", 100)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    redirect_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    make_unusable(monkeypatch, tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    redirect_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(temporary / "triton")
