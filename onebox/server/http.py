"""The HTTP server: uvicorn, its connections held to their limits."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from onebox.server.connection import BoundedConnection, raise_descriptor_limit
from onebox.server.settings import ConnectionLimits

__all__ = ["LAST_WRITE_S", "HttpServer"]

BACKLOG = 256
"""Connections that wait to be accepted, and those accepted in one turn of the event loop."""
CHECK_TICKS = 5
"""uvicorn's ticks, each a tenth of a second, between two checks of the connections' limits."""
LAST_WRITE_S = 5
"""Connections still open when the server stops may write for so long before they are closed."""


class HttpServer(uvicorn.Server):
    """Holds connections to their limits, calls `on_ready` when it listens, and leaves signals alone.

    uvicorn would raise signals again after a clean stop.
    """

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None], limits: ConnectionLimits) -> None:
        num_connections = min(limits.max_connections, raise_descriptor_limit() // 2)
        limits = replace(limits, max_connections=num_connections)
        config = uvicorn.Config(
            app,
            http=type("_Connection", (BoundedConnection,), {"limits": limits}),
            # An upgrade would take the connection out of its limits.
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            # Below it are lines that any client can cause, as many as it likes.
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=LAST_WRITE_S,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._connections():
                connection.check(now)
        return await super().on_tick(counter)

    def close_incomplete(self) -> None:
        """Closes the connections whose requests have not completely arrived."""
        for connection in self._connections():
            connection.close_incomplete()

    def _connections(self) -> list[BoundedConnection]:
        return [found for found in self.server_state.connections if isinstance(found, BoundedConnection)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
