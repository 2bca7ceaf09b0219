"""Brings a prompt to a length in the server's own tokens, by asking the server. No guess at characters per token."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from onebox.bench.tasks import Padding

__all__ = ["PromptFit", "fit"]

_ROUNDS = 16
_TAIL = 12
"""So few tokens are added letter by letter."""


@dataclass(frozen=True)
class PromptFit:
    """The padding that was found, and the length that it gives."""

    padding: Padding
    prompt_tokens: int | None
    """None: the server cannot count."""

    def note(self, wanted: int) -> str:
        """What to say where the length is not the wanted one."""
        if self.prompt_tokens is None:
            return "the prompt's length is not exact: the server has no /tokenize and gives no usage"
        if self.prompt_tokens == wanted:
            return ""
        return f"the prompt has {self.prompt_tokens:,} tokens, not {wanted:,}"


async def fit(count: Callable[[Padding], Awaitable[int | None]], wanted: int) -> PromptFit:
    """Searches the padding with which `count` gives `wanted`; the nearest below it where none does.

    A prompt that is too long without any padding stays as it is.
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
        # A word too few rather than one too many: letters can only be added.
        words, tail = max(words + int(missing / tokens_per_word) - (1 if missing < 0 else 0), 0), 0
    return best
