"""The log of a serving process: a line with work in it, nothing when idle, one warning about a head that is no good."""

import re
from dataclasses import replace

import pytest

from onebox import LLM, SamplingParams
from onebox.engine.api import AcceptanceCounts, EngineStats, EngineStoppedError, FrozenTotals, PrefixStats
from onebox.server import activity
from onebox.server.activity import LEAST_HEAD_RATE, Activity, ActivityLog, activity_line, head_warning

IDLE = EngineStats(
    is_alive=True,
    num_running=0,
    num_waiting=0,
    num_pages=100,
    num_free_pages=70,
    totals=FrozenTotals(0, {}, 0, 0, 0, 0, AcceptanceCounts()),
    prefix=PrefixStats(0, 0, 0, 0, num_checkpoints=1, num_pages=20, num_pinned=0),
)


def after(stats: EngineStats, *, prompt=0, generated=0, drafts=None, queried=0, hits=0, **changes) -> EngineStats:
    """The stats with that much done since."""
    totals = replace(
        stats.totals,
        prompt_tokens=stats.totals.prompt_tokens + prompt,
        completion_tokens=stats.totals.completion_tokens + generated,
        drafts=stats.totals.drafts + (drafts or AcceptanceCounts()),
    )
    prefix = replace(
        stats.prefix,
        queried_tokens=stats.prefix.queried_tokens + queried,
        hit_tokens=stats.prefix.hit_tokens + hits,
    )
    return replace(stats, totals=totals, prefix=prefix, **changes)


class StatsSource:
    """An engine that gives the statistics it is told."""

    def __init__(self, stats):
        self.now = stats

    def stats(self):
        if self.now is None:
            raise EngineStoppedError("stopped")
        return self.now


def test_the_line_tells_speeds_load_hits_and_acceptance_of_its_interval_alone():
    before = after(IDLE, prompt=5000, generated=900, drafts=AcceptanceCounts(10, 20, 20, (10, 10)), queried=70)
    drafts = AcceptanceCounts(40, 80, 44, (30, 14))
    now = after(before, prompt=2000, generated=84, drafts=drafts, queried=400, hits=100, num_running=2, num_waiting=1)
    assert activity_line(Activity(before, 100.0), Activity(now, 110.0)) == (
        "Avg prompt throughput: 200.0 tokens/s, Avg generation throughput: 8.4 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 10.0%, Prefix cache hit rate: 25.0%, Mean acceptance length: 2.10, "
        "Per-position acceptance rate: 0.750, 0.350, Avg Draft acceptance rate: 55.0%"
    )


def test_what_did_not_happen_is_left_out():
    now = after(IDLE, generated=10, num_running=1)
    line = activity_line(Activity(IDLE, 0.0), Activity(now, 10.0))
    assert line.endswith("KV cache usage: 10.0%")


def test_scripts_that_read_vllms_log_read_this_one():
    """The patterns that public tools use for vLLM's log."""
    now = after(IDLE, generated=300, drafts=AcceptanceCounts(100, 300, 154, (70, 52, 32)))
    line = activity_line(Activity(IDLE, 0.0), Activity(now, 10.0))
    assert re.search(r"Avg generation throughput:\s*([0-9.]+)", line).group(1) == "30.0"
    assert re.search(r"Mean acceptance length:\s*([0-9.]+)", line).group(1) == "2.54"
    assert (
        re.search(r"Per-position acceptance rate:\s*([0-9.,\s]+?)(?:,\s*Avg|$)", line).group(1) == "0.700, 0.520, 0.320"
    )


def test_rejected_drafts_alone_have_a_rate_of_nothing():
    now = after(IDLE, generated=9, drafts=AcceptanceCounts(9, 18, 0, ()))
    assert "Mean acceptance length: 1.00, Per-position acceptance rate: 0.000" in activity_line(
        Activity(IDLE, 0.0), Activity(now, 10.0)
    )


def test_nothing_is_said_when_idle_and_again_when_there_is_work():
    engine, said = StatsSource(IDLE), []
    log = ActivityLog(engine, tell=said.append)
    log.tick()
    engine.now = after(engine.now, prompt=10, generated=1)
    log.tick()
    log.tick()
    assert len(said) == 1
    engine.now = replace(engine.now, num_waiting=1)
    log.tick()
    assert "0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs" in said[1]


def test_an_engine_that_restarts_is_waited_for():
    engine, said = StatsSource(None), []
    log = ActivityLog(engine, tell=said.append)
    log.tick()
    engine.now = after(IDLE, generated=5)
    log.tick()
    engine.now = None
    log.tick()
    engine.now = after(IDLE, generated=8)
    log.tick()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("samples", "accepted", "is_warned"),
    [(999, 0, False), (1000, 0, True), (1000, 199, True), (1000, 200, False), (50_000, 31_000, False)],
)
def test_a_head_is_judged_after_enough_drafts_and_only_where_it_is_far_from_good(samples, accepted, is_warned):
    totals = replace(IDLE.totals, head_samples=samples, head_accepted=accepted)
    warning = head_warning(replace(IDLE, totals=totals))
    assert (warning is not None) == is_warned
    if warning:
        assert f"{accepted} of {samples:,} first drafts" in warning
        assert "onebox inspect DIR --deep" in warning


@pytest.mark.parametrize("is_quiet", [True, False])
def test_the_warning_comes_once_and_also_where_speeds_are_not_wanted(monkeypatch, is_quiet):
    warned, said = [], []
    monkeypatch.setattr(activity, "say", lambda line, **_: warned.append(line))
    engine = StatsSource(replace(IDLE, totals=replace(IDLE.totals, head_samples=2000)))
    log = ActivityLog(engine, is_quiet=is_quiet, tell=said.append)
    log.tick()
    engine.now = after(engine.now, generated=5)
    log.tick()
    assert len(warned) == 1
    assert len(said) == (0 if is_quiet else 1)


def test_random_weights_are_not_judged(monkeypatch):
    warned = []
    monkeypatch.setattr(activity, "say", lambda line, **_: warned.append(line))
    ActivityLog(StatsSource(replace(IDLE, totals=replace(IDLE.totals, head_samples=2000))), judges_head=False).tick()
    assert not warned


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_head_of_noise_is_told_from_a_trained_one_by_what_the_engine_counts(checkpoint, is_trained):
    """The tiny checkpoint's weights are random, its head as well as its layers. Of a request 32 drafts count."""
    from onebox.pocket.ready import pocket_checkpoint

    directory = pocket_checkpoint() if is_trained else checkpoint
    plain = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    penalised = replace(plain, max_tokens=8, presence_penalty=1.0)
    with LLM(directory, device="cpu", max_model_len=256, speculation="mtp", num_speculative_tokens=1) as llm:
        llm.generate(["Hi"], penalised)
        assert llm.engine.stats().totals.head_samples == 0
        llm.generate([f"The invoice number {place} of a customer" for place in range(4)], plain)
        totals = llm.engine.stats().totals
    assert totals.drafts.num_steps > 4 * 32 == totals.head_samples
    rate = totals.head_accepted / totals.head_samples
    assert rate > 3 * LEAST_HEAD_RATE if is_trained else rate < LEAST_HEAD_RATE
