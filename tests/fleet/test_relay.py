"""A relay over members that break off in the middle: clients get whole events and a last one that says why."""

import asyncio
import json
import socket

import httpx
import pytest

from onebox.fleet.fleet import _bound
from onebox.fleet.relay import Relay, _Answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"a": 1}\n\n'


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


async def asked(reply, path="/v1/chat/completions", during=None):
    """What a client gets of a member that sends these bytes and closes; `during` gets the relay when all is sent."""
    held = asyncio.Event()

    async def answer(reader, writer):
        await reader.readuntil(b"{}")
        writer.write(reply)
        await writer.drain()
        if during:
            await held.wait()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, httpx.AsyncClient() as upstream:
        relay = Relay("box", upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        transport = httpx.ASGITransport(relay, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://relay") as client:
            asking = asyncio.create_task(client.post(path, content=b"{}"))
            if during:
                while not relay.num_open():
                    await asyncio.sleep(0.01)
                await during(relay)
            response = await asking
            held.set()
        return response, relay


def test_a_broken_stream_ends_with_whole_events_and_an_error():
    reply = HEAD % b"text/event-stream" + chunk(EVENT) + chunk(b'data: {"half')
    response, relay = asyncio.run(asked(reply))
    first, last, end = response.text.split("\n\n")
    assert (response.status_code, first, end) == (200, 'data: {"a": 1}', "")
    assert "The answer broke off: box failed" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert (relay.num_cut, relay.num_refused, relay.num_passed) == (1, 0, 0)


def test_an_anthropic_stream_ends_with_an_error_of_its_own_form():
    reply = HEAD % b"text/event-stream" + chunk(EVENT)
    response, _ = asyncio.run(asked(reply, "/v1/messages"))
    name, data = response.text.split("\n\n")[1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"


@pytest.mark.parametrize("reply", [b"", HEAD % b"application/json" + chunk(b'{"half')])
def test_what_has_not_begun_can_be_had_from_another_member(reply):
    response, relay = asyncio.run(asked(reply))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert (relay.num_cut, relay.num_refused) == (0, 1)


@pytest.mark.parametrize("path", [b"@evil.example/v1/models", b"*", b"/" + b"a" * 70_000])
def test_a_path_that_cannot_be_passed_on_is_the_clients_fault_and_goes_nowhere(path):
    sent = []

    async def ask():
        transport = httpx.MockTransport(lambda request: sent.append(request.url) or httpx.Response(200))
        async with httpx.AsyncClient(transport=transport) as upstream:
            relay = Relay("box", upstream, "http://127.0.0.1:8000")
            scope = {"type": "http", "method": "GET", "path": "/", "raw_path": path, "query_string": b"", "headers": []}
            told = []

            async def receive():
                await asyncio.sleep(3600)

            async def send(message):
                told.append(message)

            await relay(scope, receive, send)
            return told, relay

    told, relay = asyncio.run(ask())
    assert (told[0]["status"], sent, relay.num_open()) == (400, [], 0)


def test_an_event_without_an_end_is_not_held_for_ever(monkeypatch):
    monkeypatch.setattr("onebox.fleet.relay._HELD_BYTES", 100)
    endless = [b"data: " + b"x" * 80, b"y" * 80, b"z" * 80]
    reply = HEAD % b"text/event-stream" + b"".join(map(chunk, endless)) + chunk(b"")
    response, _ = asyncio.run(asked(reply))
    assert response.content == b"".join(endless)
    answer = _Answer(None, lambda: 0, is_anthropic=False)
    answer._is_stream = True
    assert answer._split(b"x" * 101) == (b"x" * 101, b"")
    assert answer._split(b"x" * 100) == (b"", b"x" * 100)


def test_a_whole_answer_passes_as_it_is():
    reply = HEAD % b"text/event-stream" + chunk(EVENT + EVENT) + chunk(b"data: [DONE]\n\n") + chunk(b"")
    response, relay = asyncio.run(asked(reply))
    assert response.content == EVENT + EVENT + b"data: [DONE]\n\n"
    assert response.headers["content-type"] == "text/event-stream"
    assert (relay.num_passed, relay.num_open()) == (1, 0)


def test_a_member_that_is_given_up_is_answered_for_at_once():
    async def give_up(relay):
        await asyncio.sleep(0.1)
        relay.cut("box is hung.")

    response, relay = asyncio.run(asked(b"", during=give_up))
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "box is hung."
    assert relay.num_open() == 0


def test_a_closed_relay_asks_nobody():
    async def ask():
        async with httpx.AsyncClient() as upstream:
            relay = Relay("box", upstream, "http://127.0.0.1:1", closed_reason="it is drained.")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(relay), base_url="http://relay") as client:
                return await client.get("/health")

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["error"]["message"]) == (503, "box takes no requests: it is drained.")


def test_relays_send_what_follows_the_headers_at_once():
    async def accepted_option():
        sockets = asyncio.get_running_loop().create_future()

        async def take(reader, writer):
            sockets.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(take, sock=_bound("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            return await sockets

    assert asyncio.run(accepted_option())
