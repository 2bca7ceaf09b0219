"""The door keeps its promises: refusals with numbers, one ending per request, from any thread or event loop."""

import asyncio
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from onebox.engine.api import (
    ContextTooLongError,
    Engine,
    EngineConfig,
    EngineStoppedError,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    HealthStatus,
    QueueFullError,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
    Started,
    Tokens,
    Vision,
)
from onebox.engine.engine import CommittedStep, Outbox
from onebox.engine.logits import Adjustment, LogitsRules
from onebox.engine.step import EncodedImages, StepPlan
from onebox.model.load import load_model
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from tests.engine.fake import FAILING, VOCAB_SIZE, FakeRunner, plain_answer, tokens_of, wait_until
from tests.engine.tiny import tiny_runner


def config(**limits):
    sizes = {"max_model_len": 500, "num_pages": 30, "num_checkpoints": 4, "max_num_seqs": 2, "max_num_waiting": 2}
    return EngineConfig(**(sizes | limits))


@pytest.fixture
def fake():
    """(engine, runner) with two slots and two places in the queue."""
    runner = FakeRunner(config())
    with Engine(runner, runner.config) as engine:
        runner.scheduler = engine._scheduler
        yield engine, runner
        runner.gate.set()


def request(name, prompt, **sampling):
    return Request(name, tuple(prompt), SamplingParams(**({"max_tokens": 5} | sampling)))


def answer(prompt, max_tokens=5):
    return plain_answer(tuple(prompt), max_tokens).token_ids


# What comes back.


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


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([1] * 500, {}, "500 tokens and the context holds 500"),
        ([1] * 900, {}, "900 tokens and the context holds 500"),
        ([1] * 300, {"max_tokens": 201}, "300 tokens and 201 more are asked for, 501 in all; the context holds 500"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_both_numbers(fake, prompt, sampling, says):
    with pytest.raises(ContextTooLongError, match=says):
        fake[0].submit(request("a", prompt, **sampling))


def test_what_exceeds_the_pages_is_refused_with_both_numbers():
    runner = FakeRunner(config(num_pages=3))
    with Engine(runner, runner.config) as engine:
        with pytest.raises(ContextTooLongError, match="4 pages of 64 tokens, where the KV cache has 3"):
            engine.submit(request("a", [1] * 180, max_tokens=13))
        assert tokens_of(engine.submit(request("a", [1] * 180, max_tokens=12))) == answer([1] * 180, 12)


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "empty"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}"),
        ([-1], {}, "token id -1"),
        ([1], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, f"logit_bias names token id {VOCAB_SIZE}"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, f"stop_token_ids names token id {VOCAB_SIZE}"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids names token id -1"),
        ([1, 1.5], {}, "token id 1.5"),
        ([1, 10**30], {}, "token id 10000"),
        (["1"], {}, "token id '1'"),
        ([1, [2, 3]], {}, r"token id \[2, 3\]"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(fake, prompt, sampling, says):
    with pytest.raises(UsageError, match=says):
        fake[0].submit(request("a", prompt, **sampling))


def test_a_min_tokens_that_bans_the_whole_vocabulary_is_refused(fake):
    everything = tuple(range(VOCAB_SIZE))
    with pytest.raises(UsageError, match="min_tokens is 2 and all 48 tokens are stop tokens"):
        fake[0].submit(request("a", [1], min_tokens=2, stop_token_ids=everything))
    assert tokens_of(fake[0].submit(request("a", [1], stop_token_ids=everything))) == []
    fewer = everything[1:]
    assert tokens_of(fake[0].submit(request("a", [1], min_tokens=5, stop_token_ids=fewer))) == [0] * 5


def test_a_grammar_without_a_token_table_is_refused(fake):
    with pytest.raises(UnsupportedError, match="no token table"):
        fake[0].submit(request("a", [1], grammar=Grammar(GrammarKind.REGEX, "a*")))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": NAN},
        {"temperature": 1e-309},
        {"temperature": 1e-11},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": INF},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 5e-324},
        {"top_p": NAN},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"max_tokens": 2.5},
        {"min_tokens": NAN},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"min_p": NAN},
        {"max_tokens": 0},
        {"min_tokens": 3, "max_tokens": 2},
        {"presence_penalty": 2.5},
        {"frequency_penalty": NAN},
        {"frequency_penalty": -INF},
        {"presence_penalty": 1e300},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": NAN},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, -INF),)},
        {"logit_bias": ((1, NAN),)},
        {"logit_bias": ((1, "2"),)},
        {"logit_bias": tuple((token_id, 1.0) for token_id in range(5000))},
        {"stop_token_ids": tuple(range(5000))},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_by_name(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize("timeout_s", [0, -1, NAN, INF, 10**400, "1"])
def test_an_impossible_timeout_is_refused(timeout_s):
    with pytest.raises(UsageError, match="timeout_s"):
        Request("a", (1,), timeout_s=timeout_s)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_model_len": 0},
        {"num_pages": 0},
        {"num_checkpoints": -1},
        {"max_num_batched_tokens": 100},
        {"checkpoint_spacing": 0},
    ],
    ids=str,
)
def test_impossible_limits_are_refused_by_name(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        config(**bad)


@pytest.mark.parametrize(("method", "max_drafts"), [("mtp", 0), ("mtp", 9), ("none", -1)])
def test_impossible_numbers_of_drafts_are_refused(method, max_drafts):
    with pytest.raises(UsageError, match=f"not {max_drafts}"):
        SpeculationConfig(SpeculationMethod(method), max_drafts)


def test_a_full_queue_refuses_and_has_room_again_later(fake):
    engine, runner = fake
    runner.gate.clear()
    handles = [engine.submit(request(str(i), [i])) for i in range(4)]
    with pytest.raises(QueueFullError, match="Of 4 places for requests 4 are taken"):
        engine.submit(request("one too many", [1]))
    with pytest.raises(UsageError, match="id 0 is open already"):
        engine.submit(request("0", [1]))
    runner.gate.set()
    assert [tokens_of(handle) for handle in handles] == [answer([i]) for i in range(4)]
    assert tokens_of(engine.submit(request("one too many", [1]))) == answer([1])


def test_several_requests_are_accepted_together_or_not_at_all(fake):
    engine, runner = fake
    runner.gate.clear()
    with pytest.raises(QueueFullError):
        engine.submit_copies(request("a", [1]), 5)
    with pytest.raises(UsageError, match="id b is open already"):
        engine.submit_all([request("b", [1]), request("b", [2])])
    runner.gate.set()
    assert engine.stats().num_waiting == 0
    assert len([list(handle) for handle in engine.submit_copies(request("a", [1]), 4)]) == 4


# How requests end before their time.


def test_abort_ends_a_request_wherever_it_is(fake):
    engine, runner = fake
    runner.gate.clear()
    running = [engine.submit(request(f"running {i}", [i] * 300, max_tokens=200)) for i in range(2)]
    waiting = engine.submit(request("waiting", [5]))
    for handle in [*running, waiting]:
        engine.abort(handle.request_id)
        engine.abort(handle.request_id)
    engine.abort("nobody")
    runner.gate.set()
    assert [list(handle)[-1].reason for handle in [*running, waiting]] == [FinishReason.ABORT] * 3
    assert tokens_of(engine.submit(request("next", [7]))) == answer([7])
    assert sum(len(batch.rows) for batch in runner.plans) <= 4 + 2, "an aborted answer went on"


def test_the_stats_that_come_with_an_abort_no_longer_count_it():
    runner, counted = FakeRunner(config()), []

    def deliver(deliveries, stats, _):
        counted.extend(stats.num_running for _, event in deliveries if isinstance(event, Finished))

    with Engine(runner, runner.config, deliver=deliver) as engine:
        runner.gate.clear()
        engine.submit_all([request(name, range(9), max_tokens=100) for name in "ab"])
        wait_until(lambda: not engine._submitted)
        for name in "ab":
            engine.abort(name)
        runner.gate.set()
        wait_until(lambda: len(counted) == 2)
    assert counted == [1, 0]


def test_an_abort_that_comes_too_late_does_not_meet_the_next_request_of_that_name(fake):
    engine, runner = fake
    runner.gate.clear()
    first = engine.submit(request("a", [1], max_tokens=1))
    wait_until(lambda: not engine.stats().num_waiting)  # until the step that ends it is under way
    engine.abort("a")
    later = []

    def submit_again():
        if "a" not in engine._open:
            later.append(engine.submit(request("a", [1])))

    first._wake = submit_again  # called as soon as an event is there, before the engine looks at anything else
    runner.gate.set()
    assert list(first)[-1].reason is FinishReason.LENGTH
    wait_until(lambda: later)
    assert tokens_of(later[0]) == answer([1])


def test_who_is_aborted_gets_first_what_the_step_before_gave(fake, monkeypatch):
    engine, runner = fake
    start = runner.start

    def start_and_abort(plan):
        if plan.rows:
            engine.abort("a")
        return start(plan)

    monkeypatch.setattr(runner, "start", start_and_abort)
    *events, last = engine.submit(request("a", [1], max_tokens=100))
    assert [type(event) for event in events] == [Started, Tokens, Tokens]
    assert (last.reason, last.counts.completion_tokens) == (FinishReason.ABORT, 2)
    assert tokens_of(events) == answer([1])[:2]


def test_a_timeout_ends_a_request_with_what_it_has(fake):
    *_, last = fake[0].submit(Request("a", (1,), SamplingParams(max_tokens=400), timeout_s=1e-9))
    assert last.reason is FinishReason.TIMEOUT


def test_a_failing_prompt_fails_its_request_alone(fake):
    engine, _ = fake
    bad, good = engine.submit(request("bad", [2, FAILING])), engine.submit(request("good", [1]))
    last = list(bad)[-1]
    assert last == Failed("bad", "The model could not compute this request: a scripted failure.")
    assert tokens_of(good) == answer([1])
    stats = engine.stats()
    assert (stats.totals.num_failed, stats.num_finished, stats.num_running, stats.is_alive) == (1, 1, 0, True)


def test_a_model_that_computes_nonsense_fails_the_request_and_not_the_engine(checkpoint, monkeypatch):
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    limits = config()
    logits = type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: logits(self, hidden) * NAN)
    with Engine(tiny_runner(model, limits), limits) as engine:
        last = list(engine.submit(request("a", [1], temperature=0)))[-1]
        assert last == Failed("a", "The model could not compute this request: its logits are not finite numbers.")
        monkeypatch.undo()
        assert isinstance(list(engine.submit(request("b", [1], temperature=0)))[-1], Finished)


def test_the_least_and_largest_settings_are_computed(checkpoint):
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    ways = [
        {"temperature": 1e-10},
        {"temperature": 1e10},
        {"temperature": 1e-10, "top_p": 1e-10, "min_p": 5e-324, "top_k": 2**31 - 1},
        {"repetition_penalty": 1e-10, "temperature": 1e-10},
        {"repetition_penalty": 1e10},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(model.spec.vocab_size))[:4096]},
        {"presence_penalty": 2, "frequency_penalty": -2, "top_p": 1e-10},
    ]
    with Engine(tiny_runner(model, config()), config()) as engine:
        for way in ways:
            *_, last = engine.submit(request("a", [1, 2, 3], seed=1, ignore_eos=True, **way))
            assert isinstance(last, Finished), (way, last)


@pytest.mark.parametrize("place", ["mask", "logprobs", "prompt logprobs"])
def test_a_row_that_cannot_be_computed_fails_its_request_and_no_other(checkpoint, monkeypatch, place):
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
    with Engine(tiny_runner(model, config()), config()) as engine:
        alone = tokens_of(engine.submit(request("alone", range(20), **sampling)))
        if place == "mask":
            adjust = LogitsRules.adjust
            nothing = np.zeros(-(-model.spec.vocab_size // 32), dtype=np.int32)
            empty = Adjustment(None, None, np.empty(0, dtype=np.int64), nothing)

            def adjust_badly(rules, drafts):
                if rules._sampling.seed != 13 or rules._num_sampled < 3:
                    return adjust(rules, drafts)
                return drafts, (empty,) * (1 + len(drafts))

            monkeypatch.setattr(LogitsRules, "adjust", adjust_badly)
        else:

            def fail(*_):
                raise torch.OutOfMemoryError("no more")

            monkeypatch.setattr("onebox.engine.logits.RowLogprobs._found", fail)
        asked = {"mask": {}, "logprobs": {"logprobs": 2}, "prompt logprobs": {"prompt_logprobs": 1}}[place]
        bad = engine.submit(request("bad", range(30), **sampling, **asked, seed=13))
        good = engine.submit(request("good", range(20), **sampling))
        *events, last = bad
        assert isinstance(last, Failed)
        assert ("not finite numbers" if place == "mask" else "not enough memory") in last.message
        assert len(tokens_of(events)) == (3 if place == "mask" else 0)
        assert tokens_of(good) == alone
        assert engine.stats().totals.num_failed == 1
        assert engine.stats().is_alive


def test_a_prompt_without_memory_to_prefill_fails_and_the_answers_beside_it_go_on(checkpoint, monkeypatch):
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    runner, sampling = tiny_runner(model, config()), {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
    with Engine(runner, config()) as engine:
        alone = tokens_of(engine.submit(request("alone", range(20), **sampling)))
        good = engine.submit(request("good", range(20), **sampling))
        events = iter(good)
        first = [next(events), next(events)]

        def fail(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        monkeypatch.setattr("onebox.engine.runner.prefill", fail)
        *_, last = engine.submit(request("bad", range(100), **sampling))
        assert last == Failed("bad", "The model could not compute this request: there is not enough memory for it.")
        assert tokens_of([*first, *events]) == alone


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "not enough memory"),
        (MismatchError("The prompt has 3 pad tokens for 4 embeddings."), "The prompt has 3 pad tokens"),
        (RuntimeError("a fault"), "internal error"),
        (KeyError("a fault"), "internal error"),
    ],
)
def test_images_that_cannot_be_encoded_fail_their_request_alone_and_are_counted(fake, error, says):
    engine, runner = fake

    def encode(prompt, vision):
        raise error

    runner.encode_images = encode
    good = engine.submit(request("good", [1]))
    (last,) = engine.submit(replace(request("bad", [2]), vision=Vision()))
    assert isinstance(last, Failed)
    assert says in last.message
    assert last.is_refusal == isinstance(error, MismatchError)
    assert tokens_of(good) == answer([1])
    assert (engine.stats().totals.num_failed, engine.stats().num_waiting) == (1, 0)


def test_images_are_encoded_for_one_request_in_a_step_and_only_when_it_is_next():
    runner = FakeRunner(config(max_num_seqs=2, max_num_waiting=8))
    encoded = []

    def encode(prompt, vision):
        encoded.append(len(runner.plans))
        positions = np.tile(np.arange(len(prompt)), (3, 1))
        return EncodedImages(positions, len(prompt), prompt, np.empty(0, dtype=np.int64), None)

    runner.encode_images = encode
    with Engine(runner, runner.config) as engine:
        runner.gate.clear()
        asked = [replace(request(str(i), [i], max_tokens=20), vision=Vision()) for i in range(6)]
        handles = engine.submit_all(asked)
        wait_until(lambda: engine.stats().num_waiting < 6)
        assert len(encoded) <= 1
        runner.gate.set()
        assert [tokens_of(handle) for handle in handles] == [answer([i], 20) for i in range(6)]
    assert len(set(encoded)) == 6, "two were encoded before one step"
    assert encoded[3] > 15, "one was encoded long before there was a slot for it"


def test_an_observer_that_fails_keeps_nobody_from_their_events(fake, caplog):
    engine, _ = fake

    def watch(event, started_at):
        raise ValueError("a fault")

    engine.observer = lambda _: watch
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])
    assert "an observer of request a failed" in caplog.text


def test_a_request_whose_events_cannot_be_delivered_fails_alone():
    undelivered, told = set(), {}

    def deliver(deliveries, stats, started_at):
        failed = []
        for handle, event in deliveries:
            if handle.request_id in undelivered and isinstance(event, Tokens):
                failed.append(Failed(handle.request_id, "It could not be sent."))
            else:
                told.setdefault(handle.request_id, []).append(event)
        return failed

    runner = FakeRunner(config())
    with Engine(runner, runner.config, deliver=deliver) as engine:
        undelivered.update(["bad", "last"])
        engine.submit_all(
            [request("bad", [1], max_tokens=90), request("good", [2]), request("last", [3], max_tokens=1)]
        )
        wait_until(lambda: len(told) == 3 and all(isinstance(e[-1], Finished | Failed) for e in told.values()))
        assert told["bad"][-1] == Failed("bad", "It could not be sent.")
        assert tokens_of(told["good"]) == answer([2])
        # One of them had ended when its events could not be sent; it failed all the same.
        wait_until(lambda: engine._scheduler.stats().totals.num_failed == 2)
        assert engine.stats().is_alive
        assert engine._scheduler.stats().num_running == 0
        engine._scheduler.check()


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


def test_an_engine_that_dies_fails_everyone_and_says_so(fake, monkeypatch, caplog):
    engine, runner = fake

    def die(batch):
        raise MemoryError("no more.")

    runner.gate.clear()
    handles = [engine.submit(request(str(i), [i])) for i in range(4)]
    monkeypatch.setattr(runner, "_chunk", die)
    runner.gate.set()
    for handle in handles:
        assert list(handle)[-1] == Failed(handle.request_id, "The engine died: no more.")
    assert not engine.stats().is_alive
    assert engine.stats().totals.num_failed == 4
    with pytest.raises(EngineStoppedError):
        engine.submit(request("b", [1]))
    assert "the engine died" in caplog.text


def test_an_engine_that_died_says_so_before_its_requests_are_failed(fake, monkeypatch):
    engine, runner = fake
    seen = []

    def die(batch):
        raise MemoryError("no more.")

    monkeypatch.setattr(runner, "_chunk", die)
    engine.observer = lambda _: lambda event, _: seen.append((type(event), engine.health().status))
    list(engine.submit(request("a", [1])))
    assert seen == [(Failed, HealthStatus.FAILED)]


def test_stats_follow_an_abort_though_no_step_comes_after_it(fake):
    engine, _runner = fake
    handle = engine.submit(request("a", [1], max_tokens=400))
    next(iter(handle))
    engine.abort("a")
    list(handle)
    stats = engine.stats()
    assert (stats.num_running, stats.totals.finished) == (0, {FinishReason.ABORT: 1})


def test_an_engine_that_dies_tells_first_what_the_step_before_gave(fake, monkeypatch):
    engine, runner = fake
    start = runner.start

    def start_prompts_only(plan):
        if plan.rows:
            raise MemoryError("no more.")
        return start(plan)

    monkeypatch.setattr(runner, "start", start_prompts_only)
    events = list(engine.submit(request("a", [1])))
    assert [type(event) for event in events] == [Started, Tokens, Failed]
    assert tokens_of(events) == answer([1])[:1]


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
