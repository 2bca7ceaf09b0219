"""The rows of the MTP head on a CPU, by numpy: a few numbers, for which a torch call takes three times as long."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.kernels.step.reference import MAX_TOP_K
from onebox.kernels.step.tensors import ChainRows, DraftLimits, FollowingRows

__all__ = ["chain_rows", "following_rows"]

Numbers = NDArray[np.int64]


def following_rows(page_table, row_sequence, places, positions, seen, page_tokens):
    following = places.numpy() + 1
    slots = _slot_mapping(page_table, row_sequence.numpy(), following, page_tokens)
    return FollowingRows(
        torch.from_numpy(following),
        torch.from_numpy(positions.numpy() + 1),
        torch.from_numpy(slots),
        torch.from_numpy(seen.numpy() + np.int32(1)),
    )


def chain_rows(mixed, following, limits, cu_rows, num_accepted, page_table, depth, page_tokens):
    last = np.clip(cu_rows.numpy()[:-1] + num_accepted.numpy() - 1, 0, len(mixed) - 1)
    first, offset = following.places.numpy()[last], (following.positions.numpy() - following.places.numpy())[last]
    places = first + np.arange(1, depth + 1)[:, None]
    slots = _slot_mapping(page_table, np.arange(len(last)), places, page_tokens)
    temperature, top_k, top_p, min_p, seeds = (limit.numpy()[last] for limit in limits)
    top_k = np.where(top_k > 0, np.minimum(top_k, MAX_TOP_K), MAX_TOP_K)
    chosen = (torch.from_numpy(limit) for limit in (temperature, top_k, top_p, min_p, seeds))
    return ChainRows(
        mixed[torch.from_numpy(last)],
        torch.from_numpy(places),
        torch.from_numpy(places + offset),
        torch.from_numpy(slots),
        torch.from_numpy((places + 1).astype(np.int32)),
        torch.arange(len(last) + 1, dtype=torch.int32),
        DraftLimits(*chosen),
    )


def _slot_mapping(page_table: Tensor, sequences: Numbers, places: Numbers, page_tokens: int) -> Numbers:
    """`reference.slot_mapping` of places int64 [..., T], each of the sequence in sequences [T]."""
    num_sequences, num_pages = page_table.shape
    pages = places // page_tokens
    own = page_table.numpy()[np.minimum(sequences, num_sequences - 1), np.minimum(pages, num_pages - 1)]
    slots: Numbers = own * np.int64(page_tokens) + places % page_tokens
    slots[(sequences >= num_sequences) | (pages >= num_pages)] = -1
    return slots
