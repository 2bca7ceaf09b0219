"""One sequence's drafts over a text that is known beforehand: planned, looked up, judged and counted."""

import random
from dataclasses import dataclass, field

import pytest

from onebox.engine.config import MAX_DRAFTS, SpeculationConfig, SpeculationMethod
from onebox.engine.draft.acceptance import DraftClass
from onebox.engine.draft.depth import AutoDepth, DraftChoice
from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.draft.speculate import SequenceDrafts, Speculator, part_after
from onebox.engine.request import AcceptanceCounts
from tests.engine.draft.machines import MACHINES, TEXTS, Machine, rate_at, tokens_per_step

OPEN, CLOSE = 1, 2
AUTO = SpeculationConfig(SpeculationMethod.AUTO, MAX_DRAFTS, block_size=16)
WITHOUT_BLOCKS = SpeculationConfig(SpeculationMethod.AUTO, MAX_DRAFTS)


def random_text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 50_000) for _ in range(length)]


@dataclass
class Walk:
    """Decodes a known answer step by step, as the scheduler does; heads draft its tokens right with some chance."""

    answer: list[int]
    prompt: list[int] = field(default_factory=lambda: [7, 8, 9])
    config: SpeculationConfig = AUTO
    accuracy: dict[Drafter, float] = field(default_factory=lambda: {Drafter.MTP: 0.5, Drafter.DFLASH: 0.5})
    num_known: int = 99
    """Drafts of a head that may be right; those beyond never are."""
    machine: Machine = MACHINES["spark"]
    speculator: Speculator | None = None
    proposed: list[tuple[int, ...]] = field(default_factory=list)
    heads: list[tuple[Drafter, int]] = field(default_factory=list)
    from_head: list[bool] = field(default_factory=list)
    """By step: whether the next step's drafts would be those of a head."""
    total_ms: float = 0.0

    def __post_init__(self) -> None:
        self.speculator = self.speculator or Speculator(self.config, (OPEN, CLOSE))
        self.drafts = self.speculator.start(tuple(self.prompt), seed=0)
        self._random = random.Random(11)

    def run(self) -> "Walk":
        place = 0
        while place < len(self.answer):
            room = len(self.answer) - place - 1
            proposed = self.drafts.propose(room)
            head, depth = self.drafts.plan_next(room)
            came = self.answer[place : place + 1 + self._num_right(proposed, place)]
            if proposed:
                self.drafts.observe(len(proposed), len(came) - 1)
            place += len(came)
            self.drafts.offer(self._drafted(head, depth, place))
            self.drafts.extend(tuple(came))
            self._count(proposed, head, depth)
        self.drafts.forget()
        return self

    def _num_right(self, proposed: tuple[int, ...], place: int) -> int:
        num_right = 0
        while num_right < len(proposed) and proposed[num_right] == self.answer[place + num_right]:
            num_right += 1
        return num_right

    def _drafted(self, head: Drafter, depth: int, place: int) -> tuple[int, ...]:
        right = self.answer[place : place + depth]
        known = [token if self._random.random() < self.accuracy[head] else 3 for token in right[: self.num_known]]
        return (*known, *[3] * (len(right) - len(known)))

    def _count(self, proposed: tuple[int, ...], head: Drafter, depth: int) -> None:
        self.proposed.append(proposed)
        self.heads.append((head, depth))
        self.from_head.append(self.drafts.is_from_head)
        kind = 1 + len(proposed), depth if head is Drafter.MTP else 0, depth if head is Drafter.DFLASH else 0
        elapsed_ms = self.machine.ms(*kind)
        self.total_ms += elapsed_ms
        self.speculator.observe(*kind, elapsed_ms / 1000)

    @property
    def num_steps(self) -> int:
        return len(self.proposed)

    def counts(self, drafter: Drafter, part: TextPart = TextPart.ANSWER) -> AcceptanceCounts:
        return self.drafts.counts.get((drafter, part), AcceptanceCounts())


def test_a_copied_stretch_goes_on_from_the_text_as_deep_as_a_step_can():
    document = random_text(400, seed=1)
    walk = Walk([*random_text(20, seed=2), *document], prompt=document).run()
    assert walk.num_steps < 20 + 20 + 400 / (1 + MAX_DRAFTS)
    copied = walk.counts(Drafter.NGRAM)
    assert copied.num_accepted > 300
    assert copied.num_accepted > 0.95 * copied.num_drafted


def test_a_text_that_finds_a_match_again_and_again_is_looked_into_before_there_is_one():
    """Pieces of the prompt with a few new tokens between them: the match comes with the step before, after the plan."""
    rng, document = random.Random(8), random_text(600, seed=8)
    answer = list[int]()
    for seed in range(300, 340):
        start = rng.randrange(580)
        answer += [*random_text(3, seed), *document[start : start + 12]]
    poor = {"accuracy": {Drafter.MTP: 0.3, Drafter.DFLASH: 0.3}, "prompt": document, "machine": MACHINES["h200"]}
    learning = Walk(answer, **poor).run()
    walk = Walk(answer, **poor, speculator=learning.speculator).run()
    alone = Walk(answer, **poor, config=SpeculationConfig(SpeculationMethod.NGRAM, MAX_DRAFTS)).run()
    assert walk.num_steps < 1.1 * alone.num_steps
    assert walk.total_ms < 0.93 * alone.total_ms


def test_the_drafts_go_on_from_the_text_where_the_head_agrees_with_it():
    """A phrase after which one stretch follows in a third of all cases: the text alone is mostly wrong.

    The head knows which it is, but not how the stretch goes on.
    """
    rng = random.Random(6)
    phrase, stretch = random_text(4, seed=30), random_text(20, seed=31)
    answer = list[int]()
    for seed in range(100, 220):
        answer += [*random_text(4, seed), *phrase, *(stretch if rng.random() < 0.35 else random_text(2, seed + 200))]
    known = {"accuracy": {Drafter.MTP: 0.95, Drafter.DFLASH: 0.0}, "num_known": 2}
    walk = Walk(answer, config=WITHOUT_BLOCKS, **known).run()
    continued = [
        proposed
        for (head, depth), proposed in zip(walk.heads, walk.proposed[1:], strict=False)
        if head is Drafter.MTP and len(proposed) > depth
    ]
    assert len(continued) > 10
    alone = Walk(answer, config=SpeculationConfig(SpeculationMethod.MTP, 2), **known).run()
    assert walk.total_ms < alone.total_ms


def test_a_step_that_may_look_into_the_text_is_not_planned_as_the_heads():
    """The device starts a step of a head's drafts before the host has seen them."""
    document = random_text(300, seed=5)
    walk = Walk([*document, *random_text(100, seed=6)], prompt=document).run()
    for (head, depth), from_head, proposed, drafted in zip(
        walk.heads, walk.from_head, walk.proposed[1:], walk.proposed, strict=False
    ):
        if from_head:
            assert len(proposed) <= depth, (head, depth, drafted)
    assert not all(walk.from_head)


def judged(speculator: Speculator, drafter: Drafter) -> list[float]:
    """How many drafts of all requests were judged, by position."""
    rates = speculator.shared.of(DraftClass(drafter))
    return [rates.weight(position) for position in range(MAX_DRAFTS)]


def plan_block(drafts: SequenceDrafts, depth: int, made: tuple[int, ...]) -> None:
    """As after a step that made so many drafts for the next one, of which it verifies `depth`."""
    drafts._plan = DraftChoice(DraftClass(Drafter.DFLASH), depth, num_unverified=len(made) - depth)
    drafts.offer(made)


def test_drafts_that_are_not_verified_are_compared_with_the_tokens_of_later_steps():
    speculator, made = Speculator(AUTO), tuple(random_text(10, seed=14))
    drafts = speculator.start((7, 8, 9), seed=0)
    plan_block(drafts, 1, made)
    assert drafts.propose(MAX_DRAFTS) == made[:1]
    drafts.extend(made[:2])
    drafts.offer(())
    assert not any(judged(speculator, Drafter.DFLASH))
    for token_id in (*made[2:5], 99):
        drafts.propose(MAX_DRAFTS)
        drafts.extend((token_id,))
    assert [weight > 0 for weight in judged(speculator, Drafter.DFLASH)] == [True] * 6 + [False] * 9
    rates = speculator.shared.of(DraftClass(Drafter.DFLASH)).rates(6)
    assert rates[5] < rates[4]  # the sixth was another token


def test_drafts_behind_the_end_of_an_answer_say_nothing_of_the_head():
    speculator, made = Speculator(AUTO), tuple(random_text(10, seed=15))
    drafts = speculator.start((7, 8, 9), seed=0)
    plan_block(drafts, 10, made)
    drafts.propose(MAX_DRAFTS)
    drafts.finish(made[:4])
    assert [weight > 0 for weight in judged(speculator, Drafter.DFLASH)] == [True] * 4 + [False] * 11


def test_a_step_that_is_likely_the_last_one_drafts_nothing():
    """A stop token among the drafts that it verifies; where such drafts are wrong, the next step gets drafts."""
    for accuracy, depth in ((1.0, 4), (1.0, 3), (0.7, 4)):
        accuracies = {Drafter.MTP: accuracy, Drafter.DFLASH: accuracy}
        speculator = Speculator(AUTO)
        Walk(random_text(300, seed=24), accuracy=accuracies, machine=MACHINES["pocket"], speculator=speculator).run()
        drafts = speculator.start((7, 8, 9), seed=0, stop_token_ids=frozenset({4}))
        plan_block(drafts, depth, (11, 12, 13, 4))
        drafts.propose(MAX_DRAFTS)
        assert (drafts.plan_next(MAX_DRAFTS) == (Drafter.NONE, 0)) is (accuracy == 1.0 and depth == 4)


def test_text_without_matches_is_planned_ahead():
    walk = Walk(random_text(300, seed=7)).run()
    assert all(walk.from_head)


@pytest.mark.parametrize("config", [AUTO, WITHOUT_BLOCKS])
def test_the_room_for_drafts_is_kept(config):
    for length in range(1, 12):
        text = random_text(length, seed=8)
        walk = Walk(text, prompt=text * 3, config=config).run()
        for place, proposed in enumerate(walk.proposed):
            assert len(proposed) <= max(0, length - place - 1)
        assert all(depth <= max(0, length - 1) for _, depth in walk.heads)


@pytest.mark.parametrize(("method", "is_copy"), [("mtp", True), ("dflash", False), ("ngram", True)])
def test_a_fixed_method_uses_its_drafter_alone_as_deep_as_asked(method, is_copy):
    document = random_text(200, seed=9)
    config = SpeculationConfig(SpeculationMethod(method), 5, block_size=4)
    walk = Walk(document, prompt=document if is_copy else [7], config=config).run()
    depths = {"mtp": 5, "dflash": 3, "ngram": 5}
    heads = {"mtp": Drafter.MTP, "dflash": Drafter.DFLASH, "ngram": Drafter.NONE}
    assert {head for head, depth in walk.heads[:-8] if depth} <= {heads[method]}
    assert max(map(len, walk.proposed)) == depths[method]
    assert set(walk.drafts.counts) == {(Drafter(method), TextPart.ANSWER)}


def test_a_block_goes_on_from_the_text_in_a_long_copy():
    document = random_text(400, seed=1)
    config = SpeculationConfig(SpeculationMethod.DFLASH, 15, block_size=16)
    accuracy = {Drafter.DFLASH: 1.0}
    walk = Walk(document, document, config, accuracy, num_known=1).run()
    assert walk.num_steps < 20 + 400 / (1 + MAX_DRAFTS)
    # Nobody plans such a step ahead as the head's.
    assert walk.from_head.count(False) > 20
    assert {head for head, depth in walk.heads if depth} == {Drafter.DFLASH}


def test_a_block_that_begins_otherwise_than_the_text_is_kept():
    document = random_text(200, seed=1)
    config = SpeculationConfig(SpeculationMethod.DFLASH, 15, block_size=16)
    walk = Walk(document, document, config, {Drafter.DFLASH: 0.0}).run()
    assert not walk.counts(Drafter.NGRAM).num_drafted


def test_a_benchmark_of_blocks_drafts_with_blocks_alone():
    document = random_text(200, seed=1)
    config = SpeculationConfig(SpeculationMethod.DFLASH, 15, synthetic_acceptance=(0.5,), block_size=16)
    walk = Walk(document, document, config, {Drafter.DFLASH: 1.0}, num_known=1).run()
    assert all(walk.from_head)


def test_thinking_and_answer_are_counted_apart():
    thought, answer = random_text(200, seed=12), random_text(200, seed=13)
    prompt = [5, OPEN, 6]
    accuracy = {Drafter.MTP: 0.9, Drafter.DFLASH: 0.9}
    walk = Walk([*thought, CLOSE, *answer], prompt, accuracy=accuracy).run()
    counts = walk.drafts.counts
    by_part = {part: sum(n.num_accepted for (_, p), n in counts.items() if p is part) for part in TextPart}
    assert by_part[TextPart.THINKING] > 60
    assert by_part[TextPart.ANSWER] > 60


def test_what_thinking_taught_is_not_taken_for_the_answer():
    """Reasoning that no head predicts, then an answer that one does: the next request's answer drafts at once."""
    accuracy = {Drafter.MTP: 0.0, Drafter.DFLASH: 0.0}
    speculator = Speculator(AUTO, (OPEN, CLOSE))
    Walk(random_text(200, seed=14), [OPEN], accuracy=accuracy, speculator=speculator).run()
    good = {Drafter.MTP: 0.95, Drafter.DFLASH: 0.95}
    Walk(random_text(200, seed=15), accuracy=good, speculator=speculator).run()
    thinking = Walk(random_text(30, seed=16), [OPEN], accuracy=accuracy, speculator=speculator).run()
    answering = Walk(random_text(30, seed=17), accuracy=good, speculator=speculator).run()
    assert sum(depth for _, depth in thinking.heads) < 20
    assert answering.num_steps < 20


def test_the_part_follows_from_the_last_mark():
    assert part_after((5, OPEN, 6), (OPEN, CLOSE)) is TextPart.THINKING
    assert part_after((5, OPEN, 6, CLOSE, 7), (OPEN, CLOSE)) is TextPart.ANSWER
    assert part_after((CLOSE, OPEN), (OPEN, CLOSE)) is TextPart.THINKING
    assert part_after((5, 6), (OPEN, CLOSE)) is TextPart.ANSWER
    assert part_after((OPEN,), None) is TextPart.ANSWER


def test_what_was_verified_is_counted_by_who_drafted_it():
    document = random_text(300, seed=18)
    walk = Walk([*document, *random_text(300, seed=19)], prompt=document, config=WITHOUT_BLOCKS).run()
    counts = walk.drafts.counts
    assert {drafter for drafter, _ in counts} == {Drafter.MTP, Drafter.NGRAM}
    assert sum(count.num_drafted for count in counts.values()) == sum(map(len, walk.proposed))
    assert walk.num_steps + sum(count.num_accepted for count in counts.values()) == 600


def test_drafts_that_were_made_before_a_preemption_are_dropped():
    walk = Walk(random_text(50, seed=20), accuracy={Drafter.MTP: 1.0, Drafter.DFLASH: 1.0})
    walk.drafts.plan_next(10)
    walk.drafts.offer((4, 4))
    walk.drafts.forget()
    assert walk.drafts.propose(10) == ()


@pytest.mark.parametrize(
    ("machine", "text", "count"), [("spark", "agent turns", 16), ("h200", "thinking", 16), ("cpu", "thinking", 8)]
)
def test_sequences_leave_and_begin_a_shared_pass_together(machine, text, count):
    """Against the best depth of MTP for all of them, or none; the first 200 steps are for learning."""
    cost_ms, rates, rng = MACHINES[machine].ms, TEXTS[text].mtp, random.Random(1)
    speculator = Speculator(SpeculationConfig(SpeculationMethod.AUTO, 4))
    sequences = [speculator.start((count + i,), i) for i in range(count)]
    plans, num_tokens, total_ms = [sequence.plan_next(99) for sequence in sequences], 0, 0.0
    for step in range(500):
        proposed = []
        for place, sequence in enumerate(sequences):
            sequence.offer(tuple(rng.randrange(10**9) for _ in range(plans[place][1])))
            proposed.append(sequence.propose(4))
            plans[place] = sequence.plan_next(99)
        kind = sum(1 + len(drafts) for drafts in proposed), max(depth for _, depth in plans)
        speculator.observe(*kind, 0, cost_ms(*kind) * rng.lognormvariate(0, 0.05) / 1000)
        for sequence, drafts in zip(sequences, proposed, strict=True):
            num_right = 0
            while num_right < len(drafts) and rng.random() < rate_at(rates, num_right):
                num_right += 1
            sequence.observe(len(drafts), num_right)
            sequence.extend((*drafts[:num_right], rng.randrange(10**9, 2 * 10**9)))
            num_tokens += (1 + num_right) * (step >= 200)
        total_ms += cost_ms(*kind) * (step >= 200)
    fixed = [count * tokens_per_step(rates, k) / cost_ms(count * (1 + k), k) for k in range(5)]
    assert num_tokens / total_ms > 0.95 * max(fixed)


def test_looks_that_find_wrong_drafts_are_given_up():
    """After a text copied in patches, one in which every pair of tokens occurs again and goes on otherwise."""
    rng, document, speculator = random.Random(21), random_text(400, seed=22), Speculator(AUTO)
    patches = [token for at in range(0, 400, 12) for token in (*random_text(5, seed=at), *document[at : at + 12])]
    poor = {Drafter.MTP: 0.3, Drafter.DFLASH: 0.3}
    copied = Walk(patches, document, accuracy=poor, speculator=speculator).run()
    assert copied.counts(Drafter.NGRAM).num_accepted > 200
    pairs = [random_text(2, seed=100 + number) for number in range(8)]
    misled = [token for _ in range(150) for token in (*rng.choice(pairs), rng.randrange(50_000, 90_000))]
    good = {Drafter.MTP: 0.9, Drafter.DFLASH: 0.9}
    walk = Walk(misled, accuracy=good, speculator=speculator).run()
    assert walk.num_steps > 100
    assert not all(walk.from_head[:25])
    assert all(walk.from_head[75:])


def test_in_a_long_copy_the_choice_is_not_made_anew_in_every_step(monkeypatch):
    choose, num_chosen = AutoDepth.choose, 0

    def counted(*given):
        nonlocal num_chosen
        num_chosen += 1
        return choose(*given)

    monkeypatch.setattr(AutoDepth, "choose", counted)
    document = random_text(2000, seed=23)
    walk = Walk(document, document).run()
    assert num_chosen < walk.num_steps / 2
