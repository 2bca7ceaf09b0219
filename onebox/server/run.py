"""Runs the application on a socket until told to stop by SIGINT or SIGTERM.

The first signal drains: nothing new is taken, what runs may finish for a while. The second one stops at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from onebox.engine.api import EngineStoppedError
from onebox.server.anthropic_errors import AnthropicErrors
from onebox.server.errors import error_response
from onebox.spec.errors import OneboxError

__all__ = ["Gate", "bind", "run"]

MAX_HEADER_BYTES = 64 << 10
RETRY_AFTER_S = 5
"""What clients of a stopping server are told: by then another one, or this one restarted, may be there."""
FAREWELL_S = 5
"""What is still open when everything has been told to end gets so long to write its last words."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, taken before anything slow is done; one that is in use is refused."""
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
) -> None:
    """Serves until a signal, then lets running requests finish for at most `drain_s` seconds.

    `on_stop` then ends what is still in flight, on a thread of its own: clients hear of it and the wait is short.
    """
    gate = Gate(app)
    config = uvicorn.Config(
        gate,
        # One parser everywhere, since its bound on headers is known.
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=FAREWELL_S,
    )
    asyncio.run(_serve(_Server(config, on_ready), gate, bound, on_stop, drain_s))


async def _serve(
    server: "_Server", gate: "Gate", bound: socket.socket, on_stop: Callable[[], None], drain_s: float
) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        server.should_exit = True
        loop.run_in_executor(None, on_stop)

    async def drain() -> None:
        gate.close()
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
    """Lets requests through until it is closed, and knows when those that passed are done.

    Only what asks for work counts. Once closed, that and /health get 503; whoever only looks is still let through.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_inside = 0
        self._is_closed = False
        self._left = asyncio.Event()
        """Set when somebody leaves."""

    def close(self) -> None:
        self._is_closed = True

    async def wait_empty(self) -> None:
        while self._num_inside:
            self._left.clear()
            await self._left.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["method"] == "POST"
        is_asked = is_work or (scope["type"] == "http" and scope["path"] == "/health")
        if self._is_closed and is_asked:
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


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals alone: uvicorn would raise them again after a clean stop."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
