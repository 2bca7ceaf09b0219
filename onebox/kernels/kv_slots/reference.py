"""The plain twin of the slots of keys and values."""

import torch
from torch import Tensor

__all__ = ["kv_slots"]


def kv_slots(page_table: Tensor, sequences: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """See `onebox.kernels.kv_slots.kv_slots`."""
    num_sequences, num_pages = page_table.shape
    is_kept = (sequences < num_sequences) & (positions < num_pages * page_tokens)
    pages = page_table[sequences.clamp(max=num_sequences - 1), (positions // page_tokens).clamp(max=num_pages - 1)]
    return torch.where(is_kept, pages.to(torch.int64) * page_tokens + positions % page_tokens, -1)
