"""Carries out adjustments on logits, through the sampling kernels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onebox.engine.adjust import Adjustment, Penalties
from onebox.engine.batch import Rows
from onebox.kernels.sampling import apply_mask, apply_penalties

__all__ = ["apply_adjustments"]


def apply_adjustments(logits: Tensor, parts: Sequence[Rows]) -> None:
    """Changes logits float32 [R, V] in place, as the parts' draws say; their rows lie one after the other."""
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


def _penalise(logits: Tensor, rows: dict[int, Penalties]) -> None:
    if not rows:
        return
    widest = max(len(penalties.token_ids) for penalties in rows.values())
    token_ids = np.full((len(logits), widest), -1, dtype=np.int64)
    counts = np.zeros((len(logits), widest), dtype=np.int64)
    # What rows without penalties are given changes nothing.
    strengths = np.tile([0.0, 0.0, 1.0], (len(logits), 1))
    for row, penalties in rows.items():
        token_ids[row, : len(penalties.token_ids)] = penalties.token_ids
        counts[row, : len(penalties.counts)] = penalties.counts
        strengths[row] = penalties.presence, penalties.frequency, penalties.repetition
    ids, numbers, factors = (torch.from_numpy(part).to(logits.device) for part in (token_ids, counts, strengths.T))
    apply_penalties(logits, ids, numbers, *(factor.contiguous() for factor in factors))


def _bias(logits: Tensor, rows: dict[int, tuple[tuple[int, float], ...]]) -> None:
    if rows:
        places = [(row, token_id) for row, pairs in rows.items() for token_id, _ in pairs]
        values = [value for pairs in rows.values() for _, value in pairs]
        index = torch.tensor(places, device=logits.device).T
        added = torch.tensor(values, dtype=torch.float32, device=logits.device)
        # A token that is named twice gets both.
        logits.index_put_((index[0], index[1]), added, accumulate=True)


def _ban(logits: Tensor, rows: dict[int, tuple[int, ...]]) -> None:
    if rows:
        places = [(row, token_id) for row, banned in rows.items() for token_id in banned]
        index = torch.tensor(places, device=logits.device).T
        logits[index[0], index[1]] = float("-inf")


def _mask(logits: Tensor, rows: dict[int, "np.typing.NDArray[np.int32]"]) -> None:
    if rows:
        words = np.full((len(logits), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
        for row, mask in rows.items():
            words[row] = mask
        apply_mask(logits, torch.from_numpy(words).to(logits.device))
