"""The engine in a process of its own: the same door as in this one."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from onebox.engine.api import (
    ContextTooLongError,
    Counts,
    Engine,
    EngineRestartingError,
    EngineStoppedError,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    QueueFullError,
    RequestHandle,
    Started,
)
from onebox.engine.remote import parent
from onebox.engine.remote.parent import EngineProcess
from onebox.engine.remote.supervise import RestartPolicy
from onebox.spec.errors import OneboxError, UsageError
from tests.engine.fake import FAILING, FakeRunner, tokens_of, wait_until
from tests.engine.remote.processes import (
    CONFIG,
    HANGING,
    SLOW,
    stop_threads,
)
from tests.engine.small import answer, request


def test_both_doors_give_the_same_events(calm):
    asked = [request("a", range(10, 15), max_tokens=3), request("b", [1, FAILING]), request("c", range(40))]
    with Engine(FakeRunner(CONFIG), CONFIG) as thread:
        expected = [list(thread.submit(one)) for one in asked]
    assert [list(calm.submit(one)) for one in asked] == expected
    assert expected[0][0] == Started("a")


def test_answers_come_to_whoever_asked(calm):
    prompts = {str(i): range(i, i + 20) for i in range(4)}
    handles = [calm.submit(request(name, prompt, max_tokens=20)) for name, prompt in prompts.items()]
    assert [tokens_of(handle) for handle in handles] == [answer(prompt, 20) for prompt in prompts.values()]
    stats = calm.stats()
    assert (stats.is_alive, stats.num_running, stats.num_waiting) == (True, 0, 0)


def test_events_can_be_awaited(calm):
    async def read():
        return tokens_of([event async for event in calm.submit(request("a", range(30)))])

    assert asyncio.run(read()) == answer(range(30))


def test_a_lookup_tells_what_the_next_request_finds(calm):
    prompt = [*range(30, 10, -1)] * 10
    asked = request("asked", prompt)
    before = calm.lookup(asked)
    list(calm.submit(asked))
    counted = calm.stats().prefix
    after = calm.lookup(asked)
    assert calm.stats().prefix == counted, "a lookup was counted"
    again = list(calm.submit(request("again", prompt)))[-1]
    assert (before.cached_tokens, before.tier) == (0, None)
    assert (after.cached_tokens, after.tier) == (again.counts.cached_tokens, "memory") == (192, "memory")
    assert calm.lookup(replace(asked, cache_prompt=False)).cached_tokens == 0
    assert calm.lookup(request("scored", prompt, prompt_logprobs=0)).cached_tokens == 0
    with pytest.raises(ContextTooLongError):
        calm.lookup(request("long", [1] * 500))


@pytest.mark.parametrize(
    "refused",
    [
        [request("a", [])],
        [request("a", [10_000])],
        [request("a", [1], stop_token_ids=(-1,))],
        [request("a", [1] * 500)],
        [request("a", [1] * 300, max_tokens=300)],
        [request("a", [1]), request("a", [1])],
        [request(str(i), [1]) for i in range(7)],
        [request("a", [1], grammar=Grammar(GrammarKind.REGEX, "a+"))],
    ],
)
def test_both_doors_refuse_the_same_things_in_the_same_words(calm, refused):
    with Engine(FakeRunner(CONFIG), CONFIG) as thread, pytest.raises(OneboxError) as expected:
        thread.submit_all(refused)
    with pytest.raises(OneboxError) as error:
        calm.submit_all(refused)
    assert (type(error.value), str(error.value)) == (type(expected.value), str(expected.value))
    assert tokens_of(calm.submit(request("a", [1]))) == answer([1])


def test_copies_have_names_and_seeds_of_their_own(calm):
    handles = calm.submit_copies(request("a", [1], seed=5), 2)
    assert [handle.request_id for handle in handles] == ["a/0", "a/1"]
    assert all(isinstance(list(handle)[-1], Finished) for handle in handles)
    with pytest.raises(UsageError, match="n is 0"):
        calm.submit_copies(request("a", [1]), 0)


def test_an_abort_ends_a_request_and_frees_its_place(start):
    engine = start()
    handles = [engine.submit(request(str(i), [SLOW, i], max_tokens=400)) for i in range(6)]
    for handle in handles:
        engine.abort(handle.request_id)
    assert {list(handle)[-1].reason for handle in handles} == {FinishReason.ABORT}
    assert tokens_of(engine.submit(request("next", [7]))) == answer([7])


def test_a_reader_that_has_all_it_wants_is_told_of_a_stop_and_not_of_an_abort():
    ends = [Finished("a", FinishReason.ABORT, Counts(1, 2)), Failed("a", "It died.")]
    for end, told in zip(ends, [Finished("a", FinishReason.STOP, Counts(1, 2)), ends[1]], strict=True):
        handle = RequestHandle("a")
        handle.is_complete = True
        handle.deliver(end, 0.0)
        assert list(handle) == [told]


def test_a_full_queue_refuses_at_once(start):
    engine = start()
    for i in range(6):
        engine.submit(request(str(i), [HANGING]))
    with pytest.raises(QueueFullError, match="Of 6 places for requests 6 are taken"):
        engine.submit(request("a", [1]))
    assert engine.stats().num_waiting + engine.stats().num_running == 6


def test_a_lookup_waits_for_no_step_and_for_no_dead_process(start, monkeypatch):
    engine = start(RestartPolicy(first_wait_s=600))
    prompt = [7] * 100
    list(engine.submit(request("computed", prompt)))
    for i in range(6):
        engine.submit(request(str(i), [HANGING]))
    assert engine.lookup(request("a", prompt)).cached_tokens == 64
    stop_threads(engine.pid)
    monkeypatch.setattr(parent, "_LOOKUP_S", 0.05)
    with pytest.raises(QueueFullError, match="did not say within"):
        engine.lookup(request("a", prompt))
    monkeypatch.setattr(parent, "_LOOKUP_S", 60)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(engine.lookup, request("a", prompt))
        wait_until(lambda: engine._awaited)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineStoppedError):
            late.result()
    with pytest.raises(EngineRestartingError):
        engine.lookup(request("a", prompt))


def test_a_step_is_one_message_however_many_requests_are_in_it(calm, monkeypatch):
    heard = []
    deliver = EngineProcess._deliver
    monkeypatch.setattr(EngineProcess, "_deliver", lambda self, step: (heard.append(step), deliver(self, step)))
    before = calm.stats().totals.num_steps
    for handle in calm.submit_copies(request("a", [1] * 100, max_tokens=50), 4):
        list(handle)
    assert len(heard) == calm.stats().totals.num_steps - before
    assert max(len(step.events) for step in heard) >= 4


def test_an_observer_gets_every_event_and_its_steps_start_whether_or_not_anybody_reads(calm, monkeypatch):
    heard, starts = [], set()
    deliver = EngineProcess._deliver
    monkeypatch.setattr(
        EngineProcess, "_deliver", lambda self, step: (starts.add(step.started_at), deliver(self, step))
    )
    calm.observer = lambda asked: lambda event, started_at: heard.append((asked.request_id, event, started_at))
    try:
        events = list(calm.submit(request("a", [1] * 100)))
        calm.submit(request("b", [FAILING]))
        wait_until(lambda: heard and isinstance(heard[-1][1], Failed))
    finally:
        calm.observer = None
    assert [event for name, event, _ in heard if name == "a"] == events
    assert {started_at for *_, started_at in heard} <= starts


def test_whoever_asks_for_the_process_loads_no_torch():
    check = "import sys, onebox.engine.remote.parent, onebox.engine.start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
