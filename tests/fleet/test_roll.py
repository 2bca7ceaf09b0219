"""Members that the fleet starts itself: replaced without a lost request, refused where they answer otherwise."""

import asyncio
import os
import signal
import threading
from types import SimpleNamespace

import httpx
import pytest

from onebox.fleet.roll import Roll
from onebox.fleet.watch import MemberState
from onebox.spec.errors import MismatchError, OneboxError
from tests.fleet.conftest import HTTP, RunningFleet, is_healthy, wait_until, write_config

IN_PLACE = pytest.param("?in_place=true", marks=pytest.mark.fleet)
"""Takes longer, and runs with `make fleet-test`."""


def rewrite(fleet, nursery, **options):
    """Start lines that `roll` will read."""
    settings = {"port": fleet.config.port, "admin_port": fleet.config.admin_port}
    members = [{"name": name, "start": nursery.start_line(**options)} for name in ("a", "b")]
    write_config(fleet.config.path, members, **settings)


@pytest.fixture(scope="module")
def own(nursery, tmp_path_factory):
    """Two members of the fleet's own behind vllm-router."""
    path = tmp_path_factory.mktemp("own") / "fleet.toml"
    members = [{"name": name, "start": nursery.start_line()} for name in ("a", "b")]
    fleet = RunningFleet(write_config(path, members))
    with fleet.running():
        yield fleet
        urls = [member["url"] for member in fleet.admin("GET", "/status")["members"]]
    # The end of the fleet is the end of what it started.
    assert not any(is_healthy(url) for url in [*urls, fleet.url])


def roll(fleet, query=""):
    fleet.admin("POST", f"/roll{query}")
    return wait_until(lambda: (state := fleet.admin("GET", "/status")["roll"])["is_done"] and state)


def chat(url, number):
    body = {"messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 3}
    return HTTP.post(f"{url}/v1/chat/completions", json=body).status_code


@pytest.mark.parametrize("query", ["", IN_PLACE])
def test_a_roll_replaces_all_members_and_loses_no_request(own, nursery, query):
    version = f"2.{len(query)}"
    rewrite(own, nursery, version=version)
    before = {member["name"]: member["url"] for member in own.admin("GET", "/status")["members"]}
    statuses, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            statuses.append(chat(own.url, len(statuses)))
            is_over.wait(0.1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        state = roll(own, query)
    finally:
        is_over.set()
        asking.join()
    assert state["error"] == "", state
    assert set(statuses) == {200}
    members = own.admin("GET", "/status")["members"]
    assert [(member["version"], member["state"]) for member in members] == [(version, "up")] * 2
    # Beside the old ones: elsewhere, and those have ended. In place: where they were.
    assert [member["url"] == before[member["name"]] for member in members] == [bool(query)] * 2
    assert query or not any(map(is_healthy, before.values()))


@pytest.mark.parametrize(
    ("options", "query", "said"),
    [
        ({"seed": 1}, "", "otherwise than the old one"),
        pytest.param({"context": 999}, "?in_place=true", "context 999 is not 2000", marks=pytest.mark.fleet),
    ],
)
def test_a_new_server_that_is_not_equal_takes_no_traffic(own, nursery, options, query, said):
    before = own.admin("GET", "/status")["members"]
    rewrite(own, nursery, version=before[0]["version"], **options)
    state = roll(own, query)
    assert said in state["error"]
    for member in before:
        own.wait_state(member["name"], "up")
        assert own.member(member["name"])["url"] == member["url"]
    assert chat(own.url, 0) == 200


@pytest.mark.fleet
def test_a_drained_member_that_is_replaced_in_place_stays_drained(own, nursery):
    rewrite(own, nursery, version=own.member("b")["version"])
    own.admin("POST", "/members/b/drain")
    try:
        assert roll(own, "?names=b&in_place=true")["error"] == ""
        own.wait_state("b", "drained")
    finally:
        own.admin("POST", "/members/b/resume")
        own.wait_state("b", "up")


def test_where_the_old_server_is_down_another_member_gives_the_answers_to_compare_with(tmp_path):
    config = write_config(tmp_path / "fleet.toml", [{"name": name, "start": "serve {port}"} for name in "ab"])
    asked = set()

    def answer(request):
        asked.add(request.url.host)
        return httpx.Response(200, json={"choices": [{"token_ids": [1], "text": "x"}]})

    async def ask(state):
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            states = zip(config.members, (MemberState.UP, state), strict=True)
            members = [SimpleNamespace(config=each, state=state, url=f"http://{each.name}") for each, state in states]
            fleet = SimpleNamespace(members=members, http=http)
            await Roll(fleet, config, [], in_place=False)._old_answers(members[1])

    asyncio.run(ask(MemberState.UP))
    assert asked == {"b"}
    asked.clear()
    asyncio.run(ask(MemberState.DOWN))
    assert asked == {"a"}


def test_a_member_of_its_own_that_dies_is_started_again(own):
    process = own.fleet.member("b").process.process_id
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: own.member("b")["num_restarts"] and own.member("b")["state"] == "up")
    assert chat(own.url, 1) == 200


def test_members_that_are_not_alike_are_refused_before_anything_serves(nursery, tmp_path):
    members = [{"name": name, "start": nursery.start_line(version=name)} for name in ("1.0", "1.1")]
    with (
        pytest.raises(MismatchError, match=r"version 1\.1 is not 1\.0"),
        RunningFleet(write_config(tmp_path / "fleet.toml", members)).running(),
    ):
        pass


def test_a_member_that_cannot_start_is_said_with_its_last_line(tmp_path):
    members = [{"name": "a", "start": "sh -c 'echo no such model; exit 3; {port}'"}]
    config = write_config(tmp_path / "fleet.toml", members)
    with pytest.raises(OneboxError, match="a ended with status 3: no such model"), RunningFleet(config).running():
        pass
