"""One stream of requests on a simulated machine, whose drafts are chosen by the policy."""

import random
from dataclasses import dataclass, field

from onebox.engine.draft.acceptance import DraftClass
from onebox.engine.draft.costs import CostPrior, StepCosts
from onebox.engine.draft.depth import PLAIN, AutoDepth, DraftChoice, Offer, SharedAcceptance
from onebox.engine.draft.kinds import Drafter
from tests.engine.draft.machines import MAX_DEPTH, MAX_MTP_DEPTH, Machine, Text, rate_at, tokens_per_step

MTP, DFLASH = DraftClass(Drafter.MTP), DraftClass(Drafter.DFLASH)
NGRAM = DraftClass(Drafter.NGRAM, match_length=8)


@dataclass
class Simulation:
    """A step verifies the drafts of the one before and makes those of the next.

    Measured times vary by 5%, and one in two hundred is a stall of twenty times as long. Speeds are those expected of
    the choices, so that no luck is in them.
    """

    machine: Machine
    seed: int
    noise: float = 0.05
    heads: tuple[DraftClass, ...] = (MTP, DFLASH)
    costs: StepCosts = field(default_factory=lambda: StepCosts(CostPrior(row=0.15, draft=0.1, block=0.25)))
    shared: SharedAcceptance = field(default_factory=SharedAcceptance)
    choices: list[DraftChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.start_request()

    def start_request(self) -> None:
        self._policy, self._next = AutoDepth(shared=self.shared), PLAIN

    def run(self, text: Text, num_steps: int) -> float:
        """Tokens a millisecond over these steps."""
        num_tokens, total_ms = 0.0, 0.0
        for _ in range(num_steps):
            choice, self._next = self._next, self._policy.choose(self._offers(text), self.costs).choice
            kind = 1 + choice.depth, self._next.num_chained, self._next.num_blocks
            num_tokens += tokens_per_step(_rates(text, choice.kind), choice.depth)
            total_ms += self.machine.ms(*kind)
            stall = 20 if self._random.random() < 1 / 200 else 1
            measured_ms = self.machine.ms(*kind) * self._random.lognormvariate(0, self.noise) * stall
            self.costs.observe(*kind, measured_ms / 1000)
            self._judge(text, choice)
            self.choices.append(choice)
        return num_tokens / total_ms

    def _offers(self, text: Text) -> list[Offer]:
        offers = [Offer(head, MAX_MTP_DEPTH if head is MTP else MAX_DEPTH) for head in self.heads]
        return [*offers, Offer(NGRAM, MAX_DEPTH)] if text.ngram else offers

    def _judge(self, text: Text, choice: DraftChoice) -> None:
        num_made = choice.depth + choice.num_unverified
        num_right = self._num_accepted(_rates(text, choice.kind), num_made)
        num_accepted = min(num_right, choice.depth)
        if choice.depth:
            observe = self._policy.observe_block if choice.num_unverified else self._policy.observe
            observe(choice.kind, num_made, num_right)
            self._policy.observe_choice(choice, choice.depth, num_accepted)
        if text.ngram and choice.kind != NGRAM:
            num_judged = 1 + num_accepted
            self._policy.observe(NGRAM, num_judged, self._num_accepted(text.ngram, num_judged))

    def _num_accepted(self, rates: tuple[float, ...], depth: int) -> int:
        num_accepted = 0
        while num_accepted < depth and self._random.random() < rate_at(rates, num_accepted):
            num_accepted += 1
        return num_accepted


def _rates(text: Text, kind: DraftClass) -> tuple[float, ...]:
    return {Drafter.MTP: text.mtp, Drafter.DFLASH: text.dflash, Drafter.NGRAM: text.ngram}.get(kind.drafter, ())
