"""How deep to draft, and with which drafter: chosen per sequence and step, from measurements.

A step of depth k gives one token and as many drafts as are accepted, for the price of 1 + k rows and of making the
drafts. `AcceptanceRates` estimates how likely a draft is accepted, `StepCosts` what steps cost, and the choice is the
one with the most expected tokens per second; depth 0, plain decoding, is one of the choices. Texts and costs change,
so `AutoDepth` now and then probes a choice that is not the best. Nothing here is random: the same observations give
the same choices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.engine.draft.kinds import Drafter

__all__ = [
    "ALONE",
    "PLAIN",
    "AcceptanceRates",
    "AutoDepth",
    "Company",
    "CostPrior",
    "DepthSettings",
    "DraftChoice",
    "Offer",
    "StepCosts",
    "choose",
]

Floats = NDArray[np.float64]

_EYE = np.eye(3)

_OFFSET_MEMORY = 0.995
"""By what the offset of a kind of step decays with every step of another kind."""


class Offer(NamedTuple):
    """What a drafter could propose for a sequence now."""

    drafter: Drafter
    max_depth: int
    match_length: int = 0
    """Of an n-gram match: longer ones are accepted more often, so each length has its own statistics."""

    @property
    def statistics_key(self) -> tuple[Drafter, int]:
        """Offers with the same key share their acceptance statistics."""
        return self.drafter, self.match_length


class DraftChoice(NamedTuple):
    """`depth` drafts by `drafter`."""

    drafter: Drafter
    depth: int
    match_length: int = 0
    is_probe: bool = False
    """Chosen to measure it, not because it is the best."""

    @property
    def num_chained(self) -> int:
        """Passes of the MTP head, one after the other, that the drafts take."""
        return self.depth if self.drafter is Drafter.MTP else 0


PLAIN = DraftChoice(Drafter.NONE, 0)


class Company(NamedTuple):
    """What a step does for the other sequences in it: one sequence's drafts delay them too."""

    num_rows: int = 0
    num_chained: int = 0
    """The longest chain of MTP passes among them; a step runs all chains in parallel."""
    expected_tokens: float = 0.0


ALONE = Company()


@dataclass(frozen=True)
class CostPrior:
    """Assumed costs before any step was measured, as fractions of a step with one row and no drafts."""

    row: float
    """Each row after the first."""
    draft: float
    """Each pass of the MTP head."""

    def __post_init__(self) -> None:
        if self.row < 0 or self.draft < 0:
            raise ValueError(f"costs are fractions of a step and cannot be negative: {self}")


@dataclass(frozen=True)
class DepthSettings:
    """How fast acceptance is learnt and how often other choices are probed."""

    decay: float = 0.97
    """Factor on the weight of older observations per new one: a memory of about 30 steps."""
    prior_rate: float = 0.6
    prior_weight: float = 1.0
    """In observations."""
    probe_interval: int = 16
    """Steps after which a drafter that is not used, or plain decoding, is probed once."""
    probe_share: float = 0.01
    """The fraction of the speed that probes may cost."""


class AcceptanceRates:
    """How likely a draft at each position is accepted, given that those before it were. Positions count from 0."""

    def __init__(self, settings: DepthSettings) -> None:
        self._settings = settings
        self._tried: list[float] = []
        self._accepted: list[float] = []
        self._chances: list[float] = []
        """Cached since the last observation, up to the largest depth asked for."""

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Records a step's drafts: some accepted, the next one rejected, and the rest unknown."""
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"{num_accepted} of {num_proposed} drafts cannot have been accepted")
        decay = self._settings.decay
        num_tried = min(num_accepted + 1, num_proposed)
        unseen = max(0, num_tried - len(self._tried))
        # Positions that were not tried decay too: without observations, a position follows the one before it.
        self._tried = [weight * decay for weight in self._tried] + [0.0] * unseen
        self._accepted = [weight * decay for weight in self._accepted] + [0.0] * unseen
        for position in range(num_tried):
            self._tried[position] += 1
            self._accepted[position] += position < num_accepted
        self._chances = []

    def rate(self, position: int) -> float:
        """The estimate for one position."""
        return self.rates(position + 1)[-1]

    def rates(self, depth: int) -> list[float]:
        """The estimates for the first `depth` positions. Without observations a position is like the one before it."""
        rates, prior = [], self._settings.prior_rate
        weight = self._settings.prior_weight
        for position in range(depth):
            if position < len(self._tried):
                prior = (weight * prior + self._accepted[position]) / (weight + self._tried[position])
            rates.append(prior)
        return rates

    def chances(self, depth: int) -> list[float]:
        """How likely the first draft is accepted, the first two, and so on up to `depth`."""
        if len(self._chances) < depth:
            self._chances = list(accumulate(self.rates(depth), mul))
        return self._chances[:depth]


class StepCosts:
    """What a step costs, by its rows and the MTP passes chained in it; one for all sequences of an engine.

    A plane fitted to recent steps, cost = first + row x (rows - 1) + draft x passes, and for each kind of step its
    offset from the plane: some kernel sizes are faster than others. Offsets of kinds that have not occurred for long
    decay. Costs are seconds once something was observed, and fractions of a plain step before.
    """

    _MEMORY = 0.98
    """Factor on the weight of older steps per new one: a memory of about 50 steps."""
    _FIT_INTERVAL = 8
    _PRIOR_WEIGHT = 0.1
    """In steps: enough to separate rows from passes where the observed steps do not."""
    _LEAST_FIRST = 0.01
    """Of a typical step: the least fixed cost, whatever the fit gives."""
    _SHORTEST_S = 1e-6
    """Where the clock has not advanced between start and end."""
    _LEAST_RATE = 0.05
    _LARGEST_ERROR = 0.5
    """Outliers are clipped: a step counts as at most this much over its expected cost."""

    def __init__(self, prior: CostPrior) -> None:
        self._prior = np.array([1.0, prior.row, prior.draft])
        self._plane: list[float] = self._prior.tolist()
        # Least squares of relative errors; each step is its (1, rows - 1, passes), over its seconds.
        self._moments: Floats = np.zeros((3, 3))
        self._sums: Floats = np.zeros(3)
        self._num_observed = 0
        self._offsets: dict[tuple[int, int], _Offset] = {}

    def cost(self, num_rows: int, num_chained: int) -> float:
        """The expected cost of a step with `num_rows` rows, drafts included, and `num_chained` MTP passes in a row."""
        offset = self._offsets.get((num_rows, num_chained))
        ratio = offset.ratio_at(self._num_observed) if offset else 1.0
        return self._on_plane(num_rows, num_chained) * ratio

    def observe(self, num_rows: int, num_chained: int, seconds: float) -> None:
        """Records a step that took `seconds`."""
        if self._num_observed:
            seconds = min(seconds, self.cost(num_rows, num_chained) * (1 + self._LARGEST_ERROR))
        seconds = max(seconds, self._SHORTEST_S)
        step = np.array([1.0, num_rows - 1, num_chained]) / seconds
        self._moments = self._moments * self._MEMORY + np.outer(step, step)
        self._sums = self._sums * self._MEMORY + step
        self._num_observed += 1
        if self._num_observed < 2 * self._FIT_INTERVAL or self._num_observed % self._FIT_INTERVAL == 0:
            self._fit()
        key, on_plane = (num_rows, num_chained), self._on_plane(num_rows, num_chained)
        offset = self._offsets.get(key, _Offset(1.0, 0, self._num_observed))
        ratio = offset.ratio_at(self._num_observed)
        rate = max(1 / (offset.num_seen + 2), self._LEAST_RATE)
        ratio += rate * (seconds / on_plane - ratio)
        self._offsets[key] = _Offset(ratio, offset.num_seen + 1, self._num_observed)

    def _on_plane(self, num_rows: int, num_chained: int) -> float:
        first, row, draft = self._plane
        return first + row * (num_rows - 1) + draft * num_chained

    def _fit(self) -> None:
        """Fits the plane to the steps and, where they leave it open, to the prior."""
        total = (1 - self._MEMORY**self._num_observed) / (1 - self._MEMORY)
        typical = total / float(self._sums[0])
        # The prior's unit in seconds, from its prediction of the same steps.
        unit = total / float(self._prior @ self._sums)
        weight = self._PRIOR_WEIGHT / typical**2
        moments, sums = self._moments + weight * _EYE, self._sums + weight * unit * self._prior
        plane, parts = np.zeros(3), [0, 1, 2]
        while parts:
            plane[parts] = np.linalg.solve(moments[np.ix_(parts, parts)], sums[parts])
            # No cost is negative: one that noise makes negative is set to 0, and the others are fitted again.
            negative = min(parts, key=lambda part: plane[part])
            if plane[negative] >= 0:
                break
            plane[negative] = 0
            parts.remove(negative)
        plane[0] = max(plane[0], self._LEAST_FIRST * typical)
        self._plane = plane.tolist()


class _Offset(NamedTuple):
    """The offset of one kind of step from the plane."""

    ratio: float
    num_seen: int
    last_seen: int
    """In observed steps."""

    def ratio_at(self, num_observed: int) -> float:
        return 1 + (self.ratio - 1) * math.pow(_OFFSET_MEMORY, num_observed - self.last_seen)


def choose(
    offers: Sequence[Offer],
    acceptance: Mapping[tuple[Drafter, int], AcceptanceRates],
    costs: StepCosts,
    company: Company = ALONE,
) -> DraftChoice:
    """The choice with the most expected tokens per unit of cost, the step's other sequences counted in.

    `acceptance` is keyed by `Offer.statistics_key` and holds every offer's. Of equal choices the shallower is taken.
    """
    # The device waits for this in every step, so the loop creates no objects but numbers.
    others, num_rows, num_chained = company.expected_tokens, company.num_rows + 1, company.num_chained
    best, best_depth, best_speed = None, 0, (others + 1.0) / costs.cost(num_rows, num_chained)
    for offer in offers:
        expected, is_chained = 1.0, offer.drafter is Drafter.MTP
        for depth, chance in enumerate(acceptance[offer.statistics_key].chances(offer.max_depth), 1):
            expected += chance
            longest = depth if is_chained and depth > num_chained else num_chained
            speed = (others + expected) / costs.cost(num_rows + depth, longest)
            if speed > best_speed:
                best, best_depth, best_speed = offer, depth, speed
    return DraftChoice(best.drafter, best_depth, best.match_length) if best else PLAIN


def _speed(choice: DraftChoice, expected_tokens: float, costs: StepCosts, company: Company) -> float:
    return (company.expected_tokens + expected_tokens) / _cost(choice, costs, company)


def _cost(choice: DraftChoice, costs: StepCosts, company: Company) -> float:
    return costs.cost(company.num_rows + 1 + choice.depth, max(company.num_chained, choice.num_chained))


class AutoDepth:
    """One sequence's policy: the acceptance of its drafters, and when to probe another choice than the best.

    A probe is a step with another drafter than the best, or with none. Its price, in tokens, is what the best choice
    would have given in the same time; it is paid from a credit that grows with every step. So probing costs a bounded
    share of the speed, however expensive drafts are. An accepted probe pays for the next one: when the text changes, a
    drafter that became good is found within a few steps.
    """

    def __init__(self, settings: DepthSettings | None = None) -> None:
        self._settings = settings or DepthSettings()
        self._acceptance: dict[tuple[Drafter, int], AcceptanceRates] = {}
        self._num_unused: dict[Drafter, int] = dict.fromkeys(Drafter, 0)
        """Steps since a drafter was last used, of those in which it could have been."""
        self._credit = 0.0

    def choose(self, offers: Sequence[Offer], costs: StepCosts, company: Company = ALONE) -> DraftChoice:
        """The next step's choice among the offers and plain decoding."""
        offers = [offer for offer in offers if offer.max_depth > 0]
        for offer in offers:
            if offer.statistics_key not in self._acceptance:
                self._acceptance[offer.statistics_key] = AcceptanceRates(self._settings)
        best = choose(offers, self._acceptance, costs, company)
        best_tokens = self.expected_tokens(best)
        self._credit = min(self._credit + self._settings.probe_share * best_tokens, 1.0)
        probe = self._probe(best, offers, costs, company) if self._credit >= 0 else None
        choice = probe or best
        if choice.is_probe:
            best_speed = _speed(best, best_tokens, costs, company)
            # A probe gives at least one token; its accepted drafts are credited when they are observed.
            self._credit -= best_speed * _cost(choice, costs, company) - company.expected_tokens - 1
        for drafter in {Drafter.NONE, *(offer.drafter for offer in offers)}:
            self._num_unused[drafter] += 1
        self._num_unused[choice.drafter] = 0
        return choice

    def observe(self, choice: DraftChoice, num_proposed: int, num_accepted: int) -> None:
        """Records how a choice did. Fewer drafts than chosen may have been proposed; 0 proposed counts nothing.

        The next choice may have been made already: drafts are verified one step after they are chosen.
        """
        if num_proposed == 0:
            return
        self._acceptance[choice.drafter, choice.match_length].observe(num_proposed, num_accepted)
        if choice.is_probe and num_accepted:
            self._credit += num_accepted
            self._num_unused[choice.drafter] = self._settings.probe_interval

    def expected_tokens(self, choice: DraftChoice) -> float:
        """Tokens that a step with this choice gives, on average: for the `Company` of the other sequences."""
        if not choice.depth:
            return 1.0
        acceptance = self._acceptance[choice.drafter, choice.match_length]
        return 1.0 + sum(acceptance.chances(choice.depth))

    def _probe(
        self, best: DraftChoice, offers: Sequence[Offer], costs: StepCosts, company: Company
    ) -> DraftChoice | None:
        """The choice other than the best that was unused for longest, if its probe is due."""
        others = [offer for offer in offers if offer.drafter is not best.drafter]
        waits: list[tuple[int, Offer | None]] = [(self._num_unused[offer.drafter], offer) for offer in others]
        if best.depth:
            waits.append((self._num_unused[Drafter.NONE], None))
        wait, tried = max(waits, key=lambda pair: pair[0], default=(0, None))
        if wait < self._settings.probe_interval:
            return None
        probe = choose([tried], self._acceptance, costs, company) if tried else PLAIN
        if tried and not probe.depth:
            probe = DraftChoice(tried.drafter, 1, tried.match_length)
        return probe._replace(is_probe=True)
