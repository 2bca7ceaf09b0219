"""The thinking budget: when a reasoning is closed, and the engine request that continues its answer.

A reasoning over its budget is closed by a sentence and </think>. The engine cannot insert tokens into a running
request, so the answer up to there becomes the prompt of a second request, which generates the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from onebox.engine.api import Grammar, Request

__all__ = ["CLOSING_TEXT", "ThinkingBudget", "ThinkingLimit"]

CLOSING_TEXT = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now."
    "\n</think>\n\n"
)
"""Closes a reasoning over its budget, in the words that the model's makers give for it."""


class ThinkingBudget(NamedTuple):
    """Bounds the reasoning with which an answer begins."""

    num_tokens: int | None
    """None: no limit, unless the client ends it."""
    grammar: Grammar | None
    """Constrains what follows the reasoning. The first request's grammar lets the reasoning pass."""


class ThinkingLimit:
    """One answer's budget, which is applied at most once."""

    def __init__(self, budget: ThinkingBudget | None, closing_ids: Sequence[int], max_tokens: int) -> None:
        """`max_tokens` bounds the whole answer."""
        self.closing_ids = tuple(closing_ids)
        self.is_reached = False
        """The reasoning is to be closed behind the last token."""
        self.is_asked_for = False
        """The client wants the reasoning to end now."""
        self._budget = budget
        self._max_tokens = max_tokens

    def check(self, num_reasoning: int, num_generated: int) -> None:
        """Called behind each token where the reasoning may be closed.

        It is not closed where the token limit leaves no room for the closing text and an answer.
        """
        has_room = num_generated + len(self.closing_ids) < self._max_tokens
        self.is_reached = has_room and self._is_over(num_reasoning)

    def _is_over(self, num_reasoning: int) -> bool:
        if self._budget is None:
            return False
        limit = self._budget.num_tokens
        return self.is_asked_for or (limit is not None and num_reasoning >= limit)

    def continuation(self, request: Request, token_ids: Sequence[int]) -> Request:
        """The request for the rest of the answer, of which `token_ids`, closing text included, are generated.

        Presence and frequency penalties then count the rest alone.
        """
        grammar = self._budget.grammar if self._budget else None
        self._budget, self.is_reached = None, False
        sampling, num_generated = request.sampling, len(token_ids)
        return replace(
            request,
            request_id=f"{request.request_id}/on",
            prompt=(*request.prompt, *token_ids),
            sampling=replace(
                sampling,
                max_tokens=self._max_tokens - num_generated,
                min_tokens=max(0, sampling.min_tokens - num_generated),
                prompt_logprobs=None,
                grammar=grammar,
            ),
        )
