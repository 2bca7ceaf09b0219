"""Everything between the model's logits and the sampler: penalties, biases, banned tokens, grammar masks, logprobs.

Host side and per sequence, a `LogitsRules` follows the sequence's tokens and gives an `Adjustment` for each of its next
rows, drafts included. `apply_adjustments` carries them out on the device, and `RowLogprobs` computes log-probabilities
from the logits before that. Row i's adjustment assumes that the drafts before it are accepted, so a token is sampled
from the same logits whether drafts came with it or not.

Torch is imported by the functions that touch tensors: the server's process imports this module and never loads torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onebox.engine.grammar.constraint import Constraint
from onebox.engine.logprobs import LogprobRows, TokenLogprob
from onebox.engine.request import SamplingParams
from onebox.spec.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from onebox.engine.step import DecodeRows

__all__ = ["Adjustment", "Bias", "LogitsRules", "Penalties", "RowLogprobs", "allow_all", "apply_adjustments"]

Ids = NDArray[np.int64]
Mask = NDArray[np.int32]

_MASK_BITS = 32
_NARROW = 2048
"""Rows with at most so many penalised tokens are sent to the device together."""

_TOGETHER = 8
"""Rows whose log-probabilities are computed at once: 70 bytes for each of a row's tokens, at 250,000 tokens 17 MB."""
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
class Bias:
    """What is added to the logits of some distinct tokens."""

    token_ids: Ids
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Adjustment:
    """What is done to one row's logits, in this order."""

    penalties: Penalties | None
    bias: Bias | None
    banned: Ids
    mask: Mask | None
    """Bit i of word w is 1 where token 32 w + i may be sampled."""


_NO_IDS: Ids = np.empty(0, dtype=np.int64)


@lru_cache(maxsize=2)
def _distinct(token_ids: tuple[int, ...]) -> tuple[Ids, dict[int, int]]:
    """The distinct tokens and the place of each; several answers to one prompt share them."""
    ids = np.unique(np.array(token_ids, dtype=np.int64))
    return ids, {token_id: place for place, token_id in enumerate(ids.tolist())}


class _Occurrences:
    """The distinct tokens of a sequence with the number of times each occurs in the answer.

    Arrays that grow with the answer, so that a step copies them and walks over neither prompt nor vocabulary.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        """Starts with tokens that occur in the prompt."""
        ids, places = _distinct(token_ids)
        self._ids, self._places = ids.copy(), places.copy()
        self._counts = np.zeros(len(ids), dtype=np.int64)

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int64)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def after(self, drafts: tuple[int, ...]) -> tuple[Ids, Ids]:
        """(tokens, counts) of the sequence with these drafts appended."""
        size = len(self._places)
        token_ids, counts = self._ids[:size], self._counts[:size].copy()
        unseen = []
        for draft in drafts:
            place = self._places.get(draft)
            if place is None:
                unseen.append(draft)
            else:
                counts[place] += 1
        if unseen:
            distinct, times = np.unique(np.array(unseen, dtype=np.int64), return_counts=True)
            token_ids, counts = np.concatenate([token_ids, distinct]), np.concatenate([counts, times])
        return token_ids, counts


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
        self._stop_token_ids = np.array(sorted(stop_token_ids), dtype=np.int64)
        self._constraint = constraint
        self._bias = _bias_of(sampling.logit_bias)
        is_penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        # Only the repetition penalty counts what is in the prompt alone.
        counted = prompt if sampling.repetition_penalty != 1 else ()
        self._occurrences = _Occurrences(counted) if is_penalised else None
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

    def catch_up(self) -> None:
        """Does what can wait until the device computes."""
        if self._constraint:
            self._constraint.catch_up()

    def finish(self, sampled: tuple[int, ...]) -> None:
        """Called with the tokens that end the answer, instead of `advance`; raises if it broke a grammar's limits."""
        if self._constraint:
            self._constraint.finish(sampled)

    def adjust(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Adjustment, ...]]:
        """(the drafts that the grammar allows, the adjustments of the row before them and of each draft's own row).

        No adjustments at all where none of the rows needs one. Drafts end before a row that has no adjustment: what
        fails after a draft may never be reached.
        """
        is_early = self._num_sampled < self._sampling.min_tokens
        if not (self._constraint or self._occurrences or self._bias or is_early):
            return drafts, ()
        masks: tuple[Mask | None, ...]
        if self._constraint:
            drafts, masks = self._constraint.masks_for(drafts)
        else:
            masks = (None,) * (1 + len(drafts))
        adjustments = [self._adjustment((), masks[0])]
        for place, mask in enumerate(masks[1:], start=1):
            try:
                adjustments.append(self._adjustment(drafts[:place], mask))
            except Exception:
                break
        return drafts[: len(adjustments) - 1], tuple(adjustments)

    def _adjustment(self, before: tuple[int, ...], mask: Mask | None) -> Adjustment:
        sampling = self._sampling
        banned = self._stop_token_ids if self._num_sampled + len(before) < sampling.min_tokens else _NO_IDS
        if mask is not None and not mask.any():
            raise UnsupportedError("The grammar allows no token at all after what was answered so far: change it.")
        if mask is not None and len(banned) and not _without(mask, banned).any():
            banned = _NO_IDS  # a grammar that allows only end tokens takes precedence over min_tokens
        penalties = None
        if self._occurrences:
            token_ids, counts = self._occurrences.after(before)
            penalties = Penalties(
                token_ids, counts, sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
            )
        return Adjustment(penalties, self._bias, banned, mask)


def _bias_of(pairs: tuple[tuple[int, float], ...]) -> Bias | None:
    """A token that is named twice gets both."""
    if not pairs:
        return None
    token_ids, places = np.unique(np.array([token_id for token_id, _ in pairs], dtype=np.int64), return_inverse=True)
    values = np.zeros(len(token_ids))
    np.add.at(values, places, np.array([value for _, value in pairs], dtype=np.float64))
    return Bias(token_ids, values.astype(np.float32))


def _without(mask: Mask, token_ids: Ids) -> NDArray[np.uint32]:
    words = mask.view(np.uint32).copy()
    np.bitwise_and.at(words, token_ids // _MASK_BITS, ~(np.uint32(1) << (token_ids % _MASK_BITS).astype(np.uint32)))
    return words


# Carrying it out: on the device, all rows of a step at once.


def apply_adjustments(logits: "Tensor", parts: "Sequence[DecodeRows]") -> dict[int, Exception]:
    """Changes logits float32 [R, V] in place by the adjustments of the parts' draws; their rows are consecutive.

    Returns the rows whose adjustments could not be applied, each with its error: no token of theirs may be used.
    """
    if not any(part.draw.adjustments for part in parts):
        return {}
    rows: dict[int, Adjustment] = {}
    failed: dict[int, Exception] = {}
    first = 0
    for part in parts:
        for row, adjustment in enumerate(part.draw.adjustments, start=first + part.draw.first_new):
            if _fits(adjustment, logits.shape[1]):
                rows[row] = adjustment
            else:
                failed[row] = ValueError("its grammar or its biases are not those of this model's vocabulary")
        first += len(part.token_ids)
    _penalise(logits, {row: adjustment.penalties for row, adjustment in rows.items() if adjustment.penalties})
    _bias(logits, {row: adjustment.bias for row, adjustment in rows.items() if adjustment.bias})
    _ban(logits, {row: adjustment.banned for row, adjustment in rows.items() if len(adjustment.banned)})
    _mask(logits, {row: adjustment.mask for row, adjustment in rows.items() if adjustment.mask is not None})
    return failed


def _fits(adjustment: Adjustment, vocab_size: int) -> bool:
    """Whether it names tokens of the vocabulary only. On a GPU, one beyond it would end the process."""
    named = [adjustment.banned]
    if adjustment.bias:
        named.append(adjustment.bias.token_ids)
    if adjustment.penalties:
        named.append(adjustment.penalties.token_ids)
    has_all = all(ids.min() >= 0 and ids.max() < vocab_size for ids in named if len(ids))
    return has_all and (adjustment.mask is None or adjustment.mask.shape == (-(-vocab_size // _MASK_BITS),))


def _penalise(logits: "Tensor", rows: dict[int, Penalties]) -> None:
    # A row is padded to the widest of its group: one with a long prompt must not widen the others.
    narrow = {row: penalties for row, penalties in rows.items() if len(penalties.token_ids) <= _NARROW}
    if narrow:
        _penalise_together(logits, narrow)
    for row, penalties in rows.items():
        if row not in narrow:
            _penalise_together(logits[row : row + 1], {0: penalties})


def _penalise_together(logits: "Tensor", rows: dict[int, Penalties]) -> None:
    import torch

    from onebox.kernels.sampling import apply_penalties

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


def _bias(logits: "Tensor", rows: dict[int, Bias]) -> None:
    import torch

    if rows:
        index = _places({row: bias.token_ids for row, bias in rows.items()}, logits)
        values = np.concatenate([bias.values for bias in rows.values()])
        logits.index_put_(index, torch.from_numpy(values).to(logits.device), accumulate=True)


def _ban(logits: "Tensor", rows: dict[int, Ids]) -> None:
    if rows:
        logits[_places(rows, logits)] = float("-inf")


def _places(rows: dict[int, Ids], logits: "Tensor") -> "tuple[Tensor, Tensor]":
    """The rows and columns of these tokens of these rows, on the logits' device."""
    import torch

    row_ids = np.repeat(np.array(list(rows), dtype=np.int64), [len(token_ids) for token_ids in rows.values()])
    token_ids = np.concatenate(list(rows.values()))
    return torch.from_numpy(row_ids).to(logits.device), torch.from_numpy(token_ids).to(logits.device)


def _mask(logits: "Tensor", rows: dict[int, Mask]) -> None:
    import torch

    from onebox.kernels.sampling import apply_mask

    if rows:
        words = np.full((len(logits), -(-logits.shape[1] // _MASK_BITS)), -1, dtype=np.int32)
        for row, mask in rows.items():
            words[row] = mask
        apply_mask(logits, torch.from_numpy(words).to(logits.device))


def allow_all(logits: "Tensor") -> None:
    """A grammar's mask that changes no logit of the first row."""
    _mask(logits, {0: np.full(-(-logits.shape[1] // _MASK_BITS), -1, dtype=np.int32)})


# Log-probabilities under the model itself.


class RowLogprobs:
    """Log-probabilities of rows of logits, taken before the logits are adjusted."""

    def __init__(self, logits: "Tensor") -> None:
        """Logits float32 [n, V]."""
        import torch
        from torch.nn.functional import pad

        self._vocab_size = logits.shape[1]
        missing = -logits.shape[1] % _ALIGNED

        def log_softmax(rows: "Tensor") -> "Tensor":
            return torch.log_softmax(pad(rows.to(torch.float64), (0, missing), value=float("-inf")), dim=-1)

        self._values = torch.cat([log_softmax(rows) for rows in torch.split(logits, _TOGETHER)])

    def of(self, rows: list[int], token_ids: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """The logprobs of one token in each of these rows, with `num_top` alternatives each.

        Raises FloatingPointError where the logits are not numbers.
        """
        own, ranks, top_ids, top_values = (found.tolist() for found in self._found(rows, token_ids, num_top))
        return tuple(
            TokenLogprob(token_id, value, rank, tuple(zip(alternatives, their_values, strict=True)))
            for token_id, value, rank, alternatives, their_values in zip(
                token_ids, own, ranks, top_ids, top_values, strict=True
            )
        )

    def rows_of(self, rows: list[int], token_ids: list[int], num_top: int) -> LogprobRows:
        """The same as arrays."""
        own, ranks, top_ids, top_values = (found.cpu().numpy() for found in self._found(rows, token_ids, num_top))
        ids = np.array(token_ids, np.int32)
        return LogprobRows(ids, own, ranks.astype(np.int32), top_ids.astype(np.int32), top_values)

    def _found(self, rows: list[int], token_ids: list[int], num_top: int) -> tuple["Tensor", ...]:
        """Logprobs and ranks [n] of the tokens, ids and logprobs [n, num_top] of the likeliest.

        Rounded to float32: the model has no more digits than that.
        """
        import torch

        groups = [
            self._found_together(rows[start : start + _TOGETHER], token_ids[start : start + _TOGETHER], num_top)
            for start in range(0, len(rows), _TOGETHER)
        ]
        return tuple(map(torch.cat, zip(*groups, strict=True)))

    def _found_together(self, rows: list[int], token_ids: list[int], num_top: int) -> tuple["Tensor", ...]:
        import torch

        values = self._values[rows, : self._vocab_size]
        tokens = torch.tensor(token_ids, device=values.device)
        own = values.gather(1, tokens[:, None])
        if bool(own.isnan().any()):
            raise FloatingPointError("its logits are not finite numbers")
        # Of equal logits the lower id ranks first, as in the sampler.
        is_lower = torch.arange(self._vocab_size, device=values.device) < tokens[:, None]
        is_ahead = (values > own) | ((values == own) & is_lower)
        return own[:, 0].float(), is_ahead.sum(-1) + 1, *_likeliest(values, min(num_top, self._vocab_size))


def _likeliest(values: "Tensor", num_top: int) -> "tuple[Tensor, Tensor]":
    """(ids, values as float32) [n, num_top] of the tokens of each row of values [n, V] that rank first.

    Without sorting the row: on a CPU that would take seconds for a chunk of a prompt.
    """
    import torch

    # With all that equal the last of them: which of these rank first is for the ids to say.
    least = values.topk(num_top, dim=-1).values[:, -1:] if num_top else values.new_full((len(values), 1), torch.inf)
    places = (values >= least).nonzero()
    rows, ids = places.cpu().numpy().T
    found = values[places[:, 0], places[:, 1]].cpu().numpy()
    ranked = np.lexsort((ids, -found, rows))
    first = np.searchsorted(rows, np.arange(len(values)))[:, None] + np.arange(num_top)
    return torch.from_numpy(ids[ranked][first]), torch.from_numpy(found[ranked][first].astype(np.float32))
