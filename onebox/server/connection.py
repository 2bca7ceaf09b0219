"""One client's connection: uvicorn's HTTP/1.1 protocol, with limits that no header can switch off.

A connection is always in one of these phases, each with a limit: waiting for a request's header, reading its body,
waiting for the application, writing what the client takes, lingering after a refusal. `BoundedConnection.check`, called
twice a second for every connection, closes those that are late. How many connections there are is limited as well; see
`ConnectionLimits`.
"""

import ipaddress
import json
import resource
import socket
from typing import Any, ClassVar, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from onebox.server.errors import ServerBusyError, error_body, error_response
from onebox.server.settings import ConnectionLimits
from onebox.spec.errors import UsageError

__all__ = ["BoundedConnection", "raise_descriptor_limit"]

PIECE_BYTES = 8 << 10
"""Received bytes are parsed in pieces of this size, so that a refusal comes after little work."""
MIN_CHUNK_BYTES = 32
"""Of a chunked body's chunks on average, beyond FREE_CHUNKS: parsing a chunk costs far more than a byte of it."""
FREE_CHUNKS = 1000
LINGER_S = 2.0
"""Time to read a refusal before the connection is closed, while the rest of the body is discarded."""
RESERVE = 32
"""Connections beyond the limit that are answered: /health from this machine as usual, everything else with 503."""
MAX_DESCRIPTORS = 65536
UNSENT_BYTES = 64 << 10
"""That the kernel holds beyond what is on its way."""


def raise_descriptor_limit() -> int:
    """Raises the process's limit of descriptors as far as it may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class _Parser(h11.Connection):
    """Counts what passes, and refuses headers and chunks that are too many."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self.num_body_bytes = 0
        """Of the current request."""
        self.num_sent_bytes = 0
        """Handed to the transport."""
        self.refusal = (400, "The request is not valid HTTP/1.1.")
        self._limits = limits
        self._num_chunks = 0

    @property
    def has_partial_header(self) -> bool:
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # Without the client's own bytes behind the colon; and not 501, since nothing failed here.
            status = error.error_status_hint if error.error_status_hint < 500 else 400
            self.refusal = (status, f"The request is not valid HTTP/1.1: {str(error).partition(':')[0]}.")
            raise
        if isinstance(event, h11.Request):
            self.num_body_bytes = self._num_chunks = 0
            self._check_header(event)
        elif isinstance(event, h11.Data):
            self.num_body_bytes += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_chunks > FREE_CHUNKS + self.num_body_bytes // MIN_CHUNK_BYTES:
                self._refuse(400, "The body comes in chunks of a few bytes; send larger ones.")
        return event

    def send(self, event: Any) -> Any:
        data: bytes | None = super().send(event)
        self.num_sent_bytes += len(data or b"")
        return data

    def _check_header(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if len(names) > self._limits.max_headers or num_bytes > self._limits.max_header_bytes:
            self._refuse(
                431,
                f"The request has {len(names)} header fields and {num_bytes} bytes of header; the limits are "
                f"{self._limits.max_headers} and {self._limits.max_header_bytes}.",
            )
        if b"transfer-encoding" in names and b"content-length" in names:
            self._refuse(400, "The request has both Transfer-Encoding and Content-Length; send one of them.")

    def _refuse(self, status: int, message: str) -> None:
        self.refusal = (status, message)
        raise h11.RemoteProtocolError(message, error_status_hint=status)


class _Progress:
    """Whether bytes pass fast enough: a grace time, and a least rate beyond it."""

    def __init__(self, now: float, num_bytes: int) -> None:
        self.since = now
        self._num_bytes = num_bytes

    def is_late(self, now: float, num_bytes: int, grace_s: float, bytes_per_s: int) -> bool:
        return now - self.since > grace_s + (num_bytes - self._num_bytes) / bytes_per_s


class BoundedConnection(H11Protocol):
    """`limits` and `incomplete` are set on a subclass for each server, since uvicorn makes the instances."""

    limits = ConnectionLimits()
    incomplete: ClassVar[dict["BoundedConnection", None]] = {}
    """Those whose next request has not completely arrived; the one that has waited longest is the first."""

    @classmethod
    def of_server(cls, limits: ConnectionLimits) -> type["BoundedConnection"]:
        return type("_Connection", (cls,), {"limits": limits, "incomplete": {}})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: _Parser = _Parser(self.limits)
        self.timeout_keep_alive = cast("int", self.limits.keep_alive_s)
        self._header_since: float | None = None
        """Since when the next request's header is awaited; None while a request is handled or none has begun."""
        self._body: _Progress | None = None
        self._writing: _Progress | None = None
        self._linger_since: float | None = None
        """Since when the request is answered although its body goes on, or the connection is closing."""
        self._checked_at = self.loop.time()

    # Phases.

    def connection_made(self, transport: Any) -> None:
        is_full = len(self.connections) >= self.limits.max_connections and not self._evict_oldest()
        super().connection_made(transport)
        _limit_unsent(transport.get_extra_info("socket"))
        self._header_since = self._checked_at
        self.incomplete[self] = None
        if not is_full:
            return
        if len(self.connections) > self.limits.max_connections + RESERVE:
            transport.abort()
            return
        self.app = cast("Any", _Full(self.app))

    def connection_lost(self, exc: Exception | None) -> None:
        self.incomplete.pop(self, None)
        super().connection_lost(exc)

    def _evict_oldest(self) -> bool:
        """Makes room: closes the connection that has waited longest for its request, if one waits."""
        oldest = next(iter(self.incomplete), None)
        if oldest is None:
            return False
        del self.incomplete[oldest]
        # Counted no longer; the transport closes in the loop's next turn.
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and self._header_since is None:
            self._header_since = self.loop.time()
            self._begin_waiting()
        for start in range(0, len(data), PIECE_BYTES):
            if self.conn.their_state is h11.ERROR or self.transport.is_closing():
                return
            super().data_received(data[start : start + PIECE_BYTES])
        if self.conn.their_state is not h11.IDLE:
            self._header_since = None
        if not self._is_incomplete:
            self.incomplete.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._body = None
        self._header_since = self.loop.time() if self.conn.has_partial_header else None
        if self._is_incomplete and not self.transport.is_closing():
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        self.incomplete.pop(self, None)
        self.incomplete[self] = None

    @property
    def _is_incomplete(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    # Limits.

    def check(self, now: float) -> None:
        """Closes the connection if it is late."""
        elapsed, self._checked_at = now - self._checked_at, now
        if self._is_write_late(now) or self._is_linger_late(now):
            self.transport.abort()
        elif self._is_header_late(now):
            self._close_late(f"The header was not complete within {self.limits.header_timeout_s:g} seconds.")
        elif self._is_body_late(now, elapsed):
            rate, grace_s = self.limits.min_body_bytes_per_s, self.limits.body_grace_s
            self._close_late(f"The body came more slowly than {rate} bytes a second for {grace_s:g} seconds.")

    def _is_write_late(self, now: float) -> bool:
        num_waiting = self.transport.get_write_buffer_size()
        if not num_waiting:
            self._writing = None
            return False
        num_taken = self.conn.num_sent_bytes - num_waiting
        self._writing = self._writing or _Progress(now, num_taken)
        return self._writing.is_late(now, num_taken, self.limits.send_timeout_s, self.limits.min_send_bytes_per_s)

    def _is_linger_late(self, now: float) -> bool:
        is_answered = self.cycle is not None and self.cycle.response_complete
        is_discarding = is_answered and self.conn.their_state is h11.SEND_BODY
        if not is_discarding and self.conn.their_state is not h11.ERROR:
            self._linger_since = None
            return False
        self._linger_since = self._linger_since or now
        return now - self._linger_since > LINGER_S

    def _is_header_late(self, now: float) -> bool:
        return self._header_since is not None and now - self._header_since > self.limits.header_timeout_s

    def _is_body_late(self, now: float, elapsed: float) -> bool:
        if self.conn.their_state is not h11.SEND_BODY:
            self._body = None
            return False
        self._body = self._body or _Progress(now, 0)
        if self.flow.read_paused:
            # The application, not the client, is slow.
            self._body.since += elapsed
        limits = self.limits
        return self._body.is_late(now, self.conn.num_body_bytes, limits.body_grace_s, limits.min_body_bytes_per_s)

    def _close_late(self, message: str) -> None:
        if self.conn.their_state is h11.SEND_BODY or self.conn.has_partial_header:
            self._refuse(408, message)
        else:
            self.transport.close()

    # Endings.

    def close_incomplete(self) -> None:
        """For a server that stops: a request that has not arrived is not waited for."""
        if self._is_incomplete and not self.transport.is_closing():
            self.transport.close()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            # uvicorn would tell h11 first, which raises for a connection in error.
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's; ours says more
        self._refuse(*self.conn.refusal)

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application, if it has not begun to, and closes."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application's handler ends as when the client leaves.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(UsageError(message))).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _limit_unsent(connection: socket.socket) -> None:
    """The kernel would take megabytes for a client that reads nothing, which hides for minutes that it does not."""
    if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class _Full:
    """The application of connections beyond the limit."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health" and _is_local(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(ServerBusyError("The server has too many connections; try again in a moment."))
        response.status_code = 503
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    return client is not None and ipaddress.ip_address(client[0].partition("%")[0]).is_loopback
