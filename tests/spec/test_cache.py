"""The cache directory follows the XDG standard."""

from pathlib import Path

import pytest

from onebox.spec.cache import user_cache_directory


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
