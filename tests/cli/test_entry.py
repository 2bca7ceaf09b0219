"""What happens before the command line is imported."""

import os
import signal
import sys

import pytest

from onebox.cli import entry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep Python's allocator")


@pytest.fixture
def started(monkeypatch):
    """The environments of the commands that the process became."""
    given = []
    monkeypatch.setattr(os, "execve", lambda _, __, environment: given.append(environment))
    for name in ("PYTHONMALLOC", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["onebox", "serve", "--port", "0"])
    before = signal.getsignal(signal.SIGINT)
    yield given
    signal.signal(signal.SIGINT, before)


def test_a_server_keeps_its_objects_in_the_heap_of_the_c_library(started, monkeypatch):
    entry.prepare()
    (environment,) = started
    assert environment["PYTHONMALLOC"] == "malloc"
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.tcache_max=128"
    # The one that was started: once, and what it starts has Python's allocator.
    monkeypatch.setattr(os, "environ", environment)
    entry.prepare()
    assert len(started) == 1
    assert not environment.keys() & {"PYTHONMALLOC", "GLIBC_TUNABLES", "ONEBOX_RESTARTED"}


def test_an_allocator_that_was_asked_for_stays(started, monkeypatch):
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    entry.prepare()
    assert not started
    assert os.environ["PYTHONMALLOC"] == "pymalloc"


def test_other_commands_keep_pythons_allocator(started, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["onebox", "plan"])
    entry.prepare()
    assert not started


def test_a_server_starts_where_it_cannot_be_started_again(started, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "execve", refuse)
    entry.prepare()
    assert not started
