"""Requests that end before their time: aborted, timed out, failed alone, or with the engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from onebox.engine.api import (
    Engine,
    EngineStoppedError,
    Failed,
    Finished,
    FinishReason,
    HealthStatus,
    Request,
    SamplingParams,
    Started,
    Tokens,
    Vision,
)
from onebox.engine.logits import Adjustment, LogitsRules
from onebox.engine.step import EncodedImages
from onebox.model.load import load_model
from onebox.spec.errors import MismatchError
from tests.engine.fake import FAILING, FakeRunner, tokens_of, wait_until
from tests.engine.small import answer, config, request
from tests.engine.tiny import tiny_runner


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
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: logits(self, hidden) * float("nan"))
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

        monkeypatch.setattr("onebox.engine.prefill.Prefiller.run", fail)
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
