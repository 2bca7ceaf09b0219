"""TLS handshakes, held to limits as connections are.

asyncio would count a connection only behind its handshake, for which a client may take a minute: silent clients would
take all descriptors meanwhile. Here they are few, each has the time that a header has, and where there are too many,
the one that has taken longest is closed.
"""

import asyncio
import contextlib
import socket
import ssl
from typing import Any, ClassVar

from onebox.server.connection import BoundedConnection
from onebox.server.settings import ConnectionLimits

__all__ = ["TlsDoor"]

MAX_SHARE = 4
"""Handshakes at once are at most a quarter of the connections."""
CLOSE_S = 2.0
"""For the client's own farewell."""


class TlsDoor(asyncio.Protocol):
    """An accepted connection, which becomes a `BoundedConnection` when its handshake is done.

    The class variables are set on a subclass for each server, since uvicorn makes the instances.
    """

    connection: ClassVar[type[BoundedConnection]]
    tls: ClassVar[ssl.SSLContext]
    handshakes: ClassVar[dict["asyncio.Task[None]", None]]
    """Those under way, the oldest first."""

    @classmethod
    def of_server(cls, limits: ConnectionLimits, tls: ssl.SSLContext) -> type["TlsDoor"]:
        made = {"connection": BoundedConnection.of_server(limits), "tls": tls, "handshakes": {}}
        return type("_Door", (cls,), made)

    @classmethod
    def close_all(cls) -> None:
        """Of a server that stops."""
        for task in list(cls.handshakes):
            task.cancel()

    def __init__(self, **options: Any) -> None:
        """`options` are those of a connection."""
        self._options = options

    def connection_made(self, transport: Any) -> None:
        # TLS begins on a socket that asyncio has not read from: this transport is given up before it has.
        taken = transport.get_extra_info("socket").dup()
        transport.abort()
        limit = max(1, self.connection.limits.max_connections // MAX_SHARE)
        if len(self.handshakes) >= limit:
            oldest = next(iter(self.handshakes))
            # Counted no longer; many are accepted before it has ended.
            del self.handshakes[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._shake_hands(taken))
        self.handshakes[task] = None
        task.add_done_callback(lambda ended: self._end(ended, taken))

    def _end(self, ended: "asyncio.Task[None]", taken: socket.socket) -> None:
        self.handshakes.pop(ended, None)
        if ended.cancelled():
            # It may not even have begun; closing twice is fine.
            taken.close()

    async def _shake_hands(self, taken: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self.connection(**self._options),
                taken,
                ssl=self.tls,
                ssl_handshake_timeout=self.connection.limits.header_timeout_s,
                ssl_shutdown_timeout=CLOSE_S,
            )
