"""Places of a decode step's tokens as plain integers, from which the twin and the CPU form build index tensors."""

from itertools import pairwise
from typing import NamedTuple

__all__ = ["TokenPlaces", "place_tokens"]


class TokenPlaces(NamedTuple):
    """Tokens of S sequences in one rectangle: accepted tokens first, new tokens of all sequences from one column on.

        conv_rows  pending              new                      K: most accepted tokens of a sequence
        - - -      . . . k k k          n n n n .                N: most rows that a sequence has

    A sequence with fewer accepted tokens is padded on the left, one with fewer rows on the right; `.` is never read.
    """

    alive: list[int]  # [S]: the sequences that have rows or accepted tokens
    most_accepted: int  # K
    num_new: int  # N
    rows: list[list[int]]  # [S, taps - 1 + K + N], into conv rows [S * (taps - 1)], pending [S * K], new rows [R]
    gates: list[list[int]]  # [S, K + N], into pending gates [S * K], new gates [R]
    filled: list[list[bool]] | None  # [S, K + N]: padded places (on the left), None if there are none
    new: list[tuple[int, int]]  # [R]: each new row's sequence (0..S-1) and its index in that sequence


def place_tokens(edges: tuple[int, ...], num_accepted: tuple[int, ...], taps: int) -> TokenPlaces:
    """Places of a step: sequence s has the rows edges[s]..edges[s + 1] and num_accepted[s] accepted tokens."""
    counts = [end - first for first, end in pairwise(edges)]
    alive = [s for s, (count, accepted) in enumerate(zip(counts, num_accepted, strict=True)) if count or accepted]
    most_accepted, num_new = (max((numbers[s] for s in alive), default=0) for numbers in (num_accepted, counts))
    num_before, num_pending = len(alive) * (taps - 1), len(alive) * most_accepted
    rows, gates, filled = [], [], []
    for index, s in enumerate(alive):
        first_row, first_pending = index * (taps - 1), index * most_accepted
        left, right = most_accepted - num_accepted[s], num_new - counts[s]
        # Padding indexes the same sequence, so that a NaN does not reach another sequence.
        new = range(num_pending + edges[s], num_pending + edges[s + 1])
        own = [*range(first_pending, first_pending + num_accepted[s]), *new]
        gates.append([own[0]] * left + own + [own[0]] * right)
        conv = list(range(first_row, first_row + taps - 1))
        rows.append([first_row] * left + conv + [num_before + place for place in own] + [first_row] * right)
        filled.append([place < left for place in range(most_accepted + num_new)])
    is_filled = any(num_accepted[s] < most_accepted for s in alive)
    places = [(index, place) for index, s in enumerate(alive) for place in range(counts[s])]
    return TokenPlaces(alive, most_accepted, num_new, rows, gates, filled if is_filled else None, places)
