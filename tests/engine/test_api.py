"""The door keeps its promises: refusals with numbers, one ending per request, the same tokens in any company."""

import asyncio
import threading

import pytest

from onebox.engine.api import (
    ContextTooLongError,
    Engine,
    EngineConfig,
    EngineStoppedError,
    Failed,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
    SamplingParams,
    Started,
    Tokens,
)
from onebox.engine.runner import ReferenceRunner
from onebox.spec.errors import UsageError
from tests.engine.scripted import ScriptedRunner
from tests.model.oracle import tiny_model


@pytest.fixture(scope="module")
def tiny_engine():
    spec, weights = tiny_model()
    with Engine(ReferenceRunner(spec, weights), EngineConfig(max_model_len=600, max_num_seqs=4)) as engine:
        yield engine


@pytest.fixture
def scripted():
    """(engine, runner) with two slots and two places in the queue."""
    runner = ScriptedRunner(fails_on=99)
    config = EngineConfig(max_model_len=500, max_num_seqs=2, max_num_waiting=2, eos_token_ids=(3,))
    with Engine(runner, config) as engine:
        yield engine, runner
        runner.gate.set()


def tokens(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def request(name, prompt, **sampling):
    return Request(name, tuple(prompt), SamplingParams(**sampling))


PROMPTS = [range(5), range(7, 150), [300] * 64, range(100, 300)]
WAYS = [{"temperature": 0}, {"seed": 3}, {"seed": -4, "top_k": 30, "top_p": 0.8, "temperature": 1.7}]


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "seeded", "seeded with top_k and top_p"])
def test_tokens_do_not_depend_on_other_requests(tiny_engine, way):
    jobs = [request(f"job {i}", prompt, max_tokens=15, **way) for i, prompt in enumerate(PROMPTS)]
    alone = [tokens(tiny_engine.submit(job)) for job in jobs]
    handles = [tiny_engine.submit(job) for job in jobs]
    assert [tokens(handle) for handle in handles] == alone
    handles = [tiny_engine.submit(job) for job in reversed(jobs)]
    assert [tokens(handle) for handle in handles] == alone[::-1]
    assert all(len(set(ids)) > 5 for ids in alone)


def test_seeds_give_different_answers_and_no_seed_a_new_one_each_time(tiny_engine):
    params = [{"seed": 1}, {"seed": 2}, {}, {}]
    answers = [tokens(tiny_engine.submit(request("a", [1, 2], max_tokens=20, **way))) for way in params]
    assert len({tuple(ids) for ids in answers}) == 4


def test_events_come_in_order_with_counts(scripted):
    engine, _ = scripted
    events = list(engine.submit(request("a", range(10, 15), max_tokens=2)))
    assert events[:3] == [Started("a"), Tokens("a", (1,)), Tokens("a", (2,))]
    assert isinstance(events[3], Finished)
    assert (events[3].reason, events[3].counts.prompt_tokens, events[3].counts.completion_tokens) == ("length", 5, 2)


def test_the_end_token_stops_unless_it_is_ignored(scripted):
    engine, _ = scripted
    *_, last = events = list(engine.submit(request("a", [10])))
    assert (tokens(events), last.reason, last.counts.completion_tokens) == ([1, 2], FinishReason.STOP, 3)
    assert tokens(engine.submit(request("b", [10], ignore_eos=True, max_tokens=4))) == [1, 2, 3, 1]
    assert tokens(engine.submit(request("c", [10], stop_token_ids=(2,)))) == [1]


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([1] * 500, {}, "500 tokens and the context holds 500"),
        ([1] * 900, {}, "900 tokens and the context holds 500"),
        ([1] * 300, {"max_tokens": 201}, "300 tokens and 201 more are asked for, 501 in all; the context holds 500"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_both_numbers(scripted, prompt, sampling, says):
    with pytest.raises(ContextTooLongError, match=says):
        scripted[0].submit(request("a", prompt, **sampling))


@pytest.mark.parametrize(("prompt", "says"), [([], "empty"), ([1, 384], "384"), ([-1], "-1")])
def test_impossible_prompts_are_refused(scripted, prompt, says):
    with pytest.raises(UsageError, match=says):
        scripted[0].submit(request("a", prompt))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}])
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_a_full_queue_refuses_and_has_room_again_later(scripted):
    engine, runner = scripted
    runner.gate.clear()
    handles = [engine.submit(request(str(i), [i])) for i in range(4)]
    with pytest.raises(QueueFullError, match="All 4 places"):
        engine.submit(request("one too many", [1]))
    with pytest.raises(UsageError, match="open already"):
        engine.submit(request("0", [1]))
    runner.gate.set()
    assert all(tokens(handle) == [1, 2] for handle in handles)
    assert tokens(engine.submit(request("one too many", [1]))) == [1, 2]


def test_abort_frees_the_slot_wherever_the_request_is(scripted):
    engine, runner = scripted
    runner.gate.clear()
    running = [engine.submit(request(f"running {i}", range(100, 300), ignore_eos=True)) for i in range(2)]
    waiting = engine.submit(request("waiting", [5]))
    for handle in [*running, waiting]:
        engine.abort(handle.request_id)
        engine.abort(handle.request_id)
    engine.abort("nobody")
    runner.gate.set()
    for handle in [*running, waiting]:
        assert list(handle)[-1].reason is FinishReason.ABORT
    assert tokens(engine.submit(request("next", [7]))) == [1, 2]
    assert runner.in_use == {}
    assert max(row.end for batch in runner.batches for row in batch.rows) <= 128, "an aborted prompt was finished"


def test_a_failing_row_fails_its_request_alone(scripted):
    engine, _ = scripted
    bad, good = engine.submit(request("bad", [98, 99])), engine.submit(request("good", [1]))
    last = list(bad)[-1]
    assert isinstance(last, Failed)
    assert "a scripted failure" in last.message
    assert tokens(good) == [1, 2]
    stats = engine.stats()
    assert (stats.num_failed, stats.num_finished, stats.num_running, stats.is_alive) == (1, 1, 0, True)
    assert tokens(engine.submit(request("later", [1]))) == [1, 2]


def test_a_model_that_computes_nonsense_fails_the_request(caplog):
    spec, weights = tiny_model()
    weights["lm_head.weight"] = weights["lm_head.weight"] * float("nan")
    with Engine(ReferenceRunner(spec, weights), EngineConfig(max_model_len=100)) as engine:
        last = list(engine.submit(request("a", [1], temperature=0)))[-1]
        assert isinstance(last, Failed)
        assert "not finite" in last.message
        assert engine.stats().is_alive
    assert "request a failed" in caplog.text


def test_close_fails_what_is_open_and_refuses_what_comes_later(scripted):
    engine, runner = scripted
    runner.gate.clear()
    handle = engine.submit(request("a", [1], ignore_eos=True))
    closer = threading.Thread(target=engine.close)
    closer.start()
    runner.gate.set()
    closer.join()
    assert isinstance(list(handle)[-1], Failed)
    engine.close()
    assert not engine.stats().is_alive
    with pytest.raises(EngineStoppedError):
        engine.submit(request("b", [1]))


def test_an_engine_that_dies_fails_everyone_and_says_so(caplog):
    class Broken(ScriptedRunner):
        def run(self, _):
            raise MemoryError("no more")

    with Engine(Broken(), EngineConfig(max_model_len=100)) as engine:
        (event,) = list(engine.submit(request("a", [1])))
        assert event == Failed("a", "The engine died: no more.")
        assert not engine.stats().is_alive
        with pytest.raises(EngineStoppedError):
            engine.submit(request("b", [1]))
    assert "the engine died" in caplog.text


def test_events_can_be_awaited(scripted):
    engine, runner = scripted

    async def read():
        runner.gate.clear()
        handle = engine.submit(request("a", range(100, 290)))
        asyncio.get_running_loop().call_later(0.01, runner.gate.set)
        return [event async for event in handle]

    assert tokens(asyncio.run(read())) == [1, 2]


def test_a_reader_whose_loop_is_gone_does_no_harm(scripted):
    engine, runner = scripted

    async def leave():
        handle = engine.submit(request("a", [10], ignore_eos=True, max_tokens=300))
        async for _ in handle:
            runner.gate.clear()
            break
        return handle

    handle = asyncio.run(leave())
    runner.gate.set()
    assert isinstance(list(handle)[-1], Finished)
