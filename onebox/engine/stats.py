"""What the engine tells of itself: counts of now, and totals since it started."""

from collections import Counter
from dataclasses import dataclass, field

from onebox.engine.draft.counts import AcceptanceCounts, AcceptanceTally
from onebox.engine.prefix import PrefixStats
from onebox.engine.request import FinishReason

__all__ = ["EngineStats", "FrozenTotals", "Totals"]


@dataclass(frozen=True)
class FrozenTotals:
    """Since the start."""

    num_steps: int
    finished: dict[FinishReason, int]
    num_failed: int
    num_preempted: int
    prompt_tokens: int
    """Computed, the cached ones not among them."""
    completion_tokens: int
    drafts: AcceptanceCounts


@dataclass
class Totals:
    """The same, while they grow."""

    num_steps: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    num_failed: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts: AcceptanceTally = field(default_factory=AcceptanceTally)

    def frozen(self) -> FrozenTotals:
        return FrozenTotals(
            self.num_steps,
            dict(self.finished),
            self.num_failed,
            self.num_preempted,
            self.prompt_tokens,
            self.completion_tokens,
            self.drafts.counts,
        )


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine from outside."""

    is_alive: bool
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    totals: FrozenTotals
    prefix: PrefixStats

    @property
    def num_finished(self) -> int:
        return sum(self.totals.finished.values())
