"""N-gram drafts: what followed the last earlier occurrence of the sequence's last tokens.

Costs no step of the model. Serves texts that repeat themselves or their prompt: code under edit, quotes, tables, JSON.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NgramIndex"]

_SIZES = (2, 3, 4, 8, 16, 32)
_HALVES = (2, 4, 8, 16)
"""A match of one token predicts little. A long one is a copy: of several places it tells the one that is copied."""

_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
"""The key of an n-gram is a hash of 64 bits: two that share one would give a wrong draft, which is rejected."""
_DOUBLED = {2 * half: pow(_FACTOR, half, 2**64) for half in _HALVES}
"""By size: what the key of its last half is multiplied by before that of its first half is added."""


class _Ends(NamedTuple):
    """Where each n-gram of one size last ended in a text: its keys in rising order, and the ends beside them."""

    keys: "array[int]"
    ends: "array[int]"
    previous_end: int | None
    """Where the n-gram at the end of the text ended before."""

    def find(self, key: int) -> int | None:
        place = bisect_left(self.keys, key)
        return self.ends[place] if place < len(self.keys) and self.keys[place] == key else None


class NgramIndex:
    """The tokens of one sequence, prompt and answer, and where each of their n-grams last ended.

    The tokens given at first are indexed at once, by sorting, which takes 0.1 s for 256K tokens and leaves the
    interpreter to others meanwhile. Time and memory of those added later are a constant per token: six entries of a
    map.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        prompt = tuple(tokens)
        self._tokens = array("i", prompt)
        self._in_prompt = _index(prompt)
        self._last_end: dict[int, dict[int, int]] = {size: {} for size in _SIZES}
        """Of the n-grams that end after the prompt."""
        self._match_end = {size: ends.previous_end for size, ends in self._in_prompt.items()}
        """By size: where the n-gram at the end of the text ended before."""
        self.match_length = self._longest_match()
        """How many of the last tokens (32, 16, 8, 4, 3 or 2) also occur earlier in the text; 0 if none do."""
        self._recent: dict[int, deque[int]] = {half: deque(maxlen=half + 1) for half in _HALVES}
        """By size: the keys of the n-grams that end at the latest places, which those of twice the size are made of."""
        for place in range(max(0, len(prompt) - max(_SIZES)), len(prompt)):
            self._keys(place + 1)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new_tokens: Iterable[int]) -> None:
        """Adds tokens that are certain; they cannot be removed again, so drafts must not be added."""
        for token in new_tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            is_found = True
            for size, key in self._keys(end):
                # Looked up before it is added, so that the match is an earlier one. Without a shorter one there is no
                # longer one.
                found = self._last_end[size].get(key) if is_found else None
                if is_found and found is None:
                    found = self._in_prompt[size].find(key)
                self._match_end[size] = found
                is_found = found is not None
                self._last_end[size][key] = end
        self.match_length = self._longest_match()

    def _keys(self, end: int) -> list[tuple[int, int]]:
        """(size, key) of the n-grams that end at `end`; called once for each place, in order."""
        tokens, keys = self._tokens, list[tuple[int, int]]()
        key = tokens[end - 1]
        for size in _SIZES:
            if end < size:
                break
            recent = self._recent.get(size // 2) if size > 3 else None
            if recent is None:
                key = (key * _FACTOR + tokens[end - size]) & _MASK
            elif len(recent) > size // 2:
                key = (recent[-1] * _DOUBLED[size] + recent[0]) & _MASK
            else:
                break
            keys.append((size, key))
            if size in self._recent:
                self._recent[size].append(key)
        return keys

    def _longest_match(self) -> int:
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


@lru_cache(maxsize=2)
def _index(prompt: tuple[int, ...]) -> dict[int, _Ends]:
    """By size. Several answers to one prompt share it."""
    tokens = np.array(prompt, dtype=np.uint64)
    keys, index = {1: tokens}, dict[int, _Ends]()
    for size in _SIZES:
        # The key of the n-gram that ends at each place, from two of half its size or one that is a token shorter.
        half = size // 2 if size in _DOUBLED else 1
        longer, count = keys[size - half], max(0, len(tokens) - size + 1)
        factor = np.uint64(_DOUBLED.get(size, _FACTOR))
        keys[size] = longer[half:][:count] * factor + keys[half][:count]
        index[size] = _last_ends(keys[size], size)
    return index


def _last_ends(keys: NDArray[np.uint64], size: int) -> _Ends:
    """Of n-grams whose keys come in the order of their places; the first one ends after `size` tokens."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    same = np.flatnonzero(keys == keys[-1]) if len(keys) else order
    return _Ends(
        array("Q", ordered[is_last].tobytes()),
        array("i", (order[is_last] + size).astype(np.int32).tobytes()),
        int(same[-2]) + size if len(same) > 1 else None,
    )
