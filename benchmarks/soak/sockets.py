"""Clients that misuse connections: half-sent, silent, slow, lying about lengths. Each holds one connection."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.soak.http import Address, Connection, Reply, Sent, encode
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.scenarios import CHAT, COMPLETIONS

__all__ = ["HOLD_LIMIT_S", "Holders"]

HOLD_LIMIT_S = 100.0
"""The server promises to drop a client that neither sends nor reads for 60 s."""
_PATIENCE_S = 30.0
"""At a quiet point, streams older than this are waited for, until the server drops them; younger ones are left."""
_BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
_SENT = Sent(CHAT, _BODY)
# More than the kernel's buffers hold.
_LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 3, "logprobs": 20}
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 5000,
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999999999999999999\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % index for index in range(20_000)) + b"\r\n",
)


class Holders:
    """Runs connection misuse; those that wait for the server to close them stay through quiet points."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: set[asyncio.Task[None]] = set()
        self._unread: dict[asyncio.Task[None], float] = {}
        """Those of them that never read a stream, with their beginnings."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def run_one(self, random_: random.Random, address: Address) -> str:
        """One case from beginning to end, or its beginning where the server must end it; returns its name."""
        name, case = random_.choice(_SHORT_CASES)
        if random_.random() < 0.2 and self.num_held < 8:
            name, held_case = random_.choice(_HELD_CASES)
            task = asyncio.ensure_future(self._hold(name, held_case(address), address))
            self._held.add(task)
            task.add_done_callback(self._held.discard)
            if held_case is _unread_stream:
                self._unread[task] = time.monotonic()
                task.add_done_callback(self._unread.pop)
            return name
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
            async with asyncio.timeout(20), Connection(address) as connection:
                await case(random_, connection, address)
        self._ledger.count(f"connection: {name}", "done")
        return name

    async def end_unread(self) -> None:
        """Returns when no answer waits for a client that does not read: the server holds it for as long.

        So memory is compared without what clients still hold.
        """
        now = time.monotonic()
        for task, began in self._unread.items():
            if now - began < _PATIENCE_S:
                task.cancel()
        await asyncio.gather(*self._unread, return_exceptions=True)

    async def close(self) -> None:
        """Leaves all connections."""
        held = list(self._held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    async def _hold(self, name: str, raw: bytes, address: Address) -> None:
        """Sends these bytes, then nothing and reads nothing, until the server closes."""
        began = time.monotonic()
        narrow = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(narrow, address[:2])
            await loop.sock_sendall(narrow, raw)
            await asyncio.sleep(1)
            while not _is_closed(narrow, address):
                await asyncio.sleep(1)
                if time.monotonic() - began > HOLD_LIMIT_S:
                    self._ledger.fail("held connection", f"{name}: still open after {HOLD_LIMIT_S:.0f} s")
                    return
            self._ledger.count(f"connection: {name}", "closed by the server")
        except OSError:
            self._ledger.count(f"connection: {name}", "closed by the server")
        except asyncio.CancelledError:
            self._ledger.count(f"connection: {name}", "left by the client")
            raise
        finally:
            narrow.close()


def _is_closed(narrow: socket.socket, address: Address) -> bool:
    """Whether the server has let go of its end: the kernel's table has no process for it any more.

    From here a connection with unread data looks open long after the peer has closed it.
    """
    ours, theirs = (f":{port:04X}" for port in (narrow.getsockname()[1], address.port))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
        if local.endswith(theirs) and remote.endswith(ours):
            return inode == "0"
    return True


def _silence(_: Address) -> bytes:
    return b""


def _half_header(address: Address) -> bytes:
    return encode(address, _SENT)[:60]


def _half_body(address: Address) -> bytes:
    return encode(address, _SENT)[:-10]


def _unread_stream(address: Address) -> bytes:
    return encode(address, Sent(COMPLETIONS, json.dumps(_LONG).encode()))


_HELD_CASES: tuple[tuple[str, Callable[[Address], bytes]], ...] = (
    ("silent", _silence),
    ("half a header", _half_header),
    ("half a body", _half_body),
    ("stream never read", _unread_stream),
)


async def _leave_early(random_: random.Random, connection: Connection, address: Address) -> None:
    whole = encode(address, _SENT)
    connection.writer.write(whole[: random_.randrange(1, len(whole))])
    await asyncio.sleep(random_.random() * 2)


async def _dribble(_: random.Random, connection: Connection, address: Address) -> None:
    """A body byte by byte, and the answer read to its end."""
    for byte in encode(address, _SENT):
        connection.writer.write(bytes((byte,)))
        await asyncio.sleep(0.01)
    await connection.read_reply(Reply(time.monotonic()), _SENT)


async def _false_length(random_: random.Random, connection: Connection, address: Address) -> None:
    """Chunks far beyond the limit of bodies under a small Content-Length."""
    head = encode(address, Sent(CHAT), content_length="10", transfer_encoding="chunked")
    connection.writer.write(head + (b"4\r\n    \r\n" if random_.random() < 0.3 else b""))
    piece = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    for _ in range(90):
        connection.writer.write(piece)
        await connection.writer.drain()
    connection.writer.write(b"0\r\n\r\n")
    await connection.read_reply(Reply(time.monotonic()), _SENT)


async def _garbage(random_: random.Random, connection: Connection, _: Address) -> None:
    connection.writer.write(random_.choice(_GARBAGE))
    await connection.writer.drain()
    await asyncio.wait_for(connection.reader.read(1000), 2)


async def _pipelined(_: random.Random, connection: Connection, address: Address) -> None:
    """Twenty requests in one go, and no answer read."""
    connection.writer.write(encode(address, _SENT, connection="keep-alive") * 20)
    await connection.writer.drain()
    await asyncio.sleep(1)


async def _half_closed(_: random.Random, connection: Connection, address: Address) -> None:
    connection.writer.write(encode(address, _SENT))
    connection.writer.write_eof()
    await asyncio.sleep(1)


async def _many_idle(random_: random.Random, __: Connection, address: Address) -> None:
    """Hundreds of connections that say nothing for a second."""
    async with contextlib.AsyncExitStack() as stack:
        for _index in range(random_.randint(100, 300)):
            await stack.enter_async_context(Connection(address))
        await asyncio.sleep(1)


_SHORT_CASES: tuple[tuple[str, Callable[[random.Random, Connection, Address], Awaitable[None]]], ...] = (
    ("left early", _leave_early),
    ("byte by byte", _dribble),
    ("false length", _false_length),
    ("garbage", _garbage),
    ("pipelined", _pipelined),
    ("half closed", _half_closed),
    ("hundreds idle", _many_idle),
)
