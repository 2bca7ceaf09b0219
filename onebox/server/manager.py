"""Tells systemd that the server is ready (`Type=notify`), over the socket that it names in NOTIFY_SOCKET."""

import contextlib
import os
import socket

__all__ = ["tell_manager"]


def tell_manager(state: str) -> None:
    """Sends `state`, such as READY=1. Does nothing where no manager asks; never blocks and never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A name that begins with @ is in Linux's abstract namespace, where it begins with a zero byte.
    place = address.replace("@", "\0", 1) if address[0] == "@" else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), place)
