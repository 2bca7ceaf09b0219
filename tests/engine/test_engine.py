"""The door: events in order and one ending per request, from any thread or event loop, and what it tells of itself."""

import asyncio
import random
import threading
import time

import pytest

from onebox.engine.api import (
    Engine,
    EngineStoppedError,
    Failed,
    Finished,
    FinishReason,
    QueueFullError,
    SpeculationConfig,
    SpeculationMethod,
    Started,
    Tokens,
)
from onebox.engine.engine import CommittedStep, Outbox
from onebox.engine.step import StepPlan
from onebox.spec.errors import UsageError
from tests.engine.fake import FakeRunner, tokens_of, wait_until
from tests.engine.small import answer, config, request


def test_events_come_in_order_with_counts(fake):
    events = list(fake[0].submit(request("a", range(10, 15), max_tokens=3)))
    first, *tokens, last = events
    assert first == Started("a")
    assert tokens == [Tokens("a", (token_id,)) for token_id in answer(range(10, 15), 3)]
    assert isinstance(last, Finished)
    assert (last.reason, last.counts.prompt_tokens, last.counts.completion_tokens) == (FinishReason.LENGTH, 5, 3)


def test_without_max_tokens_an_answer_fills_the_context(fake):
    *_, last = fake[0].submit(request("a", range(40), max_tokens=None))
    assert (last.reason, last.counts.completion_tokens) == (FinishReason.LENGTH, 460)


def test_many_threads_may_submit_and_read_at_once():
    runner = FakeRunner(config(max_num_waiting=100))
    with Engine(runner, runner.config) as engine:
        answers = {}

        def ask(name):
            answers[name] = tokens_of(engine.submit(request(str(name), range(name, 40), max_tokens=20)))

        threads = [threading.Thread(target=ask, args=(name,)) for name in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {name: answer(range(name, 40), 20) for name in range(30)}


def test_events_can_be_awaited_side_by_side(fake):
    engine, runner = fake

    async def read(handle):
        return tokens_of([event async for event in handle])

    async def read_both():
        runner.gate.clear()
        handles = [engine.submit(request(name, prompt)) for name, prompt in (("a", range(30)), ("b", range(5, 45)))]
        asyncio.get_running_loop().call_soon(runner.gate.set)
        return await asyncio.gather(*map(read, handles))

    assert asyncio.run(read_both()) == [answer(range(30)), answer(range(5, 45))]


def test_a_reader_whose_loop_is_gone_does_no_harm(fake):
    engine, runner = fake

    async def leave():
        handle = engine.submit(request("a", [10], max_tokens=300))
        async for _ in handle:
            runner.gate.clear()
            break
        return handle

    handle = asyncio.run(leave())
    runner.gate.set()
    assert isinstance(list(handle)[-1], Finished)


def test_copies_share_the_prompts_computation_and_count_their_seeds_up():
    runner = FakeRunner(config(max_num_seqs=1, max_num_waiting=3))
    prompt = [i % 40 for i in range(200)]
    with Engine(runner, runner.config) as engine:
        handles = engine.submit_copies(request("a", prompt, seed=7), 3)
        ends = [list(handle)[-1] for handle in handles]
        with pytest.raises(UsageError, match="n is 0"):
            engine.submit_copies(request("a", prompt), 0)
    assert [handle.request_id for handle in handles] == ["a/0", "a/1", "a/2"]
    assert [end.counts.cached_tokens for end in ends] == [0, 192, 192]
    seeds = [piece.draw.sampling.seed for batch in runner.plans for piece in batch.chunks if piece.draw]
    assert seeds == [7, 8, 9]


def test_without_a_seed_every_request_draws_another_one(fake):
    engine, runner = fake
    for handle in engine.submit_copies(request("a", range(5), max_tokens=1), 2):
        list(handle)
    seeds = [piece.draw.sampling.seed for batch in runner.plans for piece in batch.chunks]
    assert len(set(seeds)) == 2
    assert None not in seeds


def test_thousands_of_submissions_and_aborts_leave_nothing_behind():
    runner = FakeRunner(config(max_num_seqs=4, max_num_waiting=60))
    numbers = random.Random(3)
    with Engine(runner, runner.config) as engine:
        runner.scheduler = engine._scheduler
        reader = engine.submit(request("reader", range(30), max_tokens=400))
        handles, num_refused = [], 0
        # No step ends before the queue has been full once; later it is full or not, as the machine pleases.
        runner.gate.clear()
        while len(handles) < 2_000:
            prompt = [numbers.randrange(40) for _ in range(numbers.choice([1, 5, 70]))]
            try:
                handles.append(engine.submit(request(str(len(handles)), prompt, max_tokens=50)))
            except QueueFullError:
                num_refused += 1
                runner.gate.set()
                time.sleep(0.0002)
                continue
            if numbers.random() < 0.95:
                engine.abort(handles[-1].request_id)
        ends = [list(handle)[-1] for handle in handles]
        assert tokens_of(reader) == answer(range(30), 400)
        assert all(isinstance(end, Finished) for end in ends)
        assert num_refused > 0
        wait_until(lambda: engine.stats().num_running == 0)
        assert (len(engine._open), engine._aborted, len(engine._submitted)) == (0, set(), 0)
        assert engine.stats().num_finished == len(ends) + 1
        engine._scheduler.check()
        engine._scheduler.clear_cache()
        assert engine._scheduler.stats().num_free_pages == 30
        assert not engine._speculator._drafting


def test_close_fails_what_is_open_and_refuses_what_comes_later(fake):
    engine, runner = fake
    runner.gate.clear()
    handle = engine.submit(request("a", [1], max_tokens=400))
    closer = threading.Thread(target=engine.close)
    closer.start()
    wait_until(lambda: not engine.stats().is_alive)
    runner.gate.set()
    closer.join()
    assert list(handle)[-1] == Failed("a", "The engine was closed before this request was done.")
    assert engine.stats().totals.num_failed == 1
    engine.close()
    with pytest.raises(EngineStoppedError, match="has stopped"):
        engine.submit(request("b", [1]))


def test_stats_follow_an_abort_though_no_step_comes_after_it(fake):
    engine, _runner = fake
    handle = engine.submit(request("a", [1], max_tokens=400))
    next(iter(handle))
    engine.abort("a")
    list(handle)
    stats = engine.stats()
    assert (stats.num_running, stats.totals.finished) == (0, {FinishReason.ABORT: 1})


# What it tells of itself.


def test_stats_count_what_was_done():
    limits = config(speculation=SpeculationConfig(SpeculationMethod.MTP, 3))
    runner = FakeRunner(limits)
    with Engine(runner, limits) as engine:
        assert engine.stats().num_free_pages == 30
        ends = [list(handle)[-1] for handle in engine.submit_copies(request("a", [1] * 100, max_tokens=20), 3)]
        stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, 3)
    assert stats.totals.finished == {FinishReason.LENGTH: 3}
    assert stats.totals.completion_tokens == 60
    assert stats.totals.prompt_tokens + stats.prefix.hit_tokens == stats.prefix.queried_tokens == 300
    assert stats.totals.num_steps == len(runner.plans)
    assert stats.totals.drafts == sum((end.counts.drafts for end in ends[1:]), ends[0].counts.drafts)
    assert stats.num_free_pages + stats.prefix.num_pages == 30


def test_stats_tell_of_requests_before_they_are_looked_at(fake):
    engine, runner = fake
    runner.gate.clear()
    handles = engine.submit_copies(request("a", [1]), 4)
    stats = engine.stats()
    assert stats.num_running + stats.num_waiting <= 4
    runner.gate.set()
    for handle in handles:
        list(handle)
    assert engine.stats().num_finished == 4


def test_the_outbox_delivers_a_step_once_and_holds_no_second_one():
    sent = []
    outbox, step = Outbox(sent.append), CommittedStep(StepPlan(), 0.0, 0.0, [])
    outbox.deliver()
    outbox.put(step)
    with pytest.raises(RuntimeError, match="before the one before it was delivered"):
        outbox.put(step)
    outbox.deliver()
    outbox.deliver()
    assert sent == [step]
