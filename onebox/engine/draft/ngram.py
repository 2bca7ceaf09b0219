"""N-gram drafts: what followed the last earlier occurrence of the sequence's last tokens.

Costs no step of the model. Serves texts that repeat themselves or their prompt: code under edit, quotes, tables, JSON.
"""

from array import array
from collections.abc import Iterable

__all__ = ["NgramIndex"]

_SIZES = (2, 3, 4)
"""A match of one token predicts little; more than four predict hardly better than four."""

_ID_BITS = 24
"""Ids of an n-gram are packed into one number: a third of a tuple's memory, and one hash."""


class NgramIndex:
    """The tokens of one sequence, prompt and answer, and where each of their n-grams last ended.

    Time and memory are a constant per token: three entries of a map, at most 300 bytes. A long prompt can
    be given in parts.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("i")
        self._last_end: dict[int, dict[int, int]] = {size: {} for size in _SIZES}
        self._match_end: dict[int, int | None] = dict.fromkeys(_SIZES)
        """By size: where the n-gram at the end of the text ended before."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new_tokens: Iterable[int]) -> None:
        """Adds tokens that are certain; they cannot be removed again, so drafts must not be added."""
        tokens = self._tokens
        for token in new_tokens:
            tokens.append(token)
            end = len(tokens)
            key = token
            for size in _SIZES:
                if end < size:
                    break
                key = key << _ID_BITS | tokens[end - size]
                # Looked up before it is added, so that the match is an earlier one.
                self._match_end[size] = self._last_end[size].get(key)
                self._last_end[size][key] = end

    @property
    def match_length(self) -> int:
        """How many of the last tokens (4, 3 or 2) also occur earlier in the text; 0 if none do."""
        return next((size for size in reversed(_SIZES) if self._match_end[size] is not None), 0)

    def propose(self, depth: int) -> tuple[int, ...]:
        """What followed the latest match of the greatest length, `depth` tokens of it; empty if there is no match.

        Where the match runs into the end of the text, it continues with what it proposed: the text is periodic there.
        """
        end = self._match_end.get(self.match_length)
        if end is None:
            return ()
        period = len(self._tokens) - end
        followers = self._tokens[end : end + depth]
        return tuple(followers[i % period] for i in range(depth))
