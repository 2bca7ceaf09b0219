"""Connections over raw sockets: slow, silent, contradictory and too many ones end, and others are served meanwhile."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from onebox.server.app import create_app
from onebox.server.http import HttpServer
from onebox.server.run import bind
from onebox.server.settings import ConnectionLimits
from tests.server.conftest import wait_until

SHORT = {"header_timeout_s": 0.5, "keep_alive_s": 0.5, "body_grace_s": 0.5, "send_timeout_s": 0.5}
FOREVER_S = 30
"""Far beyond any limit here."""
LARGE = 32 << 20
"""Bytes of an answer, more than the kernel's buffers take."""


class Echo:
    """An application that answers POST / with its body's length, and GET /large with many bytes."""

    def __init__(self):
        self.api = FastAPI()

        @self.api.post("/")
        async def length(request: Request):
            return {"length": len(await request.body())}

        @self.api.get("/large")
        async def large():
            return Response(b"x" * LARGE)

        @self.api.get("/wait")
        async def wait():
            await asyncio.sleep(FOREVER_S)

        @self.api.get("/health")
        async def health():
            return {}


@contextmanager
def bounded(app, **limits):
    """(server, address) with these limits."""
    bound = bind("127.0.0.1", 0)
    server = HttpServer(app, lambda: None, ConnectionLimits(**limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server, bound.getsockname()
    finally:
        server.force_exit = server.should_exit = True
        thread.join()


@pytest.fixture
def echo():
    app = Echo()
    with bounded(app.api, **SHORT) as (server, address):
        app.server, app.address = server, address
        yield app


def connected(address, data=b"", receive_bytes=None):
    made = socket.socket()
    made.settimeout(FOREVER_S)
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect(address)
    made.sendall(data)
    return made


def rest(connection):
    """All that comes until the other side closes; fails if it never does."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def message(connection):
    return json.loads(rest(connection).partition(b"\r\n\r\n")[2])["error"]["message"]


SILENT = {
    b"": b"",
    b"GET": b"408",
    b"POST / HTTP/1.1\r\nHost: x\r\n": b"408",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc": b"408",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc": b"408",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n": b"200",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea": b"200",
    b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc": b"404",
}
"""What is sent before the client goes silent, and what the answer's first line holds."""


def test_a_connection_that_goes_silent_is_closed(echo):
    with ExitStack() as stack:
        opened = {sent: stack.enter_context(connected(echo.address, sent)) for sent in SILENT}
        for sent, connection in opened.items():
            assert SILENT[sent] in rest(connection).partition(b"\r\n")[0], sent
    wait_until(lambda: not echo.server.server_state.connections)


def test_a_connection_that_only_drips_is_closed(echo):
    heads = (b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9999\r\nHost: x\r\n\r\n")
    limit = time.monotonic() + FOREVER_S
    with ExitStack() as stack:
        dripping = [stack.enter_context(connected(echo.address, head)) for head in heads]
        while dripping:
            assert time.monotonic() < limit
            time.sleep(0.05)
            for connection in list(dripping):
                try:
                    connection.sendall(b"a")
                except OSError:
                    dripping.remove(connection)


def test_a_body_that_keeps_up_the_least_rate_is_not_cut_off():
    app = Echo()
    with bounded(app.api, **SHORT, min_body_bytes_per_s=1000) as (_, address):
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 15000\r\n\r\n"
        with connected(address, head) as connection:
            for _ in range(15):
                connection.sendall(b"x" * 1000)
                time.sleep(0.1)
            assert b'"length":15000' in rest(connection)


@pytest.mark.parametrize(
    ("head", "wanted", "why"),
    [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400, "both Transfer-Encoding and Content-Length"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 999999999", 400, "both"),
        ("Content-Length: 5\r\nContent-Length: 6", 400, "Content-Length"),
        ("Content-Length: -5", 400, "Content-Length"),
        ("Content-Length: five", 400, "Content-Length"),
        ("Content-Length: +5", 400, "Content-Length"),
        (f"x{'y' * 30_000}", 400, "illegal header line."),
        ("Transfer-Encoding: gzip", 400, "Transfer-Encoding"),
        ("Transfer-Encoding: chunked, chunked", 400, "Transfer-Encoding"),
        ("\r\n".join(f"x-{place}: 1" for place in range(101)), 431, "103 header fields"),
        (f"x: {'x' * 70_000}", 431, ""),
    ],
)
def test_headers_that_contradict_each_other_or_are_too_many_are_refused(echo, head, wanted, why):
    request = f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n\r\n5\r\nabcde\r\n0\r\n\r\n".encode()
    with connected(echo.address, request) as connection:
        answer = rest(connection)
    assert int(answer.split()[1]) == wanted
    assert why in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_chunks_of_one_byte_are_refused(echo):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(echo.address, head + b"1\r\nx\r\n" * 1000 + b"1000\r\n" + b"x" * 4096) as connection:
        connection.sendall(b"\r\n" + b"1\r\nx\r\n" * 500)
        assert "chunks of a few bytes" in message(connection)


def test_a_client_that_reads_nothing_of_a_large_answer_is_cut_off(echo):
    with connected(echo.address, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", receive_bytes=4096):
        wait_until(lambda: echo.server.server_state.total_requests)
        wait_until(lambda: not echo.server.server_state.connections)


def test_a_client_that_reads_slowly_but_steadily_gets_everything():
    app = Echo()
    with bounded(app.api, **{**SHORT, "min_send_bytes_per_s": 1 << 20}) as (_, address):
        request = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with connected(address, request, receive_bytes=65536) as connection:
            num_read = 0
            while part := connection.recv(1 << 20):
                num_read += len(part)
                time.sleep(len(part) / (16 << 20))
        assert num_read > LARGE


def test_beyond_the_limit_a_waiting_connection_makes_room_and_health_answers_when_all_work():
    app = Echo()
    with bounded(app.api, max_connections=5) as (server, address), ExitStack() as stack:
        url = f"http://127.0.0.1:{address[1]}"
        silent = [stack.enter_context(connected(address)) for _ in range(20)]
        assert httpx.get(f"{url}/health").status_code == 200
        assert len(server.server_state.connections) <= 6
        assert rest(silent[0]) == b""
        work = [stack.enter_context(connected(address, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")) for _ in range(5)]
        wait_until(lambda: len(server.server_state.tasks) == len(work))
        assert httpx.get(f"{url}/health").status_code == 200
        refusal = httpx.get(f"{url}/large")
        assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")


def test_a_request_that_has_not_arrived_does_not_delay_the_stop():
    from tests.server.test_run import ended, serving

    with serving(FOREVER_S) as (process, url), ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(url).port)
        for sent in (b"", b"POST /read", b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na"):
            stack.enter_context(connected(address, sent))
        assert httpx.get(f"{url}/health").status_code == 200
        began = time.monotonic()
        process.terminate()
        assert ended(process)[0] == 0
        assert time.monotonic() - began < FOREVER_S / 2


STREAMS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2900},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2900},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2900},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2900},
}


def test_streams_whose_clients_read_nothing_are_cut_off_and_their_requests_ended(scripted):
    client = scripted("x" * 2900, max_model_len=3000, num_pages=1000)
    engine = client.service.engine
    with bounded(create_app(client.service), **SHORT) as (server, address), ExitStack() as stack:
        opened = []
        for path, fields in STREAMS.items():
            body = json.dumps({**fields, "stream": True}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
            opened.append(stack.enter_context(connected(address, request, receive_bytes=2048)))
        wait_until(lambda: engine.stats().totals.completion_tokens > 1000)
        wait_until(lambda: not server.server_state.connections and not engine._open)
        ends = (b"[DONE]", b"response.completed", b"message_stop")
        received = [rest(connection) for connection in opened]
        assert not any(end in data for data in received for end in ends)
        assert client.complete(max_tokens=3).status_code == 200


def test_what_follows_the_headers_is_not_held_back_for_an_acknowledgement(echo):
    with connected(echo.address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert client.recv(64).startswith(b"HTTP/1.1 200")
        (connection,) = echo.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
