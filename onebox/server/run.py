"""Serves the application on a socket until SIGINT or SIGTERM, or until its engine is given up.

The first signal drains: new requests are refused, running ones may finish for a while. The second one stops at once.
What freezes altogether is ended by a watchdog.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from onebox.engine.api import EngineStoppedError
from onebox.server.anthropic_errors import AnthropicErrors
from onebox.server.errors import error_response
from onebox.server.http import LAST_WRITE_S, HttpServer
from onebox.server.settings import ConnectionLimits
from onebox.server.signals import SignalWatch
from onebox.server.watchdog import FREEZE_S, UNHEARD_S, Watchdog
from onebox.spec.errors import OneboxError
from onebox.spec.output import say

__all__ = ["GIVEN_UP", "Gate", "bind", "run"]

RETRY_AFTER_S = 5
"""Retry-After of a stopping server: by then another one, or this one restarted, may be running."""
ENDING_S = 5
"""What else may pass between a signal and the end of the process, whatever its threads wait for."""
GIVEN_UP = 70
"""Exit status when the engine died too often; service managers restart on it."""


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket bound to the address; called before the model is loaded, so that a port in use is refused early.

    `flag` is the option that sets the port.
    The protocol is named because asyncio sets TCP_NODELAY only on sockets that do: without it the kernel holds back
    what follows the headers, such as a first token, until the client has acknowledged them, about 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise OneboxError(f"Port {port} on {host} cannot be had ({reason}); choose another with {flag}.") from None
    return bound


def run(
    app: ASGIApp,
    bound: socket.socket | Sequence[socket.socket],
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
    drain_s: float = 0.0,
    wait_failed: Callable[[], str | None] | None = None,
    limits: ConnectionLimits | None = None,
    stop_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
    freeze_s: float = FREEZE_S,
    unheard_s: float = UNHEARD_S,
) -> int:
    """Serves until a signal, then lets running requests finish for at most `drain_s` seconds; returns the exit status.

    `bound` is one socket or several, all with the same limits and TLS.
    `on_stop`, on a thread of its own, then ends what is still running, so that its clients receive an error. It may
    take `stop_s` seconds, to save what is to be kept.
    `wait_failed`, on another, returns why nothing can be served any more, or None: then the server ends with GIVEN_UP.
    Whatever threads and connections wait for, the process ends within `drain_s` + `stop_s` + LAST_WRITE_S +
    ENDING_S seconds of the first signal. The caller ends the process; threads may be left.
    A server whose event loop has not run for `freeze_s` seconds, or that has not heard a signal for `unheard_s`, is
    ended by another process (`Watchdog`).
    """
    gate = Gate(app)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    # Neither closed nor asked to wait for its threads: one that hangs would keep the process.
    loop = asyncio.new_event_loop()

    def begin() -> None:
        watchdog.start()
        on_ready()

    server = HttpServer(gate, begin, limits or ConnectionLimits(), tls)
    ending = _Ending(loop, server, gate, on_stop, drain_s, stop_s)
    watchdog = Watchdog(loop, ending.signals, freeze_s, unheard_s)
    if wait_failed:
        threading.Thread(target=ending.watch, args=(wait_failed,), name="onebox-failure", daemon=True).start()
    sockets = [bound] if isinstance(bound, socket.socket) else list(bound)
    loop.run_until_complete(server.serve(sockets=sockets))
    watchdog.close()
    return ending.status


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """What is cut off at the end is not worth a traceback each."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Ending:
    """Ends the server: after a first signal or a failure once running requests are done, after a second one at once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: HttpServer,
        gate: "Gate",
        on_stop: Callable[[], None],
        drain_s: float,
        stop_s: float,
    ) -> None:
        self._loop = loop
        self._server = server
        self._gate = gate
        self._on_stop = on_stop
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None
        self._signals = SignalWatch(self._take_signal, (drain_s + stop_s + LAST_WRITE_S + ENDING_S, ENDING_S))

    @property
    def status(self) -> int:
        return self._signals.status

    @property
    def signals(self) -> int:
        """The file number of the socket on which signals are heard."""
        return self._signals.fileno()

    def watch(self, wait_failed: Callable[[], str | None]) -> None:
        """Ends the server when nothing can be served any more. What was open has failed by then and is being told."""
        reason = wait_failed()
        if reason is not None:
            self._signals.begin_ending(GIVEN_UP)
            say(f"onebox: {reason}", is_error=True)
            self._loop.call_soon_threadsafe(self._begin, LAST_WRITE_S)

    def _take_signal(self, number: int) -> None:
        if number == 1:
            self._loop.call_soon_threadsafe(self._begin, self._drain_s)
        else:
            self._loop.call_soon_threadsafe(self._force)

    def _begin(self, drain_s: float) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain(drain_s))

    async def _drain(self, drain_s: float) -> None:
        self._gate.close()
        self._server.close_incomplete()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.wait_empty(), drain_s)
        self._stop()

    def _force(self) -> None:
        self._server.force_exit = True
        if self._draining:
            self._draining.cancel()
        self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True
        # Not one of the loop's threads: all of those may wait for the engine that this ends.
        threading.Thread(target=self._on_stop, name="onebox-stop", daemon=True).start()


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
