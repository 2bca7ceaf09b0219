"""The plain twin of the next step's inputs."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["advance"]


def advance(
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    keep: Tensor,
    seen: Tensor,
    cu_rows: Tensor,
    page_table: Tensor,
    drawn: Tensor,
    num_kept: Tensor,
    drafts: Tensor,
    page_tokens: int,
) -> None:
    """See `onebox.kernels.advance.advance`."""
    edges = cu_rows.tolist()
    for sequence, (first, end) in enumerate(pairwise(edges)):
        if first == end:
            continue
        kept = int(num_kept[sequence])
        start = int(seen[sequence]) - (end - first) + kept
        places = torch.arange(start, start + end - first, device=token_ids.device)
        inside = places < page_table.shape[1] * page_tokens
        pages = page_table[sequence, (places // page_tokens).clamp(max=page_table.shape[1] - 1)].to(torch.int64)
        token_ids[first] = drawn[first + kept - 1]
        token_ids[first + 1 : end] = drafts[sequence, : end - first - 1]
        positions[first:end] += kept
        kv_slots[first:end] = torch.where(inside, pages * page_tokens + places % page_tokens, -1)
        keep[sequence] = kept
        seen[sequence] += kept
