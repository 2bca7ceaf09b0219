"""Everything between the model's logits and the sampler: penalties, biases, banned tokens, grammar masks, logprobs.

Host side and per sequence, a `LogitsRules` follows the sequence's tokens and gives an `Adjustment` for each of its next
rows, drafts included. `apply_adjustments` carries them out on the device, and `RowLogprobs` computes log-probabilities
from the logits before that. Row i's adjustment assumes that the drafts before it are accepted, so a token is sampled
from the same logits whether drafts came with it or not.

Torch is imported by the functions that touch tensors: the server's process imports this module and never loads torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onebox.engine.grammar.constraint import Constraint
from onebox.engine.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from onebox.engine.step import DecodeRows

__all__ = ["Adjustment", "LogitsRules", "Penalties", "RowLogprobs", "apply_adjustments"]

Ids = NDArray[np.int64]
Mask = NDArray[np.int32]

_MASK_BITS = 32
_ALIGNED = 64
"""Logprob rows are padded to a multiple of this, so that every row is summed in the same order wherever it lies."""


# What is to be done: on the host, per sequence.


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
    mask: Mask | None
    """Bit i of word w is 1 where token 32 w + i may be sampled."""


class _Occurrences:
    """The distinct tokens of a sequence with the number of times each occurs in the answer."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._counts = dict.fromkeys(prompt, 0)

    def add(self, token_id: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def after(self, drafts: tuple[int, ...]) -> tuple[Ids, Ids]:
        """(tokens, counts) of the sequence with these drafts appended."""
        counts = dict(self._counts) if drafts else self._counts
        for token_id in drafts:
            counts[token_id] = counts.get(token_id, 0) + 1
        return np.fromiter(counts.keys(), np.int64, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))


class LogitsRules:
    """One sequence's penalties, biases, banned tokens and grammar, advanced with its tokens."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: tuple[int, ...],
        stop_token_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._sampling = sampling
        self._stop_token_ids = tuple(sorted(stop_token_ids))
        self._constraint = constraint
        is_penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        self._occurrences = _Occurrences(prompt) if is_penalised else None
        self._num_sampled = 0

    def constrain(self, constraint: Constraint) -> None:
        """Holds the answer to a grammar, before its first token."""
        self._constraint = constraint

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Adds tokens of the answer."""
        self._num_sampled += len(token_ids)
        if self._occurrences:
            for token_id in token_ids:
                self._occurrences.add(token_id)
        if self._constraint:
            for token_id in token_ids:
                self._constraint.advance(token_id)

    def adjust(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Adjustment, ...]]:
        """(the drafts that the grammar allows, the adjustments of the row before them and of each draft's own row).

        No adjustments at all where none of the rows needs one.
        """
        is_early = self._num_sampled < self._sampling.min_tokens
        if not (self._constraint or self._occurrences or self._sampling.logit_bias or is_early):
            return drafts, ()
        masks: tuple[Mask | None, ...]
        if self._constraint:
            drafts, masks = self._constraint.masks_for(drafts)
        else:
            masks = (None,) * (1 + len(drafts))
        return drafts, tuple(self._adjustment(drafts[:place], mask) for place, mask in enumerate(masks))

    def _adjustment(self, before: tuple[int, ...], mask: Mask | None) -> Adjustment:
        sampling = self._sampling
        banned = self._stop_token_ids if self._num_sampled + len(before) < sampling.min_tokens else ()
        if mask is not None and banned and not _without(mask, banned).any():
            banned = ()  # a grammar that allows only end tokens takes precedence over min_tokens
        penalties = None
        if self._occurrences:
            token_ids, counts = self._occurrences.after(before)
            penalties = Penalties(
                token_ids, counts, sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
            )
        return Adjustment(penalties, sampling.logit_bias, banned, mask)


def _without(mask: Mask, token_ids: tuple[int, ...]) -> NDArray[np.uint32]:
    words = mask.view(np.uint32).copy()
    for token_id in token_ids:
        words[token_id // _MASK_BITS] &= np.uint32(~(1 << token_id % _MASK_BITS) & 0xFFFFFFFF)
    return words


# Carrying it out: on the device, all rows of a step at once.


def apply_adjustments(logits: "Tensor", parts: "Sequence[DecodeRows]") -> None:
    """Changes logits float32 [R, V] in place by the adjustments of the parts' draws; their rows are consecutive."""
    if not any(part.draw.adjustments for part in parts):
        return
    rows: dict[int, Adjustment] = {}
    first = 0
    for part in parts:
        rows.update(enumerate(part.draw.adjustments, start=first + part.draw.first_new))
        first += len(part.token_ids)
    _penalise(logits, {row: adjustment.penalties for row, adjustment in rows.items() if adjustment.penalties})
    _bias(logits, {row: adjustment.bias for row, adjustment in rows.items() if adjustment.bias})
    _ban(logits, {row: adjustment.banned for row, adjustment in rows.items() if adjustment.banned})
    _mask(logits, {row: adjustment.mask for row, adjustment in rows.items() if adjustment.mask is not None})


def _penalise(logits: "Tensor", rows: dict[int, Penalties]) -> None:
    import torch

    from onebox.kernels.sampling import apply_penalties

    if not rows:
        return
    widest = max(len(penalties.token_ids) for penalties in rows.values())
    token_ids = np.full((len(logits), widest), -1, dtype=np.int64)
    counts = np.zeros((len(logits), widest), dtype=np.int64)
    # Rows without penalties get values that change nothing.
    strengths = np.tile([0.0, 0.0, 1.0], (len(logits), 1))
    for row, penalties in rows.items():
        token_ids[row, : len(penalties.token_ids)] = penalties.token_ids
        counts[row, : len(penalties.counts)] = penalties.counts
        strengths[row] = penalties.presence, penalties.frequency, penalties.repetition
    ids, numbers, factors = (torch.from_numpy(part).to(logits.device) for part in (token_ids, counts, strengths.T))
    apply_penalties(logits, ids, numbers, *(factor.contiguous() for factor in factors))


def _bias(logits: "Tensor", rows: dict[int, tuple[tuple[int, float], ...]]) -> None:
    import torch

    if rows:
        places = [(row, token_id) for row, pairs in rows.items() for token_id, _ in pairs]
        values = [value for pairs in rows.values() for _, value in pairs]
        index = torch.tensor(places, device=logits.device).T
        added = torch.tensor(values, dtype=torch.float32, device=logits.device)
        # A token that is named twice gets both.
        logits.index_put_((index[0], index[1]), added, accumulate=True)


def _ban(logits: "Tensor", rows: dict[int, tuple[int, ...]]) -> None:
    import torch

    if rows:
        places = [(row, token_id) for row, banned in rows.items() for token_id in banned]
        index = torch.tensor(places, device=logits.device).T
        logits[index[0], index[1]] = float("-inf")


def _mask(logits: "Tensor", rows: dict[int, Mask]) -> None:
    import torch

    from onebox.kernels.sampling import apply_mask

    if rows:
        words = np.full((len(logits), -(-logits.shape[1] // _MASK_BITS)), -1, dtype=np.int32)
        for row, mask in rows.items():
            words[row] = mask
        apply_mask(logits, torch.from_numpy(words).to(logits.device))


# Log-probabilities under the model itself.


class RowLogprobs:
    """Log-probabilities of rows of logits, taken before the logits are adjusted."""

    def __init__(self, logits: "Tensor") -> None:
        """Logits float32 [n, V]."""
        import torch
        from torch.nn.functional import pad

        self._vocab_size = logits.shape[1]
        padded = pad(logits.to(torch.float64), (0, -logits.shape[1] % _ALIGNED), value=float("-inf"))
        self._values = torch.log_softmax(padded, dim=-1)

    def of(self, rows: list[int], token_ids: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """The logprobs of one token in each of these rows, with `num_top` alternatives each."""
        import torch

        values = self._values[rows, : self._vocab_size]
        tokens = torch.tensor(token_ids, device=values.device)
        own = values.gather(1, tokens[:, None])
        # Of equal logits the lower id ranks first, as in the sampler.
        is_lower = torch.arange(self._vocab_size, device=values.device) < tokens[:, None]
        is_ahead = (values > own) | ((values == own) & is_lower)
        ranks = (is_ahead.sum(-1) + 1).tolist()
        likeliest, ids = values.sort(dim=-1, descending=True, stable=True)
        top_values, top_ids = _floats(likeliest[:, :num_top]), ids[:, :num_top].tolist()
        return tuple(
            TokenLogprob(token_id, value, rank, tuple(zip(alternatives, their_values, strict=True)))
            for token_id, value, rank, alternatives, their_values in zip(
                token_ids, _floats(own[:, 0]), ranks, top_ids, top_values, strict=True
            )
        )


def _floats(values: "Tensor") -> list:  # type: ignore[type-arg]
    """Python numbers, rounded to float32: the model has no more digits than that."""
    result: list = values.float().tolist()  # type: ignore[type-arg]
    return result
