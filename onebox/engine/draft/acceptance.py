"""How likely drafts are accepted, by drafter, part of the text, match and position: learnt per request and by all.

Everything that was proposed for a place is compared with the tokens that came there, whether it was verified or not: a
look into the text costs nothing, so n-gram drafts are judged in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from onebox.engine.draft.kinds import Drafter, TextPart

__all__ = ["AcceptanceRates", "DraftClass", "LearningSettings", "SharedRates", "num_matching"]

_LARGEST_WEIGHT = 1e60
_LEAST_WORTH, _MOST_WORTH, _WELL_KNOWN = 3.0, 24.0, 30.0
"""Observations of a request that a shared rate is worth: without any of its own, and with so many."""
_LATEST_RATE, _LARGEST_CHANGE, _DECAY_IN_CHANGE, _LEAST_LIKENESS = 0.25, 0.5, 0.7, 0.05
"""A change of the text: four first drafts in a row that did otherwise than most before."""


class DraftClass(NamedTuple):
    """Drafts whose acceptance is counted together."""

    drafter: Drafter
    part: TextPart = TextPart.ANSWER
    match_length: int = 0
    """Of an n-gram match: what follows a longer one is accepted more often."""
    is_agreed: bool | None = None
    """Of an n-gram match: whether a head's first drafts are the same; None: whatever a head drafts."""

    @property
    def is_unmatched(self) -> bool:
        """Whether these are drafts from the text, which has no match yet."""
        return self.drafter is Drafter.NGRAM and not self.match_length


@dataclass(frozen=True)
class LearningSettings:
    """How fast acceptance is learnt."""

    decay: float = 0.99
    """Factor on the weight of older observations per new one: a memory of about 100 steps, for texts change."""
    prior_weight: float = 32.0
    """In drafts: how many of its own a request needs to differ from the requests before it by half."""
    shared_decay: float = 0.98
    """The same factor for the rates of all requests: a memory of about 50 steps, for requests that follow each other
    are often alike. Where they are not, a longer one is no better."""
    request_decay: float = 0.85
    """The same factor per request: what did not suit one text may suit the next, and a drafter that is not used is
    observed in few steps, of which 50 would go on for many requests."""
    lookup_decay: float = 0.95
    """The same factor for what a request finds in its text: a memory of about 20 steps."""
    refresh_interval: int = 16
    """Observations after which the shared rates are computed anew."""


_RATES = {Drafter.MTP: 0.8, Drafter.DFLASH: 0.85, Drafter.NGRAM: 0.4}
_RATES_OF_MATCHES = {2: 0.4, 3: 0.5, 4: 0.6, 8: 0.85, 16: 0.95, 32: 0.98}
_RATE_AGREED, _RATE_OPPOSED = 0.85, 0.2
"""Assumed before anything was observed. Of heads as of trained ones on a text that suits them: what is taken for better
than it is gets used, and so corrected by its own drafts; what is taken for worse has to wait for probes."""


def _assumed_rate(kind: DraftClass) -> float:
    if kind.is_agreed is not None:
        return _RATE_AGREED if kind.is_agreed else _RATE_OPPOSED
    return _RATES_OF_MATCHES.get(kind.match_length, _RATES[kind.drafter])


class AcceptanceRates:
    """How likely a draft at each position is accepted, given that those before it were. Positions count from 0."""

    def __init__(
        self, decay: float, prior_weight: float, prior_rate: float, prior: "SharedRates | None" = None
    ) -> None:
        self._growth = 1 / decay
        self._prior_weight = prior_weight
        self._prior_rate = prior_rate
        self._prior = prior
        # Instead of decaying all that is old, what is new weighs more and more.
        self._unit = 1.0
        self._latest: float | None = None
        """The rate of first drafts in the last few steps."""
        self._likeness = 1.0
        """How much is assumed to be as in all requests: less, for a while, after the text has become another."""
        self._tried: list[float] = []
        self._accepted: list[float] = []
        self._chances: list[float] = []
        """Cached since the last observation, up to the largest depth asked for."""
        self._version = -1
        """Of the prior that they were computed from."""

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Records a step's drafts: some accepted, the next one rejected, and the rest unknown."""
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"{num_accepted} of {num_proposed} drafts cannot have been accepted")
        self._unit *= self._growth
        if self._prior and num_proposed:
            self._watch_for_change(num_accepted > 0)
        if self._unit > _LARGEST_WEIGHT:
            self._rescale()
        num_tried = min(num_accepted + 1, num_proposed)
        unseen = max(0, num_tried - len(self._tried))
        self._tried += [0.0] * unseen
        self._accepted += [0.0] * unseen
        for position in range(num_tried):
            self._tried[position] += self._unit
        for position in range(num_accepted):
            self._accepted[position] += self._unit
        self._chances = []

    def _watch_for_change(self, is_accepted: bool) -> None:
        """Forgets faster while first drafts do as they never did before: the text has become another."""
        usual = self._accepted[0] / self._tried[0] if self._tried else float(is_accepted)
        latest = usual if self._latest is None else self._latest
        self._latest = latest + _LATEST_RATE * (is_accepted - latest)
        if abs(self._latest - usual) > _LARGEST_CHANGE:
            self._unit /= _DECAY_IN_CHANGE
            self._likeness = max(self._likeness * _DECAY_IN_CHANGE, _LEAST_LIKENESS)
        else:
            self._likeness = min(self._likeness * self._growth, 1.0)

    def fade(self, factor: float) -> None:
        """Makes all observations so far count by this factor."""
        self._unit /= factor
        if self._unit > _LARGEST_WEIGHT:
            self._rescale()
        self._chances = []

    def _rescale(self) -> None:
        self._tried = [weight / self._unit for weight in self._tried]
        self._accepted = [weight / self._unit for weight in self._accepted]
        self._unit = 1.0

    def weight(self, position: int) -> float:
        """How many observations there are of a position, older ones counted less."""
        return self._tried[position] / self._unit if position < len(self._tried) else 0.0

    def rates(self, depth: int) -> list[float]:
        """The estimates for the first `depth` positions.

        What is assumed of a position is what all requests have there, moved up or down by as much as this request
        differs from them over all positions; the more is known of all requests, the more it weighs. Without a prior,
        an unseen position is like the one before it.
        """
        if self._prior:
            return self._moved_rates(self._prior, depth)
        rates, rate, seen = list[float](), self._prior_rate, len(self._tried)
        weight = self._prior_weight * self._unit
        for position in range(depth):
            if position < seen:
                rate = (weight * rate + self._accepted[position]) / (weight + self._tried[position])
            rates.append(rate)
        return rates

    def _moved_rates(self, prior: "SharedRates", depth: int) -> list[float]:
        shared, weights, unit = prior.rates(depth), prior.weights(depth), self._unit
        tried = accepted = expected = 0.0
        for position, weight in enumerate(self._tried[: len(shared)]):
            tried += weight
            accepted += self._accepted[position]
            expected += weight * shared[position]
        # As many observations that are like those of all requests.
        usual, likeness = self._prior_weight * unit * self._likeness, unit * self._likeness
        rejected = (tried - accepted + usual * (1 - shared[0])) / (tried - expected + usual * (1 - shared[0]) + 1e-9)
        kept = (accepted + usual * shared[0]) / (expected + usual * shared[0] + 1e-9)
        rates, seen = list[float](), len(self._tried)
        for position in range(depth):
            rate = shared[position]
            rate = 1 - (1 - rate) * rejected if rejected < 1 else rate * kept
            if position < seen:
                weight = weights[position] * likeness
                rate = (weight * rate + self._accepted[position]) / (weight + self._tried[position])
            rates.append(rate)
        return rates

    def chances(self, depth: int) -> list[float]:
        """How likely the first draft is accepted, the first two, and so on up to `depth`, or beyond."""
        version = self._prior.version if self._prior else 0
        if len(self._chances) < depth or self._version != version:
            self._chances = list(accumulate(self.rates(max(depth, len(self._chances))), mul))
            self._version = version
        return self._chances


class SharedRates:
    """The rates of one class over all requests: what a new request is assumed to have. Computed anew now and then."""

    def __init__(self, settings: LearningSettings, kind: DraftClass) -> None:
        self._rates = AcceptanceRates(settings.shared_decay, 2.0, _assumed_rate(kind))
        self._interval = settings.refresh_interval
        self._request_decay = settings.request_decay
        self._num_observed = 0
        self._cached: list[float] = []
        self._weights: list[float] = []
        self.version = 0

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self._rates.observe(num_proposed, num_accepted)
        self._num_observed += 1
        # The first observations count at once: nothing else is known.
        if self._num_observed <= self._interval or self._num_observed % self._interval == 0:
            self._cached = []
            self.version += 1

    def start_request(self) -> None:
        """Another request begins."""
        self._rates.fade(self._request_decay)
        self._cached = []
        self.version += 1

    def weight(self, position: int) -> float:
        return self._rates.weight(position)

    def rates(self, depth: int) -> list[float]:
        """At least `depth` of them."""
        if len(self._cached) < depth:
            self._refresh(depth)
        return self._cached

    def weights(self, depth: int) -> list[float]:
        """How many observations the rate of each position is worth to a single request; at least `depth` of them."""
        if len(self._cached) < depth:
            self._refresh(depth)
        return self._weights

    def _refresh(self, depth: int) -> None:
        known = [min(1.0, self._rates.weight(position) / _WELL_KNOWN) for position in range(depth)]
        self._cached = self._rates.rates(depth)
        self._weights = [_LEAST_WORTH + share * (_MOST_WORTH - _LEAST_WORTH) for share in known]


def num_matching(proposed: Sequence[int], token_ids: Sequence[int]) -> tuple[int, int]:
    """(how many proposed tokens can be judged by the tokens that came, how many of these are right from the start)."""
    num_judged = min(len(proposed), len(token_ids))
    for place in range(num_judged):
        if proposed[place] != token_ids[place]:
            return num_judged, place
    return num_judged, num_judged
