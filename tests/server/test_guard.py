"""In front of the routes: the limits of bodies."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from onebox.server.app import create_app
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client, listening, wait_until
from tests.server.test_errors import refused

BODY = {"prompt": "Hi", "max_tokens": 1}


@pytest.fixture
def guarded(scripted):
    def make(**settings):
        return Client(scripted("ok").service, ServerSettings(**settings))

    return make


def post(client, headers=None, **options):
    return client.request("POST", "/v1/completions", headers=headers or {}, **(options or {"json": BODY}))


def test_a_body_beyond_the_bound_is_refused_announced_or_not(guarded):
    client = guarded(max_body_bytes=200)
    assert post(client).status_code == 200
    long = b'{"prompt": "' + b"x" * 400 + b'"}'
    headers = {"content-type": "application/json"}
    assert "longer than 200 bytes" in refused(post(client, headers, content=long), 413)

    async def parts():
        for at in range(0, len(long), 50):
            yield long[at : at + 50]

    assert "longer than 200 bytes" in refused(post(client, headers, content=parts()), 413)


@pytest.mark.parametrize("length", ["10", "0", "-1", "five", "9" * 5000])
def test_a_false_length_does_not_hide_the_body(guarded, length):
    """As seen by an application whose server passes any header on."""
    client = guarded(max_body_bytes=200)

    async def parts():
        for _ in range(10):
            yield b"x" * 50

    headers = {"content-type": "application/json", "content-length": length}
    assert "longer than 200 bytes" in refused(post(client, headers, content=parts()), 413)


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_refused(guarded, encoding):
    assert "compressed" in refused(post(guarded(), {"content-encoding": encoding}, json=BODY), 415)


def test_no_second_header_hides_a_compressed_body(guarded):
    headers = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    assert "compressed" in refused(post(guarded(), headers, json=BODY), 415)


def test_bodies_of_all_requests_have_one_limit_and_small_ones_always_pass(scripted):
    client = scripted("x" * 300, max_num_seqs=1)
    settings = ServerSettings(max_bodies_bytes=100_000)
    # As long as a body may be for what is in it: blanks are no value.
    large = json.dumps({"prompt": "Hi", "max_tokens": 300}) + " " * 150_000
    headers = {"content-type": "application/json"}
    with listening(create_app(client.service, settings)) as url, ThreadPoolExecutor() as threads:
        client.runner.gate.clear()
        first = threads.submit(httpx.post, f"{url}/v1/completions", content=large, headers=headers, timeout=60)
        wait_until(lambda: client.service.engine._open)
        reply = httpx.post(f"{url}/v1/completions", content=large, headers=headers)
        assert "100000" in refused(reply, 429, code="server_busy", kind="rate_limit_error")
        assert reply.headers["retry-after"] == "1"
        assert httpx.post(f"{url}/tokenize", json={"prompt": "x" * 60_000}).status_code == 200
        client.runner.gate.set()
        assert first.result().status_code == 200
        assert httpx.post(f"{url}/v1/completions", content=large, headers=headers).status_code == 200
