"""A small HTTP/1.1 client over asyncio: one request per connection, every arrival timed, abandoned at any moment.

The usual clients refuse to send what the soak must send: false lengths, wrong hosts, halves of bodies.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Address", "Connection", "Reply", "Sent", "call", "encode"]

_READ_LIMIT_BYTES = 64 << 20
_DEATH_S = 0.5
_PIECE_BYTES = 1 << 16


class Address(NamedTuple):
    """Where the server listens, and the key it asks for."""

    host: str
    port: int
    api_key: str | None = None


@dataclass(frozen=True)
class Sent:
    """A request. `body` is sent as it is; `abort_before_s` and `abort_after_events` say when the client leaves."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 120.0
    abort_before_s: float | None = None
    abort_after_events: int | None = None


@dataclass
class Reply:
    """What came back. `status` is None where the connection ended before a whole answer came."""

    began: float
    ended: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    arrivals: list[float] = field(default_factory=list)
    """When each event of a stream came, or the whole answer; in seconds of the monotonic clock."""
    problem: str | None = None
    """Why there is no whole answer: refused, reset, cut off, no end in time."""
    was_aborted: bool = False

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The data of a stream's events, without [DONE]."""
        lines = (line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:"))
        return [json.loads(line) for line in lines if line != b"[DONE]"]


def encode(address: Address, sent: Sent, **replaced: str | None) -> bytes:
    """The bytes of a request; `replaced` sets headers (host=..., content_length=...) and None leaves one out."""
    headers: dict[str, str | None] = {
        "host": f"{address.host}:{address.port}",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(sent.body)),
        "authorization": f"Bearer {address.api_key}" if address.api_key else None,
        **sent.headers,
        **{name.replace("_", "-"): value for name, value in replaced.items()},
    }
    lines = [f"{sent.method} {sent.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent.body


class Connection:
    """One connection, closed at the end of `async with`, whatever was sent over it."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection(
            self._address.host, self._address.port, limit=_READ_LIMIT_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def read_reply(self, reply: Reply, sent: Sent) -> None:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        reply.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        status = int(head[0].split()[1])
        async for piece in self._pieces(reply.headers):
            reply.body += piece
            reply.arrivals += [time.monotonic()] * max(1, piece.count(b"data:"))
            if sent.abort_after_events is not None and len(reply.arrivals) >= sent.abort_after_events:
                reply.status, reply.was_aborted = status, True
                return
        reply.status = status

    async def _pieces(self, headers: dict[str, str]) -> Any:
        if headers.get("transfer-encoding") == "chunked":
            while num_bytes := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self.reader.readexactly(num_bytes)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        elif "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await self.reader.read(_PIECE_BYTES):
                yield piece


async def call(address: Address, sent: Sent, raw: bytes | None = None) -> Reply:
    """Sends a request and reads the answer to its end; never raises for what the server does."""
    reply = Reply(time.monotonic())
    limit_s = sent.limit_s if sent.abort_before_s is None else sent.abort_before_s
    try:
        async with asyncio.timeout(limit_s), Connection(address) as connection:
            with contextlib.suppress(OSError):
                # A refusal may come, and the connection close, before a large body is sent.
                connection.writer.write(encode(address, sent) if raw is None else raw)
                await connection.writer.drain()
            await connection.read_reply(reply, sent)
    except TimeoutError:
        reply.was_aborted = sent.abort_before_s is not None
        reply.problem = None if reply.was_aborted else f"no end within {limit_s:.0f} s"
    except asyncio.IncompleteReadError as error:
        reply.problem = "cut off" if reply.headers or error.partial else "closed without an answer"
    except (OSError, ValueError, IndexError) as error:
        reply.problem = f"{type(error).__name__}: {error}"
    reply.ended = time.monotonic()
    if reply.problem:
        # Where the server died, the kernel closes its connections before it reports the death.
        await asyncio.sleep(_DEATH_S)
    return reply
