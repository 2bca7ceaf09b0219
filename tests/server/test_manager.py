"""A service manager that asks is told when the server is ready."""

import socket
import tempfile
from pathlib import Path

import pytest

from onebox.server.manager import tell_manager


@pytest.fixture
def receiver():
    """(a socket as a manager's, its address); short, as addresses of sockets must be."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(Path(directory) / "notify"))
        bound.settimeout(10)
        yield bound


def test_a_manager_that_asks_is_told(receiver, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", receiver.getsockname())
    tell_manager("READY=1")
    assert receiver.recv(100) == b"READY=1"


def test_an_address_in_the_abstract_namespace_is_understood(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(b"\0onebox-test-%d" % id(bound))
        bound.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + bound.getsockname()[1:].decode())
        tell_manager("READY=1")
        assert bound.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/notify", "@gone"])
def test_without_a_manager_nothing_happens(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_manager("READY=1")
