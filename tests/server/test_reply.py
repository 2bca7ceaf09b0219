"""A client that disconnects ends its request, streamed or not."""

import asyncio
import json
import socket

import httpx
import pytest

from onebox.server.app import create_app
from onebox.server.schemas.completions import CompletionRequest
from tests.server.conftest import listening, wait_until


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(scripted, stream):
    client = scripted("x" * 300, max_num_seqs=1)
    client.runner.gate.clear()

    async def leave():
        body = json.dumps({"prompt": "Hi", "max_tokens": 300, "stream": stream}).encode()
        messages = iter([{"type": "http.request", "body": body}])
        submitted = asyncio.Event()

        async def receive():
            for message in messages:
                return message
            while not client.service.engine._open:
                await asyncio.sleep(0.001)
            submitted.set()
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
        scope |= {"headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"}}
        await create_app(client.service)(scope, receive, send)
        assert submitted.is_set()

    asyncio.run(asyncio.wait_for(leave(), 60))
    client.runner.gate.set()
    assert client.complete(max_tokens=1).json()["choices"][0]["text"] == "x", "the slot is still held"
    assert client.service.engine.stats().num_finished == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_slot(scripted, stream):
    client = scripted("x" * 300, max_num_seqs=1)
    engine = client.service.engine
    client.runner.gate.clear()
    with listening(client.app) as url:
        address = (httpx.URL(url).host, httpx.URL(url).port)
        body = json.dumps({"prompt": "Hi", "max_tokens": 300, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        with socket.create_connection(address) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: engine._open)
        wait_until(lambda: engine._aborted or not engine._open)
        client.runner.gate.set()
        wait_until(lambda: not engine._open)
    assert engine.stats().totals.completion_tokens < 300


def test_a_slow_reader_does_not_hold_the_engine(scripted):
    client = scripted("x" * 200)
    body = {"prompt": "Hi", "max_tokens": 200, "stream": True}

    async def read_late():
        completion = CompletionRequest(**body).completion_input(client.service.defaults)
        async with client.service.submit(await client.service.prompts.of_completion(completion), "cmpl") as answers:
            while client.service.engine.stats().num_finished == 0:
                await asyncio.sleep(0.001)
            return await answers.whole()

    (chunk,) = asyncio.run(asyncio.wait_for(read_late(), 60))
    assert len(chunk.token_ids) == 200
