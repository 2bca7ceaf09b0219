"""Whose a request is on a server without keys."""

import asyncio

import httpx
import pytest

from onebox.engine.api import ClientShare
from onebox.server.addresses import sender_of
from onebox.server.keys import ApiKey
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client
from tests.server.test_guard import BODY


@pytest.mark.parametrize(
    ("host", "sender"),
    [
        ("192.168.1.7", "192.168.1.7"),
        ("::ffff:192.168.1.7", "192.168.1.7"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_an_ipv6_networks_addresses_are_one_sender(host, sender):
    assert sender_of(host) == sender


def ask_from(client, *hosts, headers=None):
    async def ask():
        for host in hosts:
            transport = httpx.ASGITransport(client.app, client=(host, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200

    asyncio.run(ask())


def test_without_keys_a_request_is_its_addresss_which_keeps_half_of_the_slots(scripted):
    client = Client(scripted("ok", "ok").service, ServerSettings())
    ask_from(client, "10.0.0.1", "10.0.0.2")
    config = client.service.engine.config
    places = config.max_num_seqs + config.max_num_waiting
    shares = [ClientShare(f"10.0.0.{i}", places, config.max_num_seqs // 2, is_key=False) for i in (1, 2)]
    assert [request.client for request in client.requests] == shares
    # Labels of addresses would be without end.
    assert "10.0.0.1" not in client.request("GET", "/metrics").text


def test_with_keys_the_address_does_not_matter(scripted):
    client = Client(scripted("ok", "ok").service, ServerSettings(api_keys=(ApiKey("a", "key-a"),)))
    ask_from(client, "10.0.0.1", "10.0.0.2", headers={"x-api-key": "key-a"})
    assert {request.client.name for request in client.requests} == {"a"}
