"""What came of drafting, as counters that can be summed: over steps, sequences or engines."""

from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["AcceptanceCounts"]


@dataclass(frozen=True)
class AcceptanceCounts:
    """Totals since some start. Adding two gives the totals of both."""

    num_steps: int = 0
    """Steps of a sequence in which something was drafted for it."""
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """How many first drafts were kept, how many second ones, and so on."""

    def plus(self, num_drafted: int, num_accepted: int) -> "AcceptanceCounts":
        """These and one more step of a sequence. Without drafts it counts nothing."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"{num_accepted} of {num_drafted} drafts cannot have been accepted")
        return self + AcceptanceCounts(int(num_drafted > 0), num_drafted, num_accepted, (1,) * num_accepted)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return AcceptanceCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            tuple(first + second for first, second in pairs),
        )
