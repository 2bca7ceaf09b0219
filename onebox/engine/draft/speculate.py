"""Drafts of each sequence: which drafter, how many, and how many were accepted.

Drafts of the MTP head are made by the step before the one that verifies them, so the depth is decided one step ahead;
n-gram drafts are looked up when they are needed. None of it changes the answer.
"""

import hashlib

from onebox.engine.config import SpeculationConfig, SpeculationMethod
from onebox.engine.draft.depth import PLAIN, AutoDepth, Company, CostPrior, DraftChoice, Offer, StepCosts
from onebox.engine.draft.kinds import Drafter
from onebox.engine.draft.ngram import NgramIndex
from onebox.engine.request import AcceptanceCounts
from onebox.engine.stats import AcceptanceTally
from onebox.engine.step import DraftCheck

__all__ = ["SequenceDrafts", "Speculator"]

_PRIOR = CostPrior(row=0.15, draft=0.1)
"""A further row reads other experts' weights, about a seventh of a step on the large models; a draft reads one layer of
49 and the head. The first measured steps replace it."""
_HEAD_SAMPLES = 32
"""Of one request, at most: a text that nothing can predict, such as random digits, says little about the head."""


class Speculator:
    """What all sequences of an engine share: the settings, measured step costs, and the current plans."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.costs = StepCosts(_PRIOR)
        self._drafting: dict[SequenceDrafts, tuple[DraftChoice, float]] = {}

    def start(self, prompt: tuple[int, ...], seed: int | None, *, is_plain: bool = False) -> "SequenceDrafts":
        """`is_plain`: nothing is added to the model's logits that the MTP head does not know of."""
        return SequenceDrafts(self, prompt, seed, is_plain=is_plain)

    def note(self, drafts: "SequenceDrafts", choice: DraftChoice, expected_tokens: float) -> None:
        """Records what a sequence plans for its next step."""
        self._drafting[drafts] = choice, expected_tokens

    def forget(self, drafts: "SequenceDrafts") -> None:
        self._drafting.pop(drafts, None)

    def observe(self, num_rows: int, num_chained: int, seconds: float) -> None:
        """Records what a step cost, where the depth depends on it."""
        if self.config.method is SpeculationMethod.AUTO:
            self.costs.observe(num_rows, num_chained, seconds)

    def company(self, drafts: "SequenceDrafts") -> Company:
        """What the other sequences plan for the next step."""
        num_rows, num_chained, expected_tokens = 0, 0, 0.0
        for other, (choice, expected) in self._drafting.items():
            if other is not drafts:
                num_rows += 1 + choice.depth
                num_chained = max(num_chained, choice.num_chained)
                expected_tokens += expected
        return Company(num_rows, num_chained, expected_tokens)


class SequenceDrafts:
    """One sequence's drafts: offered by the MTP head or looked up in its own text."""

    def __init__(self, speculator: Speculator, prompt: tuple[int, ...], seed: int | None, *, is_plain: bool) -> None:
        self._speculator = speculator
        self._config = speculator.config
        self._seed = seed
        uses_ngrams = self._config.method in (SpeculationMethod.NGRAM, SpeculationMethod.AUTO)
        self._index = NgramIndex(prompt) if uses_ngrams else None
        self._auto = AutoDepth() if self._config.method is SpeculationMethod.AUTO else None
        self._plan = PLAIN
        self._checked = PLAIN
        """The plan behind this step's drafts; `_plan` is already that of the next step."""
        self._offered: tuple[int, ...] = ()
        self._tally = AcceptanceTally()
        self._num_samples_left = _HEAD_SAMPLES if is_plain and not self._config.synthetic_acceptance else 0

    @property
    def counts(self) -> AcceptanceCounts:
        """Counts of all drafts so far."""
        return self._tally.counts

    def extend(self, token_ids: tuple[int, ...]) -> None:
        """Adds tokens that are certain."""
        if self._index:
            self._index.extend(token_ids)

    def forget(self) -> None:
        """Drops offered drafts and the plan: the sequence lost its slot."""
        self._offered, self._plan = (), PLAIN
        self._speculator.forget(self)

    def offer(self, drafts: tuple[int, ...]) -> None:
        """Sets what the MTP head drafted for the next step."""
        self._offered = drafts

    def propose(self, room: int) -> tuple[int, ...]:
        """Drafts for this step, at most `room`."""
        room = min(room, self._config.max_drafts)
        self._checked = self._plan
        if self._config.method is SpeculationMethod.NGRAM and self._index:
            return self._index.propose(room)
        if self._plan.drafter is Drafter.NGRAM and self._index:
            found = self._index.match_length >= self._plan.match_length
            return self._index.propose(min(room, self._plan.depth)) if found else ()
        return self._offered[:room]

    def plan_next(self, room: int) -> tuple[Drafter, int]:
        """Which head drafts in this step for the next one, which has room for `room` drafts, and how many."""
        config = self._config
        room = min(room, config.max_drafts)
        if config.method is SpeculationMethod.MTP:
            return _from_head(Drafter.MTP, min(room, config.max_mtp_drafts))
        if config.method is SpeculationMethod.DFLASH:
            return _from_head(Drafter.DFLASH, min(room, config.max_block_drafts))
        if self._auto is None:
            return Drafter.NONE, 0
        offers = [Offer(Drafter.MTP, min(room, config.max_mtp_drafts))] if config.with_mtp else []
        if self._index and self._index.match_length:
            offers.append(Offer(Drafter.NGRAM, room, self._index.match_length))
        plan = self._auto.choose(offers, self._speculator.costs, self._speculator.company(self))
        self._plan = plan
        self._speculator.note(self, plan, self._auto.expected_tokens(plan))
        return _from_head(Drafter.MTP, plan.num_chained)

    @property
    def is_from_head(self) -> bool:
        """Whether the next step's drafts, if any, are those that the MTP head makes in this one."""
        return self._config.method is not SpeculationMethod.NGRAM and self._plan.drafter is not Drafter.NGRAM

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Records how many of this step's drafts were accepted."""
        self._tally.add(num_proposed, num_accepted)
        if self._auto:
            self._auto.observe(self._checked, num_proposed, num_accepted)

    def takes_head_sample(self) -> bool:
        """Whether this step's drafts tell how good the MTP head is. Called once after each `observe`.

        They do if the head made them for a plain request; of each request only the first ones count.
        """
        is_mtp = self._config.method is SpeculationMethod.MTP
        if not self._num_samples_left or not (is_mtp or self._checked.drafter is Drafter.MTP):
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
