"""Pads a prompt to an exact length in the server's tokens by querying the server, without guessing."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from onebox.bench.tasks import Padding

__all__ = ["PromptFit", "fit"]

_ROUNDS = 16
_TAIL = 12
"""Up to this many tokens are added letter by letter."""


class PromptFit(NamedTuple):
    """The padding found and the resulting prompt length."""

    padding: Padding
    prompt_tokens: int | None
    """None: the server cannot count tokens."""

    def note(self, wanted: int) -> str:
        """Note for a prompt that does not have the wanted length."""
        if self.prompt_tokens is None:
            return "the prompt's length is not exact: the server has no /tokenize and reports no usage"
        if self.prompt_tokens == wanted:
            return ""
        return f"the prompt has {self.prompt_tokens:,} tokens, not {wanted:,}"


async def fit(count: Callable[[Padding], Awaitable[int | None]], wanted: int) -> PromptFit:
    """Finds the padding for which `count` returns `wanted`, or else the nearest length below it.

    A prompt that is too long without padding is left unchanged.
    """
    bare = await count(Padding())
    if bare is None or bare >= wanted:
        return PromptFit(Padding(), bare)
    best = PromptFit(Padding(), bare)
    tokens_per_word, tail = 1.5, 0
    words = int((wanted - bare) / tokens_per_word)
    for _ in range(_ROUNDS):
        padding = Padding(words, tail)
        counted = await count(padding)
        if counted is None:
            break
        if (best.prompt_tokens or 0) <= counted <= wanted:
            best = PromptFit(padding, counted)
        missing = wanted - counted
        if missing == 0:
            break
        if -tail <= missing <= _TAIL:
            tail += missing
            continue
        if words:
            tokens_per_word = max((counted - tail - bare) / words, 0.2)
        # Stay one word below the target: the last tokens are added as letters.
        words, tail = max(words + int(missing / tokens_per_word) - (1 if missing < 0 else 0), 0), 0
    return best
