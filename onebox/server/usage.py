"""Token counts of answers."""

from dataclasses import dataclass, field, replace
from typing import Any

from onebox.engine.api import AcceptanceCounts, CacheTier, ClassCounts, Counts, add_classes

__all__ = ["Usage", "UsageCount"]


@dataclass(frozen=True)
class Usage:
    """Tokens read and generated. A sum over answers counts a shared prompt once.

    The sentence that closes a reasoning over its budget counts as completion, not as reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    reasoning_tokens: int = 0
    """Part of the completion."""
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    cached_tier: CacheTier | None = None
    """Where the cached tokens were found; of several prompts, the first that had any."""
    drafts_by_class: ClassCounts = field(default_factory=dict)

    def __add__(self, other: "Usage") -> "Usage":
        counts = [name for name in self.__dataclass_fields__ if name not in ("cached_tier", "drafts_by_class")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        drafts = add_classes(self.drafts_by_class, other.drafts_by_class)
        return Usage(**sums, cached_tier=self.cached_tier or other.cached_tier, drafts_by_class=drafts)

    @property
    def without_prompt(self) -> "Usage":
        return replace(self, prompt_tokens=0, cached_tokens=0, cached_tier=None)

    @property
    def cached_details(self) -> dict[str, int | str]:
        """What OpenAI's details of a prompt hold: cached tokens, and their tier where there are any."""
        tier: dict[str, int | str] = {"cached_tier": self.cached_tier} if self.cached_tier else {}
        return {"cached_tokens": self.cached_tokens, **tier}

    @property
    def draft_details(self) -> dict[str, Any]:
        """Drafts under OpenAI's names for predictions and, where there were any, by drafter and part of the answer."""
        details: dict[str, Any] = {
            "accepted_prediction_tokens": self.accepted_draft_tokens,
            "rejected_prediction_tokens": self.rejected_draft_tokens,
        }
        for (drafter, part), counts in self.drafts_by_class.items():
            details.setdefault("drafts", {}).setdefault(drafter.value, {})[part.value] = {
                "steps": counts.num_steps,
                "accepted_tokens": counts.num_accepted,
                "rejected_tokens": counts.num_drafted - counts.num_accepted,
            }
        return details


class UsageCount:
    """Counts one answer's tokens, over all engine requests that it took."""

    def __init__(self, num_prompt: int) -> None:
        self.num_generated = 0
        self.num_reasoning = 0
        self._num_prompt = num_prompt
        self._num_cached: int | None = None
        self._cached_tier: CacheTier | None = None
        self._drafts = AcceptanceCounts()
        self._drafts_by_class: ClassCounts = {}

    def add_request(self, counts: Counts) -> None:
        """Adds what the engine counted for one finished request."""
        if self._num_cached is None:
            # A resubmitted answer finds its own first part in the cache: that is not the client's prompt.
            self._num_cached = counts.cached_tokens
            self._cached_tier = counts.cached_tier if counts.cached_tokens else None
        self._drafts += counts.drafts
        self._drafts_by_class = add_classes(self._drafts_by_class, counts.drafts_by_class)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self.num_generated,
            cached_tokens=self._num_cached or 0,
            reasoning_tokens=self.num_reasoning,
            accepted_draft_tokens=self._drafts.num_accepted,
            rejected_draft_tokens=self._drafts.num_drafted - self._drafts.num_accepted,
            cached_tier=self._cached_tier,
            drafts_by_class=self._drafts_by_class,
        )
