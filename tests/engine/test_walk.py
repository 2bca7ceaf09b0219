"""Whatever is submitted, aborted, timed out, preempted and evicted in whatever order: each answer is the plain one."""

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from onebox.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.request import (
    AcceptanceCounts,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    SamplingParams,
    Started,
    Tokens,
)
from onebox.spec.errors import UnsupportedError
from tests.engine.fake import FAILING, VOCAB_SIZE, Stand, plain_answer, tokens_of

NUM_STEPS = 700
METHODS = {"none": 0, "mtp": 3, "ngram": 4, "auto": 3}


def config(method="none", max_drafts=0, **limits):
    sizes = {
        "max_model_len": 600,
        "num_pages": 11,
        "num_checkpoints": 3,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "checkpoint_spacing": 128,
        "eos_token_ids": (1,),
        "boundary_token_ids": (12, 13),
    }
    return EngineConfig(**(sizes | limits), speculation=SpeculationConfig(SpeculationMethod(method), max_drafts))


class PanicError(BaseException):
    """As the grammar library's panics arrive: not an Exception."""


# Everything that a step does for one sequence alone.
OWN_WORK = [
    "is_late",
    "append",
    "num_pages_needed",
    "logits_rules.adjust",
    "logits_rules.advance",
    "speculation.propose",
    "speculation.plan_next",
    "speculation.checks",
    "speculation.offer",
    "speculation.observe",
    "speculation.extend",
    "speculation.forget",
]
ERRORS = [ValueError, KeyError, MemoryError, RecursionError, UnsupportedError, FloatingPointError, PanicError]


def sabotage(sequence, place, error, num_good):
    """From its call number `num_good` on, this part of the sequence's own work raises."""
    *path, name = place.split(".")
    owner = getattr(sequence, path[0]) if path else sequence
    work, calls = getattr(owner, name), iter(range(num_good))

    def fail(*args):
        if next(calls, None) is None:
            raise error("a fault")
        return work(*args)

    setattr(owner, name, fail)


class Walk:
    """A stand on which anything may happen, with a clock that moves a second a step."""

    def __init__(self, settings, seed=0, fault_rate=0.0, open_disk=None):
        self.stand = Stand(settings, draft_accuracy=0.6, seed=seed, open_disk=open_disk)
        self.random = random.Random(seed)
        self.now = 0.0
        self.aborted = set()
        self.fault_rate = fault_rate
        self.sabotaged = set()
        # Prompts share beginnings of all lengths, as conversations and system prompts do.
        self.stems = [[self.random.randrange(VOCAB_SIZE - 1) for _ in range(400)] for _ in range(3)]

    def submit(self):
        draw, name = self.random, str(len(self.stand.sequences))
        shared = self.stems[draw.randrange(3)][: draw.choice([0, 64, 100, 128, 192, draw.randrange(300)])]
        own = [draw.randrange(VOCAB_SIZE - 1) for _ in range(draw.choice([1, 3, draw.randrange(1, 200)]))]
        if draw.random() < 0.03:
            own[draw.randrange(len(own))] = FAILING
        max_tokens = draw.choice([1, 2, draw.randrange(1, 120)])
        sampling = SamplingParams(
            seed=draw.randrange(1000),
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 0, draw.randrange(max_tokens + 1)]),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, 0]),
            prompt_logprobs=0 if draw.random() < 0.1 else None,
        )
        request = Request(
            name,
            (*shared, *own),
            sampling,
            priority=draw.choice([0, 0, 0, 1, -1]),
            timeout_s=draw.choice([None, None, None, draw.randrange(1, 60)]),
            cache_prompt=draw.random() < 0.9,
            pin_prompt=draw.random() < 0.1,
        )
        sequence = self.stand.submit(request, self.now)
        if self.fault_rate and draw.random() < self.fault_rate:
            self.sabotaged.add(name)
            sabotage(sequence, draw.choice(OWN_WORK), draw.choice(ERRORS), draw.choice([0, 1, draw.randrange(40)]))

    def abort(self, name):
        events = self.stand.scheduler.abort(name)
        self.stand.hear(events)
        self.aborted.update(event.request_id for event in events)
        self.stand.scheduler.check()

    def step(self):
        self.now += 1
        self.stand.hear(self.stand.scheduler.expire(self.now))
        self.stand.scheduler.check()
        self.stand.step(seconds=self.random.uniform(0.01, 0.02))

    def drain(self):
        for _ in range(5000):
            if self.stand.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("requests are left that no step moves")

    def wander(self, num_steps):
        for _ in range(num_steps):
            # Waves: the queue fills up and empties again.
            is_flood = (self.now // 50) % 2 == 0
            if self.random.random() < (0.4 if is_flood else 0.05):
                self.submit()
            if self.stand.sequences and self.random.random() < 0.06:
                names = [s.request.request_id for s in self.alive()] or ["nobody"]
                self.abort(self.random.choice(names))
            self.step()

    def alive(self):
        scheduler = self.stand.scheduler
        return [*scheduler._waiting, *scheduler._running.values()]

    def check_answers(self):
        for name, sequence in self.stand.sequences.items():
            may_fail = FAILING in sequence.request.prompt or name in self.sabotaged
            check_answer(sequence, self.stand.events[name], was_aborted=name in self.aborted, may_fail=may_fail)

    def check_accounts(self):
        stand, stats = self.stand, self.stand.scheduler.stats()
        ends = [events[-1] for events in stand.events.values()]
        finished = [end for end in ends if isinstance(end, Finished)]
        totals = stats.totals
        assert totals.finished == {
            reason: count for reason in FinishReason if (count := sum(end.reason is reason for end in finished))
        }
        assert totals.num_failed == sum(isinstance(end, Failed) for end in ends)
        if self.sabotaged:
            return  # what failed sequences had computed counts too
        assert totals.completion_tokens == sum(end.counts.completion_tokens for end in finished)
        assert totals.prompt_tokens == stand.runner.num_prompt_tokens
        assert totals.drafts == sum((end.counts.drafts for end in finished), AcceptanceCounts())

    def check_nothing_is_held(self):
        stand = self.stand
        assert (stand.scheduler.stats().num_running, stand.scheduler.stats().num_waiting) == (0, 0)
        assert not stand.speculator._drafting
        stand.scheduler.clear_cache()
        stand.scheduler.check()
        stats = stand.scheduler.stats()
        assert stats.num_free_pages == stats.num_pages
        assert (stats.prefix.num_checkpoints, stats.prefix.num_pages) == (0, 0)


def check_answer(sequence, events, *, was_aborted, may_fail):
    """One Started at most, one end, and between them exactly the tokens of the plain computation, or fewer if cut."""
    request, sampling = sequence.request, sequence.request.sampling
    kinds = [type(event) for event in events]
    assert sum(kind in (Finished, Failed) for kind in kinds) == 1
    assert kinds[-1] in (Finished, Failed)
    assert kinds.count(Started) <= 1
    assert Started not in kinds[1:]
    answer = plain_answer(request.prompt, sequence.max_tokens, sequence.stop_token_ids, sampling.min_tokens)
    got = tokens_of(events)
    if kinds[-1] is Failed:
        assert may_fail
        assert got == answer.token_ids[: len(got)], "a wrong token was delivered before it failed"
        return
    reason, counts = events[-1].reason, events[-1].counts
    if reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
        assert (reason is FinishReason.ABORT) == was_aborted
        assert got == answer.token_ids[: len(got)]
    else:
        assert (got, reason, counts.completion_tokens) == (answer.token_ids, answer.reason, answer.num_sampled)
    logprobs = [logprob.token_id for event in events if isinstance(event, Tokens) for logprob in event.logprobs]
    assert logprobs == (got if sampling.logprobs is not None else [])
    check_prompt_logprobs(sequence, events)


def check_prompt_logprobs(sequence, events):
    """Each token of the prompt but the first, once and in order, however often the prompt was computed."""
    told = [logprob for event in events if isinstance(event, PromptLogprobs) for logprob in event.logprobs]
    assert [-logprob.logprob for logprob in told] == list(range(1, len(told) + 1))
    assert [logprob.token_id for logprob in told] == list(sequence.request.prompt[1 : len(told) + 1])
    if sequence.request.sampling.prompt_logprobs is None:
        assert not told
    elif any(isinstance(event, Tokens) for event in events):
        assert len(told) == sequence.num_prompt - 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_every_answer_is_the_plain_one_whatever_happens_around_it(method, seed):
    walk = Walk(config(method, METHODS[method]), seed)
    walk.wander(NUM_STEPS)
    walk.drain()
    walk.check_answers()
    walk.check_accounts()
    stats = walk.stand.scheduler.stats()
    # The walk went where it is dangerous.
    assert stats.totals.num_preempted > 5
    assert stats.prefix.evicted > 10
    assert stats.prefix.hit_tokens > 500
    assert all(stats.totals.finished[reason] > 2 for reason in FinishReason)
    assert bool(stats.totals.drafts.num_accepted) == (method != "none")
    walk.check_nothing_is_held()


@pytest.mark.parametrize(
    "limits",
    [
        {"num_pages": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        {"num_checkpoints": 0},
        {"num_checkpoints": 1, "checkpoint_spacing": 64},
        {"num_pages": 60, "num_checkpoints": 40, "max_num_batched_tokens": 2048, "checkpoint_spacing": 64},
        {"max_num_seqs": 1},
    ],
    ids=["hardly any pages", "no cache", "one checkpoint", "room for all", "one slot"],
)
def test_every_answer_is_the_plain_one_whatever_the_limits_are(limits):
    walk = Walk(config("mtp", 2, **limits), seed=7)
    walk.wander(NUM_STEPS)
    walk.drain()
    walk.check_answers()
    walk.check_accounts()
    walk.check_nothing_is_held()


@pytest.mark.parametrize("method", METHODS)
def test_whatever_fails_in_one_sequence_ends_that_one_and_frees_what_it_held(method):
    walk = Walk(config(method, METHODS[method]), seed=5, fault_rate=0.3)
    walk.wander(NUM_STEPS)
    walk.drain()
    walk.check_answers()
    walk.check_accounts()
    assert walk.stand.scheduler.stats().totals.num_failed > 10
    assert not walk.stand.speculator._drafting.keys() - {walk.stand.sequences[n].speculation for n in walk.sabotaged}
    walk.stand.speculator._drafting.clear()
    walk.check_nothing_is_held()


@pytest.mark.parametrize("error", [KeyError, FloatingPointError, PanicError])
@pytest.mark.parametrize("place", OWN_WORK)
def test_a_fault_at_any_place_leaves_the_neighbours_answers_alone(place, error):
    it = Stand(config("auto", 3, num_pages=30))
    for name, length in (("before", 100), ("faulty", 130), ("after", 70)):
        prompt = tuple(range(length % 40)) * 4
        it.submit(Request(name, prompt, SamplingParams(max_tokens=40, ignore_eos=True), timeout_s=1e6))
    sabotage(it.sequences["faulty"], place, error, 2)
    while not it.scheduler.is_idle:
        it.hear(it.scheduler.expire(0.0))
        it.step()
    is_harmless = place == "speculation.forget"  # at its end nothing depends on it
    assert isinstance(it.events["faulty"][-1], Finished if is_harmless else Failed)
    for name in ("before", "after"):
        prompt = it.sequences[name].request.prompt
        assert it.token_ids(name) == plain_answer(prompt, 40).token_ids
    assert it.scheduler.stats().totals.num_failed == (not is_harmless)


class AnyOrder(RuleBasedStateMachine):
    """The same, in orders that are chosen to break it."""

    def __init__(self):
        super().__init__()
        self.walk = Walk(config("ngram", 2, num_pages=9, num_checkpoints=2, max_num_seqs=3), seed=11)

    @rule(seed=st.integers(0, 50))
    def submit(self, seed):
        self.walk.random.seed(seed)
        self.walk.submit()

    @rule(place=st.integers(0, 5))
    def abort(self, place):
        alive = self.walk.alive()
        if place < len(alive):
            self.walk.abort(alive[place].request.request_id)

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.walk.step()

    @rule()
    def clear_cache(self):
        self.walk.stand.scheduler.clear_cache()

    @invariant()
    def holds_together(self):
        self.walk.stand.scheduler.check()

    def teardown(self):
        self.walk.drain()
        self.walk.check_answers()
        self.walk.check_accounts()
        self.walk.check_nothing_is_held()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=25, derandomize=True, phases=[Phase.generate])
