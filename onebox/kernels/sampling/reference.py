"""The twins of sampling."""

import torch
from torch import Tensor

__all__ = ["apply_mask", "apply_penalties", "gumbel", "sample", "sample_drafts"]

_SHARE_BITS = 44
"""A share is a token's probability relative to the most likely token's, in fixed point, exact to 2^-44. The sum of
fewer than 2^19 shares is below 2^63 and exact, so it is the same in every order, which a kernel needs."""

_NO_LIMIT = torch.iinfo(torch.int64).max

# SplitMix64 on signed words: torch has no unsigned arithmetic, and signed multiplication and addition wrap alike.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """The token of each row, int64 [R]: argmax of logits / temperature + Gumbel noise over the kept tokens.

    logits [R, V] float32, V below 2^19; the token is -1 for a row with a NaN, with +inf or with only -inf.
    temperature, top_p and min_p [R] are floats (float64 for exactly the host's numbers), top_k [R] integers, seeds and
    positions [R] int64. Temperature 0 is greedy: no noise, no limits. In order of falling logit, then rising id, the
    kept tokens are the first top_k (0: all), of those the fewest with a total probability of at least top_p (1: all),
    of those the ones at least min_p times as likely as the most likely one (0: all). Ties go to the lowest id.
    """
    limits = temperature, top_k, top_p, min_p
    return _sample(logits, limits, seeds, positions, torch.arange(logits.shape[1]))


def sample_drafts(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    """`sample` for drafts: every top_k is 1 to 64, and the token is 0 where nothing can be sampled.

    With token_ids int64 [V], column i of the logits is that of token token_ids[i]: its noise is that token's, so that a
    draft is the token that the model draws, and the result has token ids. Ties then go to the lowest column.
    """
    limits = temperature, top_k, top_p, min_p
    if token_ids is None:
        return sample(logits, *limits, seeds, positions).clamp(min=0)
    columns = _sample(logits, limits, seeds, positions, token_ids)
    return torch.where(columns < 0, 0, token_ids[columns.clamp(min=0)])


def _sample(logits: Tensor, limits: tuple[Tensor, ...], seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The column of each row; -1 where there is none."""
    is_drawn = limits[0] > 0
    likeliest, columns = logits.max(-1)
    if is_drawn.any():
        parts = [part[is_drawn] for part in (logits, *limits, seeds, positions)]
        columns[is_drawn] = _drawn(token_ids, *parts)
    return columns.masked_fill(~likeliest.isfinite(), -1)


def _drawn(
    token_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """The columns of rows with a temperature other than 0."""
    scores = logits.to(torch.float64) / temperature.to(torch.float64).unsqueeze(-1)
    values = scores + gumbel(seeds, positions, token_ids)
    is_cut = (top_k > 0) | (top_p < 1) | (min_p > 0)
    kept = _kept(scores[is_cut], top_k[is_cut], top_p[is_cut], min_p[is_cut])
    values[is_cut] = values[is_cut].masked_fill(~kept, float("-inf"))
    return values.argmax(-1)


def _kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens of scores [R, V] the limits [R] keep: bool [R, V]."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[1])
    kept = (top_k <= 0).unsqueeze(-1) | (places < top_k.unsqueeze(-1))
    shares = ((ordered - ordered[:, :1]).exp() * 2.0**_SHARE_BITS).to(torch.int64) * kept
    target = (top_p.to(torch.float64) * shares.sum(-1).to(torch.float64)).ceil().to(torch.int64)
    target = target.masked_fill(top_p >= 1, _NO_LIMIT)
    before = shares.cumsum(-1) - shares
    least = min_p.to(torch.float64) * 2.0**_SHARE_BITS
    kept &= (before < target.unsqueeze(-1)) & (shares.to(torch.float64) >= least.unsqueeze(-1))
    return torch.zeros_like(kept).scatter(1, order, kept)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [R, V], from (seed, position) [R] and each token, int64 [V]."""
    # The seed is hashed first, then the position, so that neighbouring seeds or positions share no run of the sequence.
    start = _mix(_mix(seeds) ^ positions)
    bits = _mix(start.unsqueeze(-1) + (token_ids + 1) * _GOLDEN)
    uniform = (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _FIRST_FACTOR
    x = (x ^ _shift_right(x, 27)) * _SECOND_FACTOR
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift of a 64-bit word: zeros are shifted in from the left."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def apply_penalties(
    logits: Tensor, token_ids: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Penalises tokens that occurred, in place in logits [R, V] float32.

    token_ids [R, N]: the distinct tokens of each row's prompt and answer, -1 if a row has fewer than N; counts [R, N]:
    occurrences of each in the answer, 0 if it is only in the prompt. Floats [R]: positive logits are divided and others
    multiplied by repetition (1: off), then frequency times the count is subtracted, then presence where the count is
    not 0.
    """
    row, place = (token_ids >= 0).nonzero(as_tuple=True)
    token = token_ids[row, place].to(torch.int64)
    count = counts[row, place].to(torch.float64)
    presence, frequency, repetition = (part[row].to(torch.float64) for part in (presence, frequency, repetition))
    logit = logits[row, token].to(torch.float64)
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logits[row, token] = (logit - frequency * count - presence * (count > 0)).to(torch.float32)


def apply_mask(logits: Tensor, bitmask: Tensor) -> None:
    """Masks tokens, in place in logits [R, V] float32.

    bitmask [R, ceil(V / 32)] int32: where bit i of word w is 0, logit 32 w + i becomes -inf.
    """
    bits = (bitmask.unsqueeze(-1) >> torch.arange(32)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
