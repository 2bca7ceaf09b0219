"""Slots, pieces and endings, without threads."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebox.engine.batch import StepOutput
from onebox.engine.request import EngineConfig, Failed, Finished, FinishReason, Request, Started, Tokens
from onebox.engine.scheduler import PREFILL_CHUNK, Scheduler, Sequence
from tests.engine.scripted import ScriptedRunner


def sequence(name, num_prompt=3, max_tokens=2, stops=()):
    return Sequence(Request(name, tuple(range(num_prompt))), max_tokens, frozenset(stops))


def test_prompt_pieces_lie_on_a_grid_and_only_the_last_draws():
    scheduler = Scheduler(EngineConfig(max_model_len=1000), release=lambda _: None)
    scheduler.add(sequence("a", num_prompt=2 * PREFILL_CHUNK + 5))
    pieces = []
    for _ in range(3):
        batch = scheduler.next()
        (row,) = batch.rows
        pieces.append((row.start, len(row.token_ids), row.sampling is not None))
        scheduler.commit(batch, StepOutput(((7,) if row.sampling else (),)))
    assert pieces == [(0, 64, False), (64, 64, False), (128, 5, True)]
    (row,) = scheduler.next().rows
    assert (row.token_ids, row.start) == ((7,), 133)


def test_tokens_after_the_end_are_dropped_and_the_stop_token_is_counted_but_not_delivered():
    scheduler = Scheduler(EngineConfig(max_model_len=100), release=lambda _: None)
    scheduler.add(sequence("stop", max_tokens=9, stops=[5]))
    scheduler.add(sequence("length", max_tokens=2))
    events = scheduler.commit(scheduler.next(), StepOutput(((4, 5, 6), (4, 5, 6))))
    assert [e for e in events if isinstance(e, Tokens)] == [Tokens("stop", (4,)), Tokens("length", (4, 5))]
    finished = {e.request_id: (e.reason, e.counts.completion_tokens) for e in events if isinstance(e, Finished)}
    assert finished == {"stop": (FinishReason.STOP, 2), "length": (FinishReason.LENGTH, 2)}
    assert scheduler.is_idle


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_walk_keeps_slots_whole_and_ends_every_request_once(data):
    runner = ScriptedRunner(fails_on=99)
    scheduler = Scheduler(EngineConfig(max_model_len=1000, max_num_seqs=3), release=runner.release)
    log: dict[str, list] = {}
    for number in range(data.draw(st.integers(1, 40), label="turns")):
        action = data.draw(st.sampled_from(["add", "add", "abort", "step", "step", "step"]), label="action")
        if action == "add":
            scheduler.add(sequence(str(number), data.draw(st.integers(1, 150)), data.draw(st.integers(1, 5)), [3]))
            log[str(number)] = []
        elif action == "abort" and log:
            record(log, scheduler.abort(data.draw(st.sampled_from(sorted(log)))))
        else:
            step(scheduler, runner, log)
        check(scheduler, runner)
    while not scheduler.is_idle:
        step(scheduler, runner, log)
        check(scheduler, runner)
    assert not runner.in_use
    for events in log.values():
        assert [isinstance(e, Finished | Failed) for e in events].index(True) == len(events) - 1
        assert [i for i, e in enumerate(events) if isinstance(e, Started)] in ([0], [])


def step(scheduler, runner, log):
    batch = scheduler.next()
    record(log, scheduler.commit(batch, runner.run(batch)))


def record(log, events):
    for event in events:
        log[event.request_id].append(event)


def check(scheduler, runner):
    scheduler.check()
    assert len(runner.in_use) <= scheduler.num_running <= 3


def test_a_lost_slot_is_noticed():
    scheduler = Scheduler(EngineConfig(max_model_len=10), release=lambda _: None)
    scheduler._free_slots.pop()
    with pytest.raises(RuntimeError, match="Slots are lost"):
        scheduler.check()
