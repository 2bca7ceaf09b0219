"""One address per member, between the router and the member: passes requests through, and knows when not to.

Routers that exist cannot tell a hung member from a slow one, end a begun stream with a cut connection, and differ in
how a member is drained, if at all. A relay gives all of them the same: while its member takes requests they pass;
while it is drained, down or another one than it was, they get 503 at once, which routers answer by asking the next
member. An answer that has begun and cannot be finished ends with an error event. A relay never sends a request twice:
only the router does.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Relay", "RelayPorts"]

RETRY_AFTER_S = "1"
OPEN_HEADER = b"x-onebox-open"
"""Of every answer: requests that the member has from here, that one included."""
_CONNECT_S = 5.0
_HELD_BYTES = 16 << 20
"""Of an answer that is no stream: so much is held until it is whole, and can still be had from another member. Of a
stream: so much of an event is held until it is whole."""
_HOP_HEADERS = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}


class _MemberFailedError(Exception):
    """The member cannot answer, or not any more; the message is a sentence."""


@dataclass(eq=False)
class _Exchange:
    """A request that a member has, and why it was ended from here, if it was."""

    task: asyncio.Task[object]
    is_work: bool
    """Not a look at the member's state."""
    cut_reason: str = ""
    is_left: bool = False
    """The router has closed the connection."""
    is_sending: bool = False
    """A connection to the member is there."""

    def end(self) -> None:
        """At once; a connection that is being made is waited for, since one that is given up then stays open."""
        if self.is_sending:
            self.task.cancel()

    async def trace(self, event: str, _: object) -> None:
        """Called by the HTTP client."""
        if event.endswith("send_request_headers.started"):
            self.is_sending = True
            if self.cut_reason or self.is_left:
                self.task.cancel()


@dataclass(eq=False)
class Relay:
    """A member's door. `closed_reason` is empty while it is open."""

    name: str
    http: httpx.AsyncClient
    url: str
    closed_reason: str = ""
    num_passed: int = 0
    """Requests for answers that the member has answered."""
    num_refused: int = 0
    """Requests that were answered with 503 from here, before the member answered."""
    num_cut: int = 0
    """Answers that had begun and were ended with an error."""
    _open: dict[str, set[_Exchange]] = field(default_factory=dict)
    """By the URL that has them: a member that is being replaced has two."""

    def num_open(self, url: str | None = None) -> int:
        """Requests for answers that a server of this member has."""
        return sum(exchange.is_work for exchange in self._open.get(url or self.url, ()))

    def open_urls(self) -> list[str]:
        """The servers of this member that have requests."""
        return [url for url in self._open if self.num_open(url)]

    def cut(self, reason: str, url: str | None = None) -> None:
        """Ends what is open at a member that hangs or whose time is up. `reason` is a sentence."""
        for exchange in list(self._open.get(url or self.url, ())):
            exchange.cut_reason = reason
            exchange.end()

    async def wait_empty(self, url: str, limit_s: float) -> bool:
        """Waits until nothing is open at that URL; False after `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.num_open(url):
                    await asyncio.sleep(0.05)
        return not self.num_open(url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.closed_reason:
            self.num_refused += 1
            await _refuse(send, f"{self.name} takes no requests: {self.closed_reason}")
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - an ASGI application runs in a task
        exchange, url = _Exchange(task, scope["method"] == "POST"), self.url
        self._open.setdefault(url, set()).add(exchange)
        answer = _Answer(send, self.num_open, is_anthropic=scope["path"].startswith("/v1/messages"))
        try:
            await self._pass(scope, receive, answer, exchange, url)
            self.num_passed += exchange.is_work
        except asyncio.CancelledError:
            if not exchange.cut_reason:
                if exchange.is_left:
                    task.uncancel()
                    return
                raise
            task.uncancel()
            await self._fail(answer, exchange.cut_reason)
        except httpx.InvalidURL:
            await _refuse(send, "The request's path cannot be passed on.", status=400)
        except (_MemberFailedError, httpx.HTTPError) as error:
            await self._fail(answer, f"{self.name} failed ({str(error) or type(error).__name__}).")
        finally:
            self._open[url].discard(exchange)

    async def _fail(self, answer: "_Answer", reason: str) -> None:
        if answer.has_begun:
            self.num_cut += 1
            await answer.break_off(reason)
        else:
            self.num_refused += 1
            await _refuse(answer.send, reason)

    async def _pass(self, scope: Scope, receive: Receive, answer: "_Answer", exchange: _Exchange, url: str) -> None:
        path = scope["raw_path"].split(b"?")[0].decode("latin-1")
        if not path.startswith("/"):
            # Behind the member's address, "@name/" would be that of another server.
            raise httpx.InvalidURL("The path does not begin with a slash.")
        query = scope["query_string"].decode("latin-1")
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        body = _Body(receive)
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        request = httpx.Request(
            scope["method"],
            f"{url}{path}{'?' if query else ''}{query}",
            headers=headers,
            content=body.chunks() if has_body else None,
            extensions={
                "timeout": {"connect": _CONNECT_S, "read": None, "write": None, "pool": None},
                "trace": exchange.trace,
            },
        )
        leaving = asyncio.create_task(_leave(body, exchange, has_body=has_body))
        try:
            response = await self.http.send(request, stream=True)
            async with contextlib.aclosing(response):
                await answer.pass_on(response)
        finally:
            leaving.cancel()


class _Body:
    """The request's body, which only one may read; `is_read` is set behind its end."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.is_read = asyncio.Event()

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise _MemberFailedError("The client left.")
            yield message.get("body", b"")
            if not message.get("more_body"):
                self.is_read.set()
                return


async def _leave(body: _Body, exchange: _Exchange, *, has_body: bool) -> None:
    """Ends an exchange when the router closes its connection: the member then stops computing."""
    if has_body:
        await body.is_read.wait()
    while (await body.receive())["type"] != "http.disconnect":
        pass
    exchange.is_left = True
    exchange.end()


class _Answer:
    """What is sent back. An event stream is passed on in whole events, anything else whole where it is not too long."""

    def __init__(self, send: Send, num_open: Callable[[], int], *, is_anthropic: bool) -> None:
        self.send = send
        self._num_open = num_open
        self.has_begun = False
        self._is_stream = False
        self._is_anthropic = is_anthropic

    async def pass_on(self, response: httpx.Response) -> None:
        self._is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOP_HEADERS]
        headers.append((OPEN_HEADER, str(self._num_open()).encode()))
        start: Message = {"type": "http.response.start", "status": response.status_code, "headers": headers}
        held = b""
        async for chunk in response.aiter_raw():
            held += chunk
            ready, held = self._split(held)
            if ready:
                await self._begin(start)
                await self.send({"type": "http.response.body", "body": ready, "more_body": True})
        await self._begin(start)
        await self.send({"type": "http.response.body", "body": held})

    def _split(self, held: bytes) -> tuple[bytes, bytes]:
        """What may be passed on, and what is held back."""
        if self._is_stream:
            end = held.rfind(b"\n\n") + 2
            if end > 1:
                return held[:end], held[end:]
        is_whole = self.has_begun and not self._is_stream
        return (held, b"") if is_whole or len(held) > _HELD_BYTES else (b"", held)

    async def _begin(self, start: Message) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self.send(start)

    async def break_off(self, reason: str) -> None:
        """A last event that says why; an answer that is no stream is cut, which every client takes for an error."""
        if not self._is_stream:
            raise _MemberFailedError(reason)
        error = {"message": f"The answer broke off: {reason}", "type": "server_error", "param": None, "code": 503}
        event = {"type": "error", "error": {"type": "api_error", "message": error["message"]}}
        text = (
            f"event: error\ndata: {json.dumps(event)}"
            if self._is_anthropic
            else f"data: {json.dumps({'error': error})}"
        )
        await self.send({"type": "http.response.body", "body": f"{text}\n\n".encode()})


async def _refuse(send: Send, message: str, status: int = 503) -> None:
    """In OpenAI's shape. The message of a 503 is for logs: the router asks another member."""
    kind = "server_error" if status == 503 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", RETRY_AFTER_S.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RelayPorts:
    """The application of a server that listens on several ports: which one was asked says whose relay it is."""

    def __init__(self, by_port: dict[int, ASGIApp]) -> None:
        self.by_port = by_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.by_port[scope["server"][1]](scope, receive, send)
