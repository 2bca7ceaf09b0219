"""Who may call: API keys, and on a server without one, hosts and origins."""

import asyncio

import httpx
import pytest

from onebox.engine.api import ClientShare
from onebox.server.access import HostNames
from onebox.server.keys import ApiKey
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client
from tests.server.test_errors import refused
from tests.server.test_guard import BODY, post

TWO = (ApiKey("alice", "key-a", max_share=0.5), ApiKey("bob", "key-b", priority=3))


@pytest.fixture
def guarded(scripted):
    def make(**settings):
        return Client(scripted("ok").service, ServerSettings(**settings))

    return make


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer s3cret"}, {"authorization": "bearer  s3cret"}, {"x-api-key": "s3cret"}]
)
def test_the_key_opens_in_either_header(guarded, headers):
    assert post(guarded(api_keys=(ApiKey("test", "s3cret"),)), headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer s3cret2"},
        {"x-api-key": ""},
        {"x-api-key": b"s3cr\xe9t"},
    ],
)
def test_without_the_key_everything_but_health_version_and_the_page_is_closed(guarded, headers):
    client = guarded(api_keys=(ApiKey("test", "s3cret"),))
    assert "Authorization: Bearer KEY" in refused(post(client, headers), 401, code="invalid_api_key")
    for path in ("/v1/models", "/openapi.json", "/nothing", "/health/"):
        assert client.request("GET", path, headers=headers).status_code == 401
    for path in ("/health", "/version"):
        assert client.request("GET", path, headers=headers).status_code == 200
    for path in ("/", "/static/nothing.js"):
        assert client.request("GET", path, headers=headers).status_code != 401


def test_pages_of_other_origins_are_let_in_only_when_allowed(guarded):
    preflight = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    client = guarded()
    assert "access-control-allow-origin" not in post(client, {"origin": "http://page"}).headers
    client = guarded(allowed_origins=("http://page",), api_keys=(ApiKey("test", "k"),))
    answer = client.request("OPTIONS", "/v1/completions", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://page")
    answer = post(client, {"origin": "http://page", "x-api-key": "k"})
    assert answer.headers["access-control-allow-origin"] == "http://page"
    assert "access-control-allow-origin" not in post(client, {"origin": "http://b", "x-api-key": "k"}).headers


@pytest.mark.parametrize("header", [{"authorization": "Bearer {}"}, {"x-api-key": "{}"}], ids=["bearer", "x-api-key"])
def test_each_of_several_keys_opens_in_either_header(guarded, header):
    client = guarded(api_keys=TWO)
    for key, status in (("key-a", 200), ("key-b", 200), ("key-c", 401), ("key", 401), ("", 401)):
        headers = {name: text.format(key) for name, text in header.items()}
        assert post(client, headers).status_code == status


def test_a_keys_priority_is_its_requests_and_asking_only_lowers_it(guarded):
    client = guarded(api_keys=TWO)
    for asked in (-100, 0, 7):
        post(client, {"x-api-key": "key-b"}, json={**BODY, "priority": asked})
    assert [request.priority for request in client.requests] == [3, 3, 10]
    assert {request.client.name for request in client.requests} == {"bob"}


def test_a_single_keys_requests_choose_their_priority_as_without_keys(guarded):
    for settings in ({}, {"api_keys": (ApiKey("one", "k"),)}):
        client = guarded(**settings)
        post(client, {"x-api-key": "k"}, json={**BODY, "priority": -100})
        assert client.requests[-1].priority == -100


def test_a_key_beyond_its_share_is_429_while_others_are_served(scripted):
    server = scripted("ok", max_num_seqs=2, max_num_waiting=4)
    client = Client(server.service, ServerSettings(api_keys=TWO))
    server.runner.gate.clear()

    async def overload():
        transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            def ask(key, **fields):
                return http.post("/v1/completions", json={**BODY, **fields}, headers={"x-api-key": key})

            held = [asyncio.ensure_future(ask("key-a")) for _ in range(3)]
            while len(client.requests) < 3:
                await asyncio.sleep(0.01)
            full = await ask("key-a")
            never = await ask("key-a", n=4)
            other = asyncio.ensure_future(ask("key-b"))
            while len(client.requests) < 5:
                await asyncio.sleep(0.01)
            server.runner.gate.set()
            return full, never, await asyncio.gather(other, *held), await ask("key-a")

    full, never, served, after = asyncio.run(asyncio.wait_for(overload(), 60))
    message = refused(full, 429, code="key_share_full", kind="rate_limit_error")
    assert "Of the 3 places that are the share of the API key 'alice', 3 are taken" in message
    assert "retry-after" in full.headers
    assert "the API key 'alice' has 3 places" in refused(never, 400, param="n")
    assert {response.status_code for response in (*served, after)} == {200}
    # Two slots and four places in the queue.
    assert {request.client for request in client.requests} == {ClientShare("alice", 3, 1), ClientShare("bob", 3, 1)}
    metrics = client.request("GET", "/metrics", headers={"x-api-key": "key-a"}).text
    assert 'onebox:requests_by_key_total{key="alice",model_name="tiny"} 4.0' in metrics
    assert "key-a" not in metrics


OWN = [
    "localhost",
    "LOCALHOST:80",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8000",
    "[::1]",
    "192.168.1.7:80",
    "",
    "a.localhost",
]


@pytest.mark.parametrize("host", OWN)
def test_addresses_and_own_names_are_accepted(guarded, host):
    assert post(guarded(), {"host": host}).status_code == 200


def test_the_machines_own_names_are_accepted(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Spark-1.lan")
    names = HostNames()
    assert all(names.holds(host) for host in ("spark-1", "spark-1.lan:80", "spark-1.local", "Spark-1.LAN."))
    assert not any(names.holds(host) for host in ("spark-2", "spark-1.evil.example", "local", "xspark-1.local"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_bound_to_this_machine_by_somebody_else_is_refused(guarded, host, method):
    client = guarded()
    for path in ("/v1/completions", "/v1/models", "/", "/metrics"):
        message = refused(client.request(method, path, headers={"host": host}), 421, code="host_not_allowed")
        assert "--allowed-hosts" in message
    assert client.request(method, "/v1/messages", headers={"host": host}).json()["type"] == "error"
    assert not client.requests


def test_a_refused_host_is_not_repeated_at_length(guarded):
    assert len(refused(post(guarded(), {"host": "x" * 5000}), 421, code="host_not_allowed")) < 400


def test_hosts_can_be_allowed_and_with_a_key_all_are(guarded):
    client = guarded(allowed_hosts=("box.example", "*.lan"))
    assert post(client, {"host": "box.example:1"}).status_code == 200
    assert post(client, {"host": "a.lan"}).status_code == 200
    assert post(client, {"host": "lan.example"}).status_code == 421
    assert post(guarded(allowed_hosts=("*",)), {"host": "evil.example"}).status_code == 200
    key = {"x-api-key": "k"}
    keys = (ApiKey("one", "k"),)
    assert post(guarded(api_keys=keys), {"host": "proxy.example", **key}).status_code == 200
    assert post(guarded(api_keys=keys, allowed_hosts=("a",)), {"host": "proxy.example", **key}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        *({"origin": origin} for origin in ("http://evil.example", "null", "http://localhost:3000", "http://[x", "")),
        *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    ],
)
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_pages_of_other_origins_cannot_send_requests(guarded, headers, kind):
    client = guarded()
    answer = post(client, {**headers, "content-type": kind}, content=b'{"prompt": "Hi", "max_tokens": 1}')
    assert "--allowed-origins" in refused(answer, 403, code="origin_not_allowed")
    assert not client.requests


def test_the_own_page_and_allowed_origins_can(guarded):
    assert post(guarded(), {"origin": "http://localhost", "sec-fetch-site": "same-origin"}).status_code == 200
    assert post(guarded(allowed_origins=("http://page",)), {"origin": "http://page"}).status_code == 200
    assert post(guarded(allowed_origins=("*",)), {"origin": "http://page"}).status_code == 200
