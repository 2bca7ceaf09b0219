"""The twins of a head in two planes, and what they share with the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.head_planes import LOW_CENTRE, low_codes
from onebox.kernels.common.invariant import product
from onebox.kernels.int_linear.reference import fixed_values

__all__ = ["MAX_TOP_K", "SLACK", "LowPlane", "chunk_rows", "complete_candidates", "complete_logits"]

MAX_TOP_K = 64
"""Up to this top_k only candidates are completed."""

SLACK = 1 + 2.0**-8
"""The bound's factor for what float32 rounds away: low sums, their addition, the row's length. All of it is below
2^-11 |x| scale; a radius is at least sqrt(K) / 2."""

_MAX_CHUNKS = 1024


class LowPlane(NamedTuple):
    """The low plane of a matrix [N, K] (`onebox.formats.head_planes`); padding rows may follow the N."""

    low: Tensor
    """uint8 [>= N, K/4]."""
    radius: Tensor
    """float32 [>= N]."""
    scale: Tensor
    """[N]: the matrix rows' scales."""


def complete_logits(logits: Tensor, planes: Tensor, scale: Tensor, plane: LowPlane) -> None:
    """Adds the low plane's products to incomplete logits float32 [R, N], in place; R <= 128.

    planes int8 [R, 2, K] and scale float32 [R, K/128]: the fixed-point rows that the logits were computed from.
    """
    logits += _low_logits(planes, scale, plane)


def complete_candidates(
    logits: Tensor,
    planes: Tensor,
    scale: Tensor,
    plane: LowPlane,
    temperature: Tensor,
    top_k: Tensor,
    num_rows: Tensor | None,
    is_complete: Tensor,
) -> None:
    """`complete_logits` for the tokens that can be among the best of a row; the other logits stay incomplete.

    temperature float and top_k integer [R] as in `sample`. A row's best are its largest logit at temperature 0, else
    its top_k largest; all, for a top_k that is 0 or above 64. Rows from num_rows int32 [1] on count for nothing (None:
    there are none). Does nothing where is_complete int32 [1] is not 0.

    The least of the best is not known beforehand. Instead, each chunk of the vocabulary has a peak, its largest
    incomplete logit; the k-th largest of the completed peaks is no larger than the k-th largest logit.
    """
    if int(is_complete):
        return
    num_tokens = logits.shape[1]
    complete = logits + _low_logits(planes, scale, plane)
    best = torch.where(temperature > 0, top_k.to(torch.int64), 1)
    least = _least(logits, complete, torch.where(best > MAX_TOP_K, 0, best))
    x = fixed_values(planes, scale)
    centre, length = LOW_CENTRE * x.sum(1, keepdim=True), SLACK * x.norm(dim=1, keepdim=True)
    weight_scale, radius = plane.scale.to(torch.float32), plane.radius[:num_tokens]
    is_candidate = ~(logits + (weight_scale * centre + weight_scale.abs() * radius * length) < least)
    if num_rows is not None:
        is_candidate[int(num_rows) :] = False
    # A token is completed for all rows of a chunk of rows.
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        logits[rows] = torch.where(is_candidate[rows].any(0), complete[rows], logits[rows])


_ROWS = 16


def chunk_rows(num_tokens: int) -> int:
    """Tokens of a chunk with one peak: a power of two, at least 16, so that there are at most 1,024 chunks."""
    return max(16, 1 << (-(-num_tokens // _MAX_CHUNKS) - 1).bit_length())


def _low_logits(planes: Tensor, scale: Tensor, plane: LowPlane) -> Tensor:
    codes = low_codes(plane.low)[: len(plane.scale)].to(torch.float32)
    return product(fixed_values(planes, scale), codes) * plane.scale.to(torch.float32)


def _least(logits: Tensor, complete: Tensor, best: Tensor) -> Tensor:
    """float32 [R, 1]: a lower bound of each row's `best`-th largest complete logit; -inf where best is 0."""
    chunk = chunk_rows(logits.shape[1])
    places = [part.argmax(1) + start for start, part in _chunks(logits, chunk)]
    peaks = complete.gather(1, torch.stack(places, dim=1)).sort(1, descending=True).values
    is_known = (best > 0) & (best <= peaks.shape[1])
    least = peaks.gather(1, (best - 1).clamp(0, peaks.shape[1] - 1).unsqueeze(1))
    return least.masked_fill(~is_known.unsqueeze(1), float("-inf"))


def _chunks(logits: Tensor, chunk: int) -> list[tuple[int, Tensor]]:
    return [(start, logits[:, start : start + chunk]) for start in range(0, logits.shape[1], chunk)]
