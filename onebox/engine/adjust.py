"""What happens to a row's logits before a token is drawn: penalties, biases, banned tokens, the grammar's mask.

Host side and per sequence: an `Adjuster` follows the sequence's tokens and says for its next rows, drafts included,
what is to be done. The runner does it. Row i's adjustment is that of a sequence in which the drafts before it stand, so
a token is drawn alike whether drafts came with it or not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onebox.engine.constraint import Constraint
from onebox.engine.request import SamplingParams

__all__ = ["Adjuster", "Adjustment", "Penalties"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Penalties:
    """As `onebox.kernels.sampling.apply_penalties` takes them."""

    token_ids: Ids
    counts: Ids
    presence: float
    frequency: float
    repetition: float


@dataclass(frozen=True)
class Adjustment:
    """What is done to one row's logits, in this order."""

    penalties: Penalties | None
    bias: tuple[tuple[int, float], ...]
    banned: tuple[int, ...]
    mask: NDArray[np.int32] | None
    """Bit i of word w is 1 where token 32 w + i may be drawn."""


class _Occurrences:
    """The distinct tokens of a sequence with the number of times each stands in the answer."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._counts = dict.fromkeys(prompt, 0)

    def add(self, token_id: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def after(self, drafts: tuple[int, ...]) -> tuple[Ids, Ids]:
        """(tokens, counts) of the sequence with these drafts at its end."""
        counts = dict(self._counts) if drafts else self._counts
        for token_id in drafts:
            counts[token_id] = counts.get(token_id, 0) + 1
        return np.fromiter(counts.keys(), np.int64, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))


class Adjuster:
    """One sequence's rules over its logits."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: tuple[int, ...],
        stop_token_ids: frozenset[int],
        constraint: Constraint | None,
    ) -> None:
        self._sampling = sampling
        self._stop_token_ids = tuple(sorted(stop_token_ids))
        self._constraint = constraint
        is_penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        self._occurrences = _Occurrences(prompt) if is_penalised else None
        self._num_made = 0

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Takes in tokens of the answer."""
        self._num_made += len(token_ids)
        if self._occurrences:
            for token_id in token_ids:
                self._occurrences.add(token_id)
        if self._constraint:
            for token_id in token_ids:
                self._constraint.advance(token_id)

    def rows(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Adjustment, ...]]:
        """The drafts that may stand, and what is done to the row before the first and to each one's own row.

        No adjustments at all where none of the rows needs one.
        """
        is_early = self._num_made < self._sampling.min_tokens
        if not (self._constraint or self._occurrences or self._sampling.logit_bias or is_early):
            return drafts, ()
        masks: tuple[NDArray[np.int32] | None, ...]
        if self._constraint:
            drafts, masks = self._constraint.masks_for(drafts)
        else:
            masks = (None,) * (1 + len(drafts))
        return drafts, tuple(self._row(drafts[:place], mask) for place, mask in enumerate(masks))

    def _row(self, before: tuple[int, ...], mask: NDArray[np.int32] | None) -> Adjustment:
        sampling = self._sampling
        banned = self._stop_token_ids if self._num_made + len(before) < sampling.min_tokens else ()
        if mask is not None and banned and not _without(mask, banned).any():
            banned = ()  # a grammar that allows nothing but the end goes before min_tokens
        penalties = None
        if self._occurrences:
            token_ids, counts = self._occurrences.after(before)
            penalties = Penalties(
                token_ids, counts, sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
            )
        return Adjustment(penalties, sampling.logit_bias, banned, mask)


def _without(mask: NDArray[np.int32], token_ids: tuple[int, ...]) -> NDArray[np.uint32]:
    words = mask.view(np.uint32).copy()
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    return words
