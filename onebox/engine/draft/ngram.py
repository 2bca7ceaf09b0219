"""Drafts by looking back: what followed the last time that the sequence's end stood in its own text.

Costs no step of the model. Serves texts that repeat themselves or their prompt: code under edit, quotes, tables, JSON.
"""

from array import array
from collections.abc import Iterable

__all__ = ["NgramIndex"]

_SIZES = (2, 3, 4)
"""A match of one token says little; one of more than four says hardly more than four."""

_ID_BITS = 24
"""Ids of an n-gram are packed into one number: a third of a tuple's memory, and one hash."""


class NgramIndex:
    """The tokens of one sequence, prompt and answer, and where each of their n-grams last ended.

    Time and memory are a constant per token: three entries of a map, at most 300 bytes. A long prompt can
    be given piece by piece.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("i")
        self._last_end: dict[int, dict[int, int]] = {size: {} for size in _SIZES}
        self._match_end: dict[int, int | None] = dict.fromkeys(_SIZES)
        """By size: where the n-gram that now ends the text ended before."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new_tokens: Iterable[int]) -> None:
        """Adds tokens that the sequence keeps; there is no way back, so drafts are not to be added."""
        tokens = self._tokens
        for token in new_tokens:
            tokens.append(token)
            end = len(tokens)
            key = token
            for size in _SIZES:
                if end < size:
                    break
                key = key << _ID_BITS | tokens[end - size]
                # The n-gram is looked up before it is entered, so its last end is an earlier one.
                self._match_end[size] = self._last_end[size].get(key)
                self._last_end[size][key] = end

    @property
    def match_length(self) -> int:
        """How many last tokens, of 4, 3 or 2, stand earlier in the text too; 0 if none do."""
        return next((size for size in reversed(_SIZES) if self._match_end[size] is not None), 0)

    def propose(self, depth: int) -> tuple[int, ...]:
        """What followed the latest match of the greatest length, `depth` tokens of it; empty if there is no match.

        Where the match runs into the end of the text it goes on with what it proposed: a period repeats itself.
        """
        end = self._match_end.get(self.match_length)
        if end is None:
            return ()
        period = len(self._tokens) - end
        followers = self._tokens[end : end + depth]
        return tuple(followers[i % period] for i in range(depth))
