"""Members that fail behind the real router: others answer what has not begun, what has begun ends with an error."""

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.fleet.conftest import HTTP, STEP_S, fleet_of_three, wait_until

LONG = 1500
"""Tokens of answers that are still running when something happens to them."""


def body(text, **fields):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4, **fields}


def chat(url, text="Hi", **fields):
    return HTTP.post(f"{url}/v1/chat/completions", json=body(text, **fields))


def answers_of(fleet):
    """Requests that members have answered, as they count them."""
    answered = {}
    for name, port in fleet.ports.items():
        text = HTTP.get(f"http://127.0.0.1:{port}/metrics").text
        rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:request_success_total")]
        answered[name] = sum(float(value) for _, _, value in rows)
    return answered


def num_taken(fleet, name):
    """Requests that a member has begun to answer, ended or not."""
    member = fleet.member(name)
    return member["num_open"] + member["num_passed"] + member["num_cut"]


class Stream:
    """A stream that has begun; `member` has it."""

    def __init__(self, fleet, text, max_tokens=LONG):
        before = {name: num_taken(fleet, name) for name in fleet.ports}
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, http_client=HTTP)
        self._chunks = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(self._chunks)
        (self.member,) = [name for name in fleet.ports if num_taken(fleet, name) > before[name]]

    def end(self):
        """The reason of its last chunk; an error is raised."""
        return [chunk.choices[0].finish_reason for chunk in self._chunks][-1]

    def leave(self):
        self._chunks.close()


def begin(fleet, *lengths):
    """Streams of different texts and so many tokens, which the router spreads over the members."""
    return [Stream(fleet, f"{'abcdefgh'[place] * 40}, a text of its own", each) for place, each in enumerate(lengths)]


def bring_back(fleet, nursery, name, **options):
    fleet.pids[name] = nursery.start(fleet.ports[name], **{"step_s": STEP_S, **options})


def assert_answered(fleet, count, label):
    asked = [f"{label} {number} " + "xyzuvw"[number % 6] * 30 for number in range(count)]
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda text: chat(fleet.url, text), asked))
    assert [response.status_code for response in found] == [200] * count, [response.text for response in found]


@pytest.fixture(autouse=True)
def _whole(fleet):
    """Every test finds and leaves three members that take requests, and the router knows it."""
    yield
    for name in fleet.ports:
        fleet.admin("POST", f"/members/{name}/resume")
        fleet.wait_state(name, "up")
    wait_until(lambda: HTTP.get(f"{fleet.url}/readiness").json()["healthy_workers"] == 3)


def test_every_member_answers_and_all_answer_alike(fleet):
    before = answers_of(fleet)
    texts = [f"{letter * 30} is a text" for letter in "abcdefghijkl"]
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(lambda text: chat(fleet.url, text, max_tokens=12).json()["choices"], texts))
    after = answers_of(fleet)
    assert all(after[name] > before[name] for name in after)
    assert sum(after.values()) - sum(before.values()) == len(texts)
    direct = f"http://127.0.0.1:{fleet.ports['a']}"
    assert answers == [chat(direct, text, max_tokens=12).json()["choices"] for text in texts]


def test_a_session_stays_with_its_member(nursery, tmp_path):
    with fleet_of_three(nursery, tmp_path, policy="consistent_hash").running() as fleet:
        taken = {}
        for session in range(12):
            before = answers_of(fleet)
            for number in range(3):
                headers = {"x-session-id": f"session {session}"}
                asked = HTTP.post(f"{fleet.url}/v1/chat/completions", json=body(f"{number}"), headers=headers)
                assert asked.status_code == 200, asked.text
            taken[session] = {name: answers_of(fleet)[name] - before[name] for name in before}
        assert [sorted(each.values()) for each in taken.values()] == [[0, 0, 3]] * 12
        assert len({max(each, key=each.get) for each in taken.values()}) > 1  # of 12 sessions not all have one member


def test_a_killed_member_ends_begun_streams_with_an_error_and_nothing_else(fleet, nursery):
    doomed, *spared = begin(fleet, LONG, 60, 60)
    victim = doomed.member
    fleet.kill(victim)
    assert_answered(fleet, 6, "After a kill")
    with pytest.raises(openai.APIError, match=f"The answer broke off: {victim}"):
        doomed.end()
    assert [stream.end() for stream in spared if stream.member != victim]
    fleet.wait_state(victim, "down")
    # Returned: it gets requests again.
    bring_back(fleet, nursery, victim)
    numbers = iter(range(1000))
    wait_until(lambda: chat(fleet.url, f"{next(numbers)} more").status_code == 200 and answers_of(fleet)[victim])


def test_what_waits_for_a_hung_member_is_answered_by_another(fleet):
    begun = begin(fleet, LONG, LONG, LONG)
    victim = begun[0].member
    before, refused = answers_of(fleet), fleet.member(victim)["num_refused"]
    fleet.signal(victim, signal.SIGSTOP)
    try:
        assert_answered(fleet, 9, "Waits")
        with pytest.raises(openai.APIError, match=f"The answer broke off: {victim} is hung"):
            begun[0].end()
        fleet.wait_state(victim, "hung")
        assert fleet.member(victim)["num_refused"] > refused
    finally:
        fleet.signal(victim, signal.SIGCONT)
    for stream in begun[1:]:
        stream.leave()
    fleet.wait_state(victim, "up")
    # It has dropped what others have answered: nothing is answered twice.
    wait_until(lambda: not fleet.member(victim)["num_running"] and not fleet.member(victim)["num_waiting"])
    after = answers_of(fleet)
    assert sum(after.values()) - sum(before.values()) == 9
    assert after[victim] == before[victim]


def test_a_drained_member_finishes_what_it_has_and_gets_no_more(fleet):
    before = answers_of(fleet)
    streams = begin(fleet, 60, 60, 60)
    name = streams[0].member
    fleet.admin("POST", f"/members/{name}/drain")
    assert_answered(fleet, 6, "Elsewhere")
    assert [stream.end() for stream in streams] == ["length"] * 3
    wait_until(lambda: not fleet.member(name)["num_open"])
    assert fleet.member(name)["state"] == "drained"
    assert answers_of(fleet)[name] == before[name] + sum(stream.member == name for stream in streams)


def test_a_stopping_member_finishes_what_it_has_while_others_take_what_comes(fleet, nursery):
    streams = begin(fleet, 60, 60, 60)
    name = streams[0].member
    fleet.signal(name, signal.SIGTERM)  # drains by itself, as a pod does
    assert_answered(fleet, 6, "New")
    assert [stream.end() for stream in streams] == ["length"] * 3
    fleet.wait_state(name, "down")
    bring_back(fleet, nursery, name)


def test_a_member_that_returns_as_another_version_gets_nothing_until_it_is_the_old_one_however_slow(fleet, nursery):
    fleet.kill("c")
    fleet.wait_state("c", "down")
    bring_back(fleet, nursery, "c", version="2.0")
    fleet.wait_state("c", "different")
    assert "version 2.0 is not 1.0" in fleet.member("c")["message"]
    assert_answered(fleet, 6, "Version")
    assert answers_of(fleet)["c"] == 0
    fleet.kill("c")
    fleet.wait_state("c", "down")
    bring_back(fleet, nursery, "c", step_s=10 * STEP_S)
    fleet.wait_state("c", "up")
    assert_answered(fleet, 9, "Slow")


@dataclass
class Outcome:
    """How one request of a load ended."""

    is_stream: bool
    status: int = 0
    is_whole: bool = False
    num_events: int = 0
    error: str = ""


async def _send(client, url, number):
    outcome = Outcome(is_stream=number % 2 == 0)
    asked = body(f"Request {number}", max_tokens=6, stream=outcome.is_stream, ignore_eos=True)
    async with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as response:
        outcome.status = response.status_code
        content = (await response.aread()).decode()
    if not outcome.is_stream:
        outcome.is_whole = response.status_code == 200 and json.loads(content)["usage"]["completion_tokens"] == 6
        return outcome
    events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    outcome.is_whole = events[-1] == "[DONE]" and events.count("[DONE]") == 1
    outcome.num_events = len(events)
    outcome.error = "" if outcome.is_whole else json.loads(events[-1])["error"]["message"]
    return outcome


async def _load(url, count, width, on_progress):
    """`count` requests, `width` at a time; `on_progress` is called with the number of those that have ended."""
    outcomes, numbers = [], iter(range(count))

    async def work(client):
        for number in numbers:
            outcomes.append(await _send(client, url, number))
            await on_progress(len(outcomes))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client, asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(work(client))
    return outcomes


def test_of_200_requests_with_kills_each_is_answered_once_or_ends_with_an_error(fleet, nursery):
    victims = {20: "c", 80: "b", 140: "a"}
    lost = []
    before = answers_of(fleet)
    one_at_a_time = asyncio.Lock()

    async def kill_sometimes(num_ended):
        if not (name := victims.get(num_ended)):
            return
        async with one_at_a_time:
            lost.append((await asyncio.to_thread(answers_of, fleet))[name] - before[name])
            fleet.kill(name)
            await asyncio.to_thread(fleet.wait_state, name, "down")
            await asyncio.to_thread(bring_back, fleet, nursery, name)
            before[name] = 0
            await asyncio.to_thread(fleet.wait_state, name, "up")

    outcomes = asyncio.run(_load(fleet.url, 200, 12, kill_sometimes))
    assert len(outcomes) == 200
    assert {outcome.status for outcome in outcomes} == {200}, [each for each in outcomes if each.status != 200]
    broken = [outcome for outcome in outcomes if not outcome.is_whole]
    assert all(each.is_stream and each.num_events > 1 and "broke off" in each.error for each in broken), broken
    # What members have answered, the killed ones as far as they could still be asked, is what clients have got.
    after = answers_of(fleet)
    counted = sum(lost) + sum(after[name] - before[name] for name in after)
    assert counted <= 200 - len(broken)
    assert 200 - len(broken) - counted <= 3 * 12
