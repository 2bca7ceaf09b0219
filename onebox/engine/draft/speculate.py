"""Drafts of each sequence: which drafter, how many, and how many were accepted.

Drafts of a head are made by the step before the one that verifies them, so drafter and depth are planned one step
ahead; n-gram drafts are looked up when they are needed. While the text is being copied, a step looks into it even where
a head has drafted: its drafts go on from the text if the match is long, or if the head's first drafts are the same.
None of it changes the answer.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from onebox.engine.config import SpeculationConfig, SpeculationMethod
from onebox.engine.draft.acceptance import DraftClass, num_matching
from onebox.engine.draft.costs import CostPrior, StepCosts
from onebox.engine.draft.depth import (
    ALONE,
    PLAIN,
    AutoDepth,
    Best,
    Company,
    DraftChoice,
    Offer,
    SharedAcceptance,
    is_worth_drafting,
)
from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.draft.ngram import NgramIndex
from onebox.engine.request import ClassCounts
from onebox.engine.stats import ClassTallies
from onebox.engine.step import DraftCheck

__all__ = ["SequenceDrafts", "Speculator"]

_PRIOR = CostPrior(row=0.15, draft=0.1, block=0.25, block_draft=0.002)
"""A further row reads other experts' weights, about a seventh of a step on the large models; a draft reads one layer of
49 and the head, a block a drafter of 0.8 B parameters. The first measured steps replace it."""
_HEAD_SAMPLES = 32
"""Of one request, at most: a text that nothing can predict, such as random digits, says little about the head."""
_LEAST_COPIED = 3
"""Tokens of a match from which on a step may look into the text though a head drafts for it."""
_NUM_AGREED = 2
"""Drafts of a head that must be the same as the text's, for the drafts to go on from the text."""
_LEAST_LOOKUP_GAIN = 0.1
"""Expected of looking into the text: the step then cannot be started before the host has read the one before."""
_REVIEW_INTERVAL, _LEAST_REVIEW_GAIN = 8, 0.02
"""Steps between two reviews of what all sequences plan, and what another plan must gain."""
_LONG_COPY = 8
"""Tokens of a match from which on the block drafter alone, too, goes on from the text if its first draft says so."""
_HELD_STEPS = 12
"""Steps for which a choice of drafts from the text holds."""
_MOST_LOOKED_BACK = 4096
"""Tokens of a prompt that are searched for the mark that opens a reasoning; templates put it at the end."""


_NOTHING = Best(PLAIN, 1.0, 0.0)
"""What is found where the text has no match."""


class Speculator:
    """What all sequences of an engine share: the settings, measured acceptance and costs, and the current plans."""

    def __init__(self, config: SpeculationConfig, thinking_token_ids: tuple[int, int] | None = None) -> None:
        """`thinking_token_ids`: the tokens that open and close the reasoning of an answer."""
        self.config = config
        self.thinking_token_ids = thinking_token_ids
        self.costs = StepCosts(_PRIOR)
        self.shared = SharedAcceptance()
        heads = {Drafter.DFLASH: config.max_block_drafts, Drafter.MTP: config.max_mtp_drafts}
        self.heads = tuple((drafter, most) for drafter, most in heads.items() if most)
        """Who drafts beside the text, and how much at most."""
        self._drafting: dict[SequenceDrafts, Best] = {}
        self._num_plans = 0
        """Since the last review."""

    def start(
        self,
        prompt: tuple[int, ...],
        seed: int | None,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        is_plain: bool = False,
    ) -> "SequenceDrafts":
        """`is_plain`: nothing is added to the model's logits that the MTP head does not know of."""
        return SequenceDrafts(self, prompt, seed, stop_token_ids, is_plain=is_plain)

    def note(self, drafts: "SequenceDrafts", planned: Best) -> None:
        """Records what a sequence plans for its next step."""
        self._drafting[drafts] = planned

    def forget(self, drafts: "SequenceDrafts") -> None:
        self._drafting.pop(drafts, None)

    def observe(self, num_rows: int, num_chained: int, num_blocks: int, seconds: float) -> None:
        """Records what a step cost, where the depth depends on it."""
        if self.config.method is SpeculationMethod.AUTO:
            self.costs.observe(num_rows, num_chained, num_blocks, seconds)

    def review(self) -> None:
        """Now and then, has all sequences start from one drafter at one depth, or from none, where that gives more.

        Each chooses the best given what the others plan. But a pass of a head is shared by all: none leaves it alone
        where all should, and none begins it alone.
        """
        if len(self._drafting) < 2:
            return
        self._num_plans += 1
        if self._num_plans < _REVIEW_INTERVAL * len(self._drafting):
            return
        self._num_plans = 0
        best, best_speed = None, self._speed(self._drafting.values()) * (1 + _LEAST_REVIEW_GAIN)
        for drafter, most in ((Drafter.NONE, 0), *self.heads):
            for depth in range(min(most, 1), most + 1):
                shared = [drafts.with_head(drafter, depth) for drafts in self._drafting]
                speed = self._speed(shared)
                if speed > best_speed:
                    best, best_speed = shared, speed
        if best:
            self._drafting = dict(zip(self._drafting, best, strict=True))

    def _speed(self, plans: Iterable[Best]) -> float:
        """Tokens per unit of cost of a step in which all do as they plan."""
        num_rows, num_chained, num_blocks, num_tokens = _together(plans)
        return num_tokens / self.costs.cost(num_rows, num_chained, num_blocks)

    def company(self, drafts: "SequenceDrafts") -> Company:
        """What the other sequences plan for the next step."""
        if len(self._drafting) == (drafts in self._drafting):
            return ALONE
        return _together(planned for other, planned in self._drafting.items() if other is not drafts)


def _together(plans: Iterable[Best]) -> Company:
    """What a step does for sequences with these plans."""
    num_rows, num_chained, num_blocks, expected_tokens = 0, 0, 0, 0.0
    for choice, expected, _ in plans:
        num_rows += 1 + choice.depth
        num_chained = max(num_chained, choice.num_chained)
        num_blocks = max(num_blocks, choice.num_blocks)
        expected_tokens += expected
    return Company(num_rows, num_chained, num_blocks, expected_tokens)


class _Proposal(NamedTuple):
    """Drafts that are judged by the tokens that come, verified or not: in this step, and in later ones."""

    kind: DraftClass
    token_ids: tuple[int, ...]
    num_verified: int
    num_right: int = 0
    """Those that came in the steps before."""
    num_looked_up: int = 0
    """Those worth verifying in a step for which the text had no match when planned."""


class _HeldChoices:
    """Choices of drafts from the text, by its match: each holds for some steps.

    No head has to know of them, and where text is copied, choosing anew would be the largest part of the host's work.
    """

    def __init__(self) -> None:
        self._held: dict[DraftClass, tuple[Best, int]] = {}

    def take(self, kind: DraftClass, room: int) -> Best | None:
        """The choice for a text with this match, unless it has held for long or there is no room for it."""
        held, num_left = self._held.get(kind, (_NOTHING, 0))
        if not num_left or held.choice.depth > room:
            return None
        self._held[kind] = held, num_left - 1
        return held

    def put(self, kind: DraftClass, choice: Best) -> None:
        self._held[kind] = choice, _HELD_STEPS


class SequenceDrafts:
    """One sequence's drafts: made by a head or looked up in its own text."""

    def __init__(
        self,
        speculator: Speculator,
        prompt: tuple[int, ...],
        seed: int | None,
        stop_token_ids: frozenset[int],
        *,
        is_plain: bool,
    ) -> None:
        self._speculator = speculator
        self._config = speculator.config
        self._seed = seed
        is_auto = self._config.method is SpeculationMethod.AUTO
        self._index = NgramIndex(prompt) if Drafter.NGRAM in self._config.drafters else None
        self._auto = AutoDepth(shared=speculator.shared) if is_auto else None
        self._part = part_after(prompt, speculator.thinking_token_ids)
        self._text_class = self._class_of_text()
        """Of what the text proposes now."""
        self._stop_token_ids = stop_token_ids
        self._ending = 0.0
        """How likely this step ends the answer, by the stop tokens among its drafts."""
        self._plan = PLAIN
        self._text_plans, self._text_choices = _HeldChoices(), _HeldChoices()
        """To draft from the text in the next step, and of drafts that it has."""
        self._may_look_up = False
        """Whether the planned step may verify other drafts than the head's."""
        self._is_unmatched = False
        """Whether the text had no match when the step was planned."""
        self._checked = PLAIN
        """What this step verifies; `_plan` is already that of the next step."""
        self._proposals: list[_Proposal] = []
        """That are not decided yet."""
        self._offered: tuple[int, ...] = ()
        self._agreement = 0.5
        """How often the head's first drafts are the same as the text's, recently."""
        self._room = self._config.max_drafts
        """Of the latest plan."""
        self._tallies = ClassTallies()
        self._num_samples_left = _HEAD_SAMPLES if is_plain and not self._config.synthetic_acceptance else 0

    @property
    def counts(self) -> ClassCounts:
        """Counts of all drafts so far."""
        return self._tallies.counts

    @property
    def checked(self) -> tuple[Drafter, TextPart]:
        """Who made this step's drafts, and for which part of the text."""
        return self._checked.kind.drafter, self._checked.kind.part

    def extend(self, token_ids: tuple[int, ...]) -> None:
        """Adds tokens that are certain."""
        if self._auto:
            self._judge(self._auto, token_ids)
        if self._index:
            self._index.extend(token_ids)
        marks = self._speculator.thinking_token_ids
        if marks:
            for token_id in token_ids:
                if token_id in marks:
                    self._part = TextPart.THINKING if token_id == marks[0] else TextPart.ANSWER
        self._text_class = self._class_of_text()

    def _judge(self, auto: AutoDepth, token_ids: tuple[int, ...], *, is_end: bool = False) -> None:
        """Observes the proposals that these tokens decide, and keeps the others; at the end all are decided."""
        undecided = []
        for proposal in self._proposals:
            kind, proposed, num_verified, num_before, num_looked_up = proposal
            num_judged, num_right = num_matching(proposed[num_before:], token_ids)
            is_wrong, num_right = num_right < num_judged, num_before + num_right
            if not is_wrong and not is_end and num_right < len(proposed):
                undecided.append(proposal._replace(num_right=num_right))
                continue
            is_block = kind.drafter is Drafter.DFLASH and num_verified < len(proposed)
            (auto.observe_block if is_block else auto.observe)(kind, num_right + is_wrong, num_right)
            if num_looked_up:
                auto.observe_lookup(kind.part, num_looked_up, min(num_right, num_looked_up))
        self._proposals = undecided

    def finish(self, token_ids: tuple[int, ...]) -> None:
        """Judges by the last tokens of an answer."""
        if self._auto:
            self._judge(self._auto, token_ids, is_end=True)

    def forget(self) -> None:
        """Drops offered drafts and the plan: the sequence lost its slot."""
        self._offered, self._plan, self._proposals = (), PLAIN, []
        self._speculator.forget(self)

    def offer(self, drafts: tuple[int, ...]) -> None:
        """Sets what a head drafted for the next step."""
        self._offered = drafts

    def propose(self, room: int) -> tuple[int, ...]:
        """Drafts for this step, at most `room`."""
        room = min(room, self._config.max_drafts)
        if self._auto:
            drafts = self._propose_best(self._auto, room)
            self._ending = self._chance_of_end(self._auto, drafts)
            return drafts
        method, head = self._config.method, self._offered[:room]
        if self._index and (method is SpeculationMethod.NGRAM or self._goes_on_from_text(self._index, head)):
            text = self._index.propose(room if method is SpeculationMethod.NGRAM else len(head))
            self._checked = DraftChoice(self._text_class, len(text))
            return text
        drafter = Drafter.DFLASH if method is SpeculationMethod.DFLASH else Drafter.MTP
        self._checked = DraftChoice(DraftClass(drafter, self._part), len(head))
        return head

    def _goes_on_from_text(self, index: NgramIndex, block: tuple[int, ...]) -> bool:
        """Whether a long stretch is being copied, now as in the step before, and the block begins like it."""
        return self._may_look_up and index.match_length >= _LONG_COPY and index.propose(1) == block[:1]

    def _propose_best(self, auto: AutoDepth, room: int) -> tuple[int, ...]:
        """As planned, or from the text where that is better now that the tokens of the last step are known."""
        plan, head = self._plan, self._offered[:room]
        self._checked = plan
        text = self._index.propose(room) if self._index else ()
        if head:
            self._proposals.append(_Proposal(plan.kind, head, plan.depth))
            head = head[: plan.depth]
        text_class, is_from_text = self._text_class, plan.kind.drafter is Drafter.NGRAM
        found = _NOTHING if is_from_text or self._is_unmatched else None
        if found and text:
            found = self._best_of_text(auto, Offer(text_class, len(text)))
        num_looked_up = found.choice.depth if found and self._is_unmatched else 0
        if self._is_unmatched and not num_looked_up:
            auto.observe_lookup(text_class.part, 0, 0)
        if not text:
            return head
        self._proposals.append(_Proposal(text_class, text, 0, num_looked_up=num_looked_up))
        if found and is_from_text:
            self._checked = found.choice
            return text[: found.choice.depth]
        if len(head) >= _NUM_AGREED:
            is_agreed = head[:_NUM_AGREED] == text[:_NUM_AGREED]
            self._agreement += 0.1 * (is_agreed - self._agreement)
            text_class = text_class._replace(is_agreed=is_agreed)
            self._proposals.append(_Proposal(text_class, text, 0))
        if not self._may_look_up:
            return head
        best = self._best_of(auto, Offer(text_class, len(text)), Offer(plan.kind, len(head))).choice
        self._checked = best
        return text[: best.depth] if best.kind == text_class else head[: best.depth]

    def _chance_of_end(self, auto: AutoDepth, drafts: tuple[int, ...]) -> float:
        """How likely a step accepts a stop token among these drafts."""
        if self._stop_token_ids.isdisjoint(drafts):
            return 0.0
        place = next(place for place, token_id in enumerate(drafts) if token_id in self._stop_token_ids)
        return auto.chances(self._checked.kind, place + 1)[place]

    def _best_of_text(self, auto: AutoDepth, text: Offer) -> Best:
        """`_best_of` the text's drafts, or what it was a few steps ago."""
        found = self._text_choices.take(text.kind, text.max_depth)
        if found is None:
            found = self._best_of(auto, text)
            self._text_choices.put(text.kind, found)
        return found

    def _best_of(self, auto: AutoDepth, *offers: Offer) -> Best:
        """Of drafts that are made already, in the company that this step has."""
        return auto.choose_now(
            [o for o in offers if o.max_depth], self._speculator.costs, self._speculator.company(self)
        )

    def _class_of_text(self) -> DraftClass:
        return DraftClass(Drafter.NGRAM, self._part, self._index.match_length if self._index else 0)

    def plan_next(self, room: int) -> tuple[Drafter, int]:
        """Which head drafts in this step for the next one, which has room for `room` drafts, and how many."""
        config = self._config
        room = min(room, config.max_drafts)
        if config.method is SpeculationMethod.MTP:
            return _from_head(Drafter.MTP, min(room, config.max_mtp_drafts))
        if config.method is SpeculationMethod.DFLASH:
            self._may_look_up = self._index is not None and self._index.match_length >= _LONG_COPY
            return _from_head(Drafter.DFLASH, min(room, config.max_block_drafts))
        return self._plan_best(self._auto, room) if self._auto else (Drafter.NONE, 0)

    def _plan_best(self, auto: AutoDepth, room: int) -> tuple[Drafter, int]:
        self._room = room
        self._speculator.review()
        kind = self._text_class
        self._is_unmatched = self._index is not None and kind.is_unmatched
        planned, company = self._text_plans.take(kind, room), self._speculator.company(self)
        if planned is None:
            planned = auto.choose(self._offers(room), self._speculator.costs, company)
            if planned.choice.kind.drafter is Drafter.NGRAM:
                self._text_plans.put(kind, planned)
        if self._ending and not is_worth_drafting(planned, 1 - self._ending, self._speculator.costs, company):
            planned = Best(PLAIN, 1.0, planned.speed)
        self._plan = plan = planned.choice
        self._may_look_up = self._pays_to_look_up(auto, planned, room)
        self._speculator.note(self, planned)
        return _from_head(plan.kind.drafter, plan.num_chained + plan.num_blocks)

    def with_head(self, drafter: Drafter, depth: int) -> Best:
        """A plan with so many drafts of a head, as far as there is room."""
        kind, depth = DraftClass(drafter, self._part), min(depth, self._room)
        num_tokens = self._auto.expected_tokens(kind, depth) if self._auto and depth else 1.0
        return Best(DraftChoice(kind, depth) if depth else PLAIN, num_tokens, 0.0)

    def _offers(self, room: int) -> list[Offer]:
        offers = [Offer(DraftClass(drafter, self._part), min(room, most)) for drafter, most in self._speculator.heads]
        if self._index:
            offers.append(Offer(self._text_class, room))
        return offers

    def _pays_to_look_up(self, auto: AutoDepth, planned: Best, room: int) -> bool:
        """Whether the next step should wait for what the text says, though a head drafts for it."""
        plan, kind = planned.choice, self._text_class
        is_from_head = plan.kind.drafter not in (Drafter.NONE, Drafter.NGRAM)
        if not is_from_head or plan.depth < _NUM_AGREED or plan.is_probe or kind.match_length < _LEAST_COPIED:
            return False
        agreed = self._best_of(auto, Offer(kind._replace(is_agreed=True), room))
        return self._agreement * (agreed.speed / planned.speed - 1) > _LEAST_LOOKUP_GAIN

    @property
    def is_from_head(self) -> bool:
        """Whether the next step's drafts, if any, are those that a head makes in this one."""
        if self._config.method is SpeculationMethod.NGRAM or self._may_look_up:
            return False
        return self._plan.kind.drafter is not Drafter.NGRAM

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Records how many of this step's drafts were accepted."""
        self._tallies.add(*self.checked, num_proposed, num_accepted)
        if self._auto:
            self._auto.observe_choice(self._checked, num_proposed, num_accepted)

    def takes_head_sample(self) -> bool:
        """Whether this step's drafts tell how good the MTP head is. Called once after each `observe`.

        They do if the head made them for a plain request; of each request only the first ones count.
        """
        if not self._num_samples_left or self._checked.kind.drafter is not Drafter.MTP:
            return False
        self._num_samples_left -= 1
        return True

    def checks(self, position: int, count: int) -> tuple[DraftCheck, ...]:
        """How `count` drafts from `position` on are verified: by the model, or at a benchmark's synthetic rates."""
        rates = self._config.synthetic_acceptance
        if not rates:
            return (DraftCheck.COMPARE,) * count
        # Not a checksum: those of neighbouring positions are too evenly spread for a coin toss.
        digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=8).digest()
        coin = int.from_bytes(digest, "big") / 2**64
        return tuple(
            DraftCheck.ACCEPT if place < len(rates) and coin < rates[place] else DraftCheck.REJECT
            for place in range(count)
        )


def _from_head(drafter: Drafter, depth: int) -> tuple[Drafter, int]:
    return (drafter, depth) if depth else (Drafter.NONE, 0)


def part_after(prompt: tuple[int, ...], marks: tuple[int, int] | None) -> TextPart:
    """Whether an answer to this prompt begins with reasoning: the prompt opens it and does not close it."""
    for token_id in reversed(prompt[-_MOST_LOOKED_BACK:] if marks else ()):
        if marks and token_id in marks:
            return TextPart.THINKING if token_id == marks[0] else TextPart.ANSWER
    return TextPart.ANSWER
