import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    """A busy disk takes a second to confirm; only what a power cut leaves depends on it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def memory_path():
    """A directory in memory where there can be one: thousands of small files take a disk minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:  # noqa: S108
        yield Path(directory)
