"""What came of drafting, as counters that can be summed: over steps, sequences or engines."""

from dataclasses import dataclass
from itertools import accumulate, zip_longest

__all__ = ["AcceptanceCounts", "AcceptanceTally"]


@dataclass(frozen=True)
class AcceptanceCounts:
    """Totals since some start. Adding two gives the totals of both."""

    num_steps: int = 0
    """Steps of a sequence in which something was drafted for it."""
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """How many first drafts were kept, how many second ones, and so on."""

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return AcceptanceCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            tuple(first + second for first, second in pairs),
        )


class AcceptanceTally:
    """The same, while they grow."""

    def __init__(self) -> None:
        self._num_steps = self._num_drafted = 0
        self._num_by_accepted: list[int] = []
        """How many steps kept so many drafts, for each number from 0 on."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One more step of a sequence. Without drafts it counts nothing."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"{num_accepted} of {num_drafted} drafts cannot have been accepted")
        if num_drafted:
            self._num_steps += 1
            self._num_drafted += num_drafted
            self._num_by_accepted += [0] * (num_accepted + 1 - len(self._num_by_accepted))
            self._num_by_accepted[num_accepted] += 1

    @property
    def counts(self) -> AcceptanceCounts:
        # A step that kept three drafts kept a first, a second and a third one.
        kept = tuple(accumulate(reversed(self._num_by_accepted[1:])))[::-1]
        return AcceptanceCounts(self._num_steps, self._num_drafted, sum(kept), kept)
