"""How deep to draft, and with which drafter: chosen per sequence and step, from measurements.

A step of depth k gives one token and as many drafts as are accepted, for the price of 1 + k rows and of making the
drafts. `AcceptanceRates` estimates how likely a draft is accepted, `StepCosts` what steps cost, and the choice is the
one with the most expected tokens per second; depth 0, plain decoding, is one of the choices. Texts and costs change,
so `AutoDepth` now and then probes a choice that is not the best. Nothing here is random: the same observations give
the same choices.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.engine.draft.acceptance import AcceptanceRates, DraftClass, LearningSettings, SharedRates
from onebox.engine.draft.costs import StepCosts
from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.draft.lookup import LookupGain, LookupGains

__all__ = [
    "ALONE",
    "PLAIN",
    "AutoDepth",
    "Company",
    "DepthSettings",
    "DraftChoice",
    "Offer",
    "SharedAcceptance",
    "choose",
]


_LARGEST_PRICE, _LARGEST_DEBT = 1.0, 2.0
"""Of a probe, and after it: in tokens."""
_LARGEST_GRANT, _MOST_EARNED = 1.0, 4.0
"""The credit for probes without any that succeeded, and with some: in tokens."""
_LEAST_CHANCE = 0.02
"""Drafts that are less likely to be accepted are not considered."""
_SURPRISE = 2.0
"""As many times the drafts that were expected to be right."""
_USUAL_DIFFERENCE = 0.05
"""Between the rates of one request and of all, where they are alike."""
_WORTH_PROBING, _RAREST = 0.25, 32.0
"""What a head must be able to gain, if all of its drafts were accepted, to be probed as often as others; and how many
times less often a head is probed that can gain nothing."""
_LEAST_LOOKUP_GAIN = 0.1
"""Over a plain step, of looking for a match where there was none: a plain step can be started ahead of the host."""


class Offer(NamedTuple):
    """What a drafter could propose for a sequence now."""

    kind: DraftClass
    max_depth: int


class DraftChoice(NamedTuple):
    """`depth` drafts of this class."""

    kind: DraftClass
    depth: int
    is_probe: bool = False
    """Chosen to measure it, not because it is the best."""
    num_unverified: int = 0
    """Drafts of the same block beyond `depth`: they are only compared with the tokens that come."""

    @property
    def num_chained(self) -> int:
        """Passes of the MTP head, one after the other, that the drafts take."""
        return self.depth if self.kind.drafter is Drafter.MTP else 0

    @property
    def num_blocks(self) -> int:
        """Drafts that come from one pass of the DFlash drafter."""
        return self.depth + self.num_unverified if self.kind.drafter is Drafter.DFLASH else 0


PLAIN = DraftChoice(DraftClass(Drafter.NONE), 0)


class Company(NamedTuple):
    """What a step does for the other sequences in it: one sequence's drafts delay them too."""

    num_rows: int = 0
    num_chained: int = 0
    """The longest chain of MTP passes among them; a step runs all chains in parallel."""
    num_blocks: int = 0
    """The most drafts of the DFlash drafter among them; a step has one pass for all."""
    expected_tokens: float = 0.0


ALONE = Company()


@dataclass(frozen=True)
class DepthSettings:
    """How fast acceptance is learnt and how often other choices are probed."""

    learning: LearningSettings = field(default_factory=LearningSettings)
    probe_interval: int = 16
    """Steps after which a head that is not used is probed once."""
    first_interval: int = 4
    """The same while little is known of it."""
    plain_interval: int = 64
    """Steps after which plain decoding is probed once, of which only the cost is to be measured."""
    probe_share: float = 0.01
    """The fraction of the speed that probes may cost."""
    known_weight: float = 3.0
    """Observations of a position, older ones counted less, with which it needs no probe."""
    shared_weight: float = 20.0
    """The same of all requests, where this one does no better than they do."""
    least_gain: float = 0.01
    """What another choice must gain over the last one: a step that is like the last one is planned ahead."""


class Probes:
    """What all requests have probed: short ones, too, then find the better head between them."""

    def __init__(self) -> None:
        self.credit = 0.0
        """In tokens."""
        self.num_unused: Counter[tuple[Drafter, TextPart]] = Counter()
        """Steps since a drafter was last used, of those in which it could have been."""

    def grant(self, num_tokens: float) -> None:
        """A step's share, up to a credit for one probe."""
        self.credit = max(self.credit, min(self.credit + num_tokens, _LARGEST_GRANT))

    def earn(self, num_accepted: int) -> None:
        """A probe's accepted drafts: after some good ones, a bad one does not end the probing."""
        # One unlucky probe must not be the last for hundreds of steps.
        self.credit = min(max(self.credit + num_accepted, -_LARGEST_DEBT), _MOST_EARNED)


class SharedAcceptance:
    """The acceptance of all requests, by class: what a new request is assumed to have."""

    def __init__(self, settings: LearningSettings | None = None) -> None:
        self._settings = settings or LearningSettings()
        self.probes = Probes()
        self.lookups = LookupGains(self._settings.shared_decay)
        self._rates: dict[DraftClass, SharedRates] = {}

    def start_request(self) -> None:
        """Another request begins. On the engine's thread, as everything here but the creation of policies."""
        for rates in self._rates.values():
            rates.start_request()

    def of(self, kind: DraftClass) -> SharedRates:
        found = self._rates.get(kind)
        if found is None:
            found = self._rates[kind] = SharedRates(self._settings, kind)
        return found


class Best(NamedTuple):
    """The best choice, and what a step with it is expected to give."""

    choice: DraftChoice
    num_tokens: float
    speed: float
    """Tokens per unit of cost, those of the company included."""


def choose(
    offers: Sequence[Offer],
    chances: Callable[[DraftClass, int], Sequence[float]],
    costs: StepCosts,
    company: Company = ALONE,
    last: DraftChoice = PLAIN,
    least_gain: float = 0.0,
) -> Best:
    """The choice with the most expected tokens per unit of cost, the step's other sequences counted in.

    `chances` gives how likely the first draft of a class is accepted, the first two, and so on. Another choice than the
    last one must gain `least_gain`. Of equal choices the shallower is taken.
    """
    # The device waits for this in every step, so the loop creates no objects but numbers.
    num_others, chained, blocks, others = company
    num_rows, favour, by_rows = num_others + 1, 1 + least_gain, costs.by_rows
    speed = (others + 1.0) / by_rows(chained, blocks)[num_rows]
    best, best_depth, best_tokens, best_speed = PLAIN.kind, 0, 1.0, speed
    best_rank = speed * favour if not last.depth else speed
    for kind, max_depth in offers:
        expected, drafter, last_depth = 1.0, kind.drafter, last.depth if kind == last.kind else -1
        is_chained, is_block = drafter is Drafter.MTP, drafter is Drafter.DFLASH
        likely, steps = chances(kind, max_depth), by_rows(chained, blocks)
        for depth in range(1, max_depth + 1):
            chance = likely[depth - 1]
            if chance < _LEAST_CHANCE and depth > last_depth:
                break
            expected += chance
            if is_chained and depth > chained:
                steps = by_rows(depth, blocks)
            elif is_block and depth > blocks:
                steps = by_rows(chained, depth)
            step = steps[num_rows + depth]
            speed = (others + expected) / step
            rank = speed * favour if depth == last_depth else speed
            if rank > best_rank:
                best, best_depth, best_tokens, best_speed, best_rank = kind, depth, expected, speed, rank
            elif others + expected + chance * (max_depth - depth) < best_rank * step and depth > last_depth:
                break  # later drafts are less likely, and cost more
    return Best(DraftChoice(best, best_depth), best_tokens, best_speed)


def _looked_up(text: Offer, gain: LookupGain, costs: StepCosts, company: Company) -> Best:
    """A step that looks into the text and verifies what it finds, if anything."""
    depth = min(round(gain.depth), text.max_depth)
    num_rows, num_chained, num_blocks, others = company
    drafting, plain = (costs.cost(num_rows + 1 + drafts, num_chained, num_blocks) for drafts in (depth, 0))
    num_tokens = 1 + gain.chance * min(gain.accepted, depth)
    speed = (others + num_tokens) / (gain.chance * drafting + (1 - gain.chance) * plain)
    return Best(DraftChoice(text.kind, round(gain.chance * depth)), num_tokens, speed)


def is_worth_drafting(planned: Best, survival: float, costs: StepCosts, company: Company) -> bool:
    """Whether to make these drafts in a step after which the answer goes on with the chance `survival`.

    The pass that makes them is paid now, in tokens at the speed of the plan; what they give comes with that chance.
    """
    choice, (num_others, chained, blocks, _) = planned.choice, company
    with_rows, alike = num_others + 1 + choice.depth, costs.by_rows(chained, blocks)
    drafting = costs.cost(with_rows, max(chained, choice.num_chained), max(blocks, choice.num_blocks))
    gained = planned.num_tokens - 1 - planned.speed * (alike[with_rows] - alike[num_others + 1])
    return survival * gained >= planned.speed * (drafting - alike[with_rows])


class AutoDepth:
    """One sequence's policy: the acceptance of its drafters, and when to probe another choice than the best.

    A probe is a step with another head than the best, or without drafts. Its price, in tokens, is what the best choice
    would have given in the same time; it is paid from a credit that grows with every step. So probing costs a bounded
    share of the speed, however expensive drafts are. An accepted probe pays for the next one: when the text changes, a
    drafter that became good is found within a few steps. N-gram drafts need no probes: they are judged in every step.
    """

    def __init__(self, settings: DepthSettings | None = None, shared: SharedAcceptance | None = None) -> None:
        self._settings = settings or DepthSettings()
        self._shared = shared or SharedAcceptance(self._settings.learning)
        self._is_new = True
        """Until the first choice: this is made on the thread that submits, choices on the engine's."""
        self._acceptance: dict[DraftClass, AcceptanceRates] = {}
        self._lookups = LookupGains(self._settings.learning.lookup_decay, self._shared.lookups)
        self._probes = self._shared.probes
        self._last = PLAIN
        """The latest choice that was not a probe."""
        self._saturated: dict[DraftClass, int] = {}
        """How many drafts of a class were proposed the last time, if all of them were accepted."""

    def choose(self, offers: Sequence[Offer], costs: StepCosts, company: Company = ALONE) -> Best:
        """The next step's choice among the offers and plain decoding.

        An offer of the text without a match is one to look for a match when the step begins.
        """
        if self._is_new:
            self._is_new = False
            self._shared.start_request()
        unmatched = next((offer for offer in offers if offer.kind.is_unmatched and offer.max_depth > 0), None)
        offers = [offer for offer in offers if offer.max_depth > 0 and not offer.kind.is_unmatched]
        settings = self._settings
        best = choose(offers, self.chances, costs, company, self._last, settings.least_gain)
        if unmatched and (gain := self._lookups.expected(unmatched.kind.part)):
            best = self._better(best, _looked_up(unmatched, gain, costs, company))
        self._last = best.choice
        self._probes.grant(settings.probe_share * best.num_tokens)
        probe = self._probe(best, offers, costs, company) if self._probes.credit >= 0 else None
        num_unused = self._probes.num_unused
        for kind in (PLAIN.kind, *(offer.kind for offer in offers)):
            num_unused[kind[:2]] += 1
        num_unused[(probe or best).choice.kind[:2]] = 0
        return probe or best

    def _better(self, best: Best, looked_up: Best) -> Best:
        """The look into the text, if it gains over the best of the other choices."""
        over_last = self._settings.least_gain if best.choice == self._last else 0.0
        least_gain = over_last if best.choice.depth else _LEAST_LOOKUP_GAIN
        return looked_up if looked_up.speed > best.speed * (1 + least_gain) else best

    def choose_now(self, offers: Sequence[Offer], costs: StepCosts, company: Company = ALONE) -> Best:
        """The best choice for a step whose drafts are all made: nothing is probed."""
        return choose(offers, self.chances, costs, company)

    def observe(self, kind: DraftClass, num_proposed: int, num_accepted: int) -> None:
        """Records how proposed drafts compare with the tokens that came; 0 proposed counts nothing."""
        if num_proposed:
            self._rates(kind).observe(num_proposed, num_accepted)
            self._shared.of(kind).observe(num_proposed, num_accepted)

    def observe_lookup(self, part: TextPart, depth: int, num_accepted: int) -> None:
        """Records a step for which the text had no match when planned: drafts worth verifying then, and right ones."""
        for lookups in (self._lookups, self._shared.lookups):
            lookups.observe(part, depth, num_accepted)

    def observe_choice(self, choice: DraftChoice, num_proposed: int, num_accepted: int) -> None:
        """Records what a step's choice gave. The next choice may have been made already."""
        self._saturated[choice.kind] = num_proposed if num_accepted == num_proposed else 0
        if choice.is_probe:
            self._probes.earn(num_accepted)
        if choice.is_probe and num_accepted:
            self._probes.num_unused[choice.kind[:2]] = self._settings.probe_interval

    def observe_block(self, kind: DraftClass, num_proposed: int, num_right: int) -> None:
        """`observe` of a probe's block, of which not all was verified.

        One that is far better than expected pays for the next probe: the text has become another.
        """
        expected = self.expected_tokens(kind, num_proposed) - 1
        self.observe(kind, num_proposed, num_right)
        if num_right >= _SURPRISE * expected:
            self._probes.credit = max(self._probes.credit, 0.0)
            self._probes.num_unused[kind[:2]] = self._settings.probe_interval

    def chances(self, kind: DraftClass, depth: int) -> Sequence[float]:
        """How likely the first draft of a class is accepted, the first two, and so on up to `depth`, or beyond."""
        return self._rates(kind).chances(depth)

    def expected_tokens(self, kind: DraftClass, depth: int) -> float:
        """Tokens that a step with such drafts gives, on average."""
        return 1.0 + sum(self.chances(kind, depth)[:depth]) if depth else 1.0

    def _rates(self, kind: DraftClass) -> AcceptanceRates:
        found = self._acceptance.get(kind)
        if found is None:
            learning = self._settings.learning
            found = AcceptanceRates(learning.decay, learning.prior_weight, 0.0, self._shared.of(kind))
            self._acceptance[kind] = found
        return found

    def _probe(self, best: Best, offers: Sequence[Offer], costs: StepCosts, company: Company) -> Best | None:
        """What is tried instead of the best choice: deeper drafts, another head, or none; None if nothing is due."""
        probe = self._deeper(best.choice, offers) or self._other_head(best, offers, costs, company)
        if probe is None and best.choice.depth and self._num_unused(PLAIN.kind) >= self._settings.plain_interval:
            probe = PLAIN
        if probe is None:
            return None
        probe = _with_whole_block(self._affordable(probe, best, costs, company), offers)
        # A probe gives at least one token; its accepted drafts are credited when they are observed.
        self._probes.credit -= best.speed * _cost(probe, costs, company) - company.expected_tokens - 1
        num_tokens = self.expected_tokens(probe.kind, probe.depth)
        return Best(probe._replace(is_probe=True), num_tokens, best.speed)

    def _deeper(self, best: DraftChoice, offers: Sequence[Offer]) -> DraftChoice | None:
        """Twice the depth, where all drafts were accepted lately and little is known of later ones."""
        most = next((offer.max_depth for offer in offers if offer.kind == best.kind), 0)
        is_saturated = best.depth and self._saturated.get(best.kind, 0) >= best.depth
        if best.depth >= most or not is_saturated or self._is_known(best.kind, best.depth):
            return None
        return DraftChoice(best.kind, min(2 * best.depth, most))

    def _is_known(self, kind: DraftClass, position: int) -> bool:
        """Whether it was observed how drafts at a position do: by this request, or by others like it."""
        own, shared = self._rates(kind), self._shared.of(kind)
        if own.weight(position) >= self._settings.known_weight:
            return True
        is_usual = own.rates(position)[-1] <= shared.rates(position)[position - 1] + _USUAL_DIFFERENCE
        return is_usual and shared.weight(position) >= self._settings.shared_weight

    def _other_head(
        self, best: Best, offers: Sequence[Offer], costs: StepCosts, company: Company
    ) -> DraftChoice | None:
        """The head other than the best that was unused for longest, if its probe is due.

        As deep as would be best with it; after a probe all of whose drafts were accepted, twice as deep as that.
        """
        heads = [offer for offer in offers if offer.kind.drafter not in (best.choice.kind.drafter, Drafter.NGRAM)]
        tried = max(heads, key=lambda offer: self._num_unused(offer.kind), default=None)
        if tried is None or not self._is_due(tried, best, costs, company):
            return None
        depth = choose([tried], self.chances, costs, company).choice.depth
        return DraftChoice(tried.kind, min(max(1, depth, 2 * self._saturated.get(tried.kind, 0)), tried.max_depth))

    def _is_due(self, head: Offer, best: Best, costs: StepCosts, company: Company) -> bool:
        """Whether a head is to be probed again: the later, the less it could gain over the best choice."""
        num_unused, interval = self._num_unused(head.kind), self._interval(head.kind)
        if num_unused < interval:
            return False
        most = choose([head], lambda _, depth: [1.0] * depth, costs, company).speed / best.speed - 1
        return num_unused >= interval * max(1.0, _WORTH_PROBING / max(most, _WORTH_PROBING / _RAREST))

    def _num_unused(self, kind: DraftClass) -> int:
        return self._probes.num_unused[kind[:2]]

    def _interval(self, kind: DraftClass) -> int:
        """Steps between two probes of a head: few while little is known of it."""
        is_known = self._shared.of(kind).weight(0) >= self._settings.shared_weight
        return self._settings.probe_interval if is_known else self._settings.first_interval

    def _affordable(self, probe: DraftChoice, best: Best, costs: StepCosts, company: Company) -> DraftChoice:
        """The probe, made shallower until it costs no more than one may, by what is expected of it."""
        while probe.depth > 1:
            gained = company.expected_tokens + self.expected_tokens(probe.kind, probe.depth)
            if best.speed * _cost(probe, costs, company) - gained <= _LARGEST_PRICE:
                break
            probe = probe._replace(depth=probe.depth - 1)
        return probe


def _with_whole_block(probe: DraftChoice, offers: Sequence[Offer]) -> DraftChoice:
    """A probe of the block drafter tells of all positions, however few rows it verifies: one pass makes them all."""
    if probe.kind.drafter is not Drafter.DFLASH:
        return probe
    most = max(offer.max_depth for offer in offers if offer.kind == probe.kind)
    return probe._replace(num_unverified=most - probe.depth)


def _cost(choice: DraftChoice, costs: StepCosts, company: Company) -> float:
    longest, widest = max(company.num_chained, choice.num_chained), max(company.num_blocks, choice.num_blocks)
    return costs.cost(company.num_rows + 1 + choice.depth, longest, widest)
