"""Serves the application on a socket until SIGINT or SIGTERM.

The first signal drains: new requests are refused, running ones may finish for a while. The second one stops at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from onebox.engine.api import EngineStoppedError
from onebox.server.anthropic_errors import AnthropicErrors
from onebox.server.connection import BoundedConnection, raise_descriptor_limit
from onebox.server.errors import error_response
from onebox.server.settings import ConnectionLimits
from onebox.spec.errors import OneboxError

__all__ = ["Gate", "HttpServer", "bind", "run"]

RETRY_AFTER_S = 5
"""Retry-After of a stopping server: by then another one, or this one restarted, may be running."""
BACKLOG = 256
"""Connections that wait to be accepted, and those accepted in one turn of the event loop."""
CHECK_TICKS = 5
"""uvicorn's ticks, each a tenth of a second, between two checks of the connections' limits."""
LAST_WRITE_S = 5
"""Connections still open after `on_stop` may write for so long before they are closed."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; called before the model is loaded, so that a port in use is refused early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise OneboxError(f"Port {port} on {host} cannot be had ({reason}); choose another with --port.") from None
    return bound


def run(
    app: ASGIApp,
    bound: socket.socket,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
    drain_s: float = 0.0,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serves until a signal, then lets running requests finish for at most `drain_s` seconds.

    `on_stop`, on a thread of its own, then ends what is still running, so that its clients receive an error.
    """
    gate = Gate(app)
    asyncio.run(_serve(HttpServer(gate, on_ready, limits or ConnectionLimits()), gate, bound, on_stop, drain_s))


async def _serve(
    server: "HttpServer", gate: "Gate", bound: socket.socket, on_stop: Callable[[], None], drain_s: float
) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        server.should_exit = True
        loop.run_in_executor(None, on_stop)

    async def drain() -> None:
        gate.close()
        server.close_incomplete()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.wait_empty(), drain_s)
        stop()

    def take_signal() -> None:
        if draining:
            server.force_exit = True
            draining[0].cancel()
            stop()
        else:
            draining.append(loop.create_task(drain()))

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, take_signal)
    await server.serve(sockets=[bound])


class Gate:
    """Passes requests until it is closed, and knows when those that passed have ended.

    Only POST requests count. Once closed, those and /health get 503; other GET requests still pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_inside = 0
        self._is_closed = False
        self._left = asyncio.Event()
        """Set when a request has ended."""

    def close(self) -> None:
        self._is_closed = True

    async def wait_empty(self) -> None:
        while self._num_inside:
            self._left.clear()
            await self._left.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["method"] == "POST"
        is_refusable = is_work or (scope["type"] == "http" and scope["path"] == "/health")
        if self._is_closed and is_refusable:
            error = EngineStoppedError("The server is stopping and takes no new requests; try again in a moment.")
            response = error_response(error)
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            await AnthropicErrors(response)(scope, receive, send)
            return
        self._num_inside += is_work
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_inside -= is_work
            self._left.set()


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
