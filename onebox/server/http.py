"""The HTTP server: uvicorn, its connections held to their limits."""

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from onebox.server.connection import BoundedConnection, raise_descriptor_limit
from onebox.server.handshake import TlsDoor
from onebox.server.settings import ConnectionLimits
from onebox.spec.heap import start_trimming

__all__ = ["LAST_WRITE_S", "HttpServer"]

_log = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
TELL_S = 60.0
"""Between two lines about connections that cannot be accepted."""

MAX_BACKLOG = 2048
"""Connections that wait to be accepted. Beyond it clients try again only after a second or three."""
CHECK_TICKS = 5
"""uvicorn's ticks, each a tenth of a second, between two checks of the connections' limits."""
LAST_WRITE_S = 1.5
"""Connections still open when the server stops may write for so long before they are closed: time to say why, which
takes half a second. Who reads slowly has had the time for running requests."""


class HttpServer(uvicorn.Server):
    """Holds connections to their limits, calls `on_ready` when it listens, and leaves signals alone.

    uvicorn would raise signals again after a clean stop.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_ready: Callable[[], None],
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        num_descriptors = raise_descriptor_limit()
        limits = replace(limits, max_connections=min(limits.max_connections, num_descriptors // 2))
        self._door = TlsDoor.of_server(limits, tls) if tls else None
        config = uvicorn.Config(
            app,
            http=self._door or BoundedConnection.of_server(limits),
            # An upgrade would take the connection out of its limits.
            ws="none",
            # As many are accepted at once, and have a descriptor until they are counted.
            backlog=min(MAX_BACKLOG, num_descriptors // 4),
            log_config=None,
            # Below it are lines that any client can cause, as many as it likes.
            log_level="error",
            access_log=False,
            # It is only given to asyncio.wait_for.
            timeout_graceful_shutdown=cast("int", LAST_WRITE_S),
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        start_trimming()
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._connections():
                try:
                    connection.check(now)
                except Exception:
                    # One connection's error must not end the loop that holds the others to their limits.
                    _log.exception("a connection's limits could not be checked; it is closed")
                    connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door:
            self._door.close_all()
        await super().shutdown(sockets)

    def close_incomplete(self) -> None:
        """Closes the connections whose requests have not completely arrived."""
        if self._door:
            self._door.close_all()
        for connection in self._connections():
            connection.close_incomplete()

    def _connections(self) -> list[BoundedConnection]:
        return [found for found in self.server_state.connections if isinstance(found, BoundedConnection)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LoopErrors:
    """What asyncio reports of itself. Out of descriptors, it reports every attempt to accept, thousands a second."""

    def __init__(self) -> None:
        self._last_told = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "accept" in context["message"]):
            loop.default_exception_handler(context)
        elif loop.time() - self._last_told >= TELL_S:
            self._last_told = loop.time()
            _log.warning("new connections wait: %s; give the process more with `ulimit -n`", error.strerror)
