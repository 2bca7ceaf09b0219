"""What a look into the text finds that had no match when the step was planned.

A step is planned while the one before it runs, whose tokens may give the text a match. In a text that is copied with
changes, or repeats itself, they often do, and then a look is worth more than the drafts of a head. How often, and what
is found, is counted in every step, whether it looked or not.
"""

from typing import NamedTuple

from onebox.engine.draft.kinds import TextPart

__all__ = ["LookupGain", "LookupGains"]

_SHARED_WORTH = 8.0
"""Steps of a request that those of all requests are worth to it."""


class LookupGain(NamedTuple):
    """What is expected of a look."""

    chance: float
    """That it finds drafts which are worth verifying."""
    depth: float
    """How many, where it does."""
    accepted: float
    """How many of these are accepted."""


class _Sums(NamedTuple):
    """Over steps, of which older ones count less."""

    steps: float = 0.0
    drafting: float = 0.0
    """Steps with drafts that are worth verifying."""
    drafts: float = 0.0
    accepted: float = 0.0

    def plus(self, other: "_Sums", weight: float = 1.0) -> "_Sums":
        """The other ones with a weight."""
        # Written out, because most steps of a text without matches do it twice.
        return _Sums(
            self.steps + weight * other.steps,
            self.drafting + weight * other.drafting,
            self.drafts + weight * other.drafts,
            self.accepted + weight * other.accepted,
        )


_NOTHING = _Sums()


class LookupGains:
    """The means over the steps of one request, or of all of them, by the part of the text."""

    def __init__(self, decay: float, shared: "LookupGains | None" = None) -> None:
        """`decay` is the factor on older steps per new one."""
        self._decay = decay
        self._shared = shared
        self._sums: dict[TextPart, _Sums] = {}

    def observe(self, part: TextPart, depth: int, num_accepted: int) -> None:
        """Records a step in which the text had `depth` drafts worth verifying, of which so many were right."""
        step = _Sums(1.0, float(depth > 0), depth, num_accepted)
        self._sums[part] = step.plus(self._sums.get(part, _NOTHING), self._decay)

    def expected(self, part: TextPart) -> LookupGain | None:
        """None where nothing was ever found, by this request or by others."""
        sums = self._sums.get(part, _NOTHING)
        others = self._shared._sums.get(part) if self._shared else None
        if others:
            sums = sums.plus(others, _SHARED_WORTH / others.steps)
        if not sums.drafting:
            return None
        return LookupGain(sums.drafting / sums.steps, sums.drafts / sums.drafting, sums.accepted / sums.drafting)
