"""The plain twins of paged attention: decode the pages, then float32 attention, sequence by sequence."""

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages, read_tokens

__all__ = ["paged_attention", "paged_attention_prefill"]


def paged_attention(
    query: Tensor, pages: KVPages, page_table: Tensor, context: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention`."""
    out = torch.zeros_like(query)
    bounds = cu_rows.tolist()
    for table, length, first, end in zip(page_table, context.tolist(), bounds[:-1], bounds[1:], strict=True):
        visible = torch.arange(length - (end - first) + 1, length + 1, device=query.device)
        out[first:end] = _attend(query[first:end], pages, table, visible, scale)
    return out


def paged_attention_prefill(
    query: Tensor, pages: KVPages, page_table: Tensor, start: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention_prefill`."""
    context = start + cu_rows[1:] - cu_rows[:-1]
    return paged_attention(query, pages, page_table, context, cu_rows, scale)


def _attend(query: Tensor, pages: KVPages, table: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Mixed values of query [n, Q, D]: row i over the first visible[i] tokens (int64 [n], ascending) of the table."""
    longest = max(0, int(visible[-1])) if len(visible) else 0
    positions = torch.arange(longest, device=query.device)
    slots = table[positions // pages.page_tokens].to(torch.int64) * pages.page_tokens + positions % pages.page_tokens
    keys, values = read_tokens(pages, slots)
    grouped = query.to(torch.float32).view(len(query), pages.kv_heads, -1, query.shape[-1])
    scores = torch.einsum("rkgd,nkd->kgrn", grouped, keys) * scale
    hidden = positions >= visible[:, None]
    shares = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("kgrn,nkd->rkgd", shares, values).flatten(1, 2).to(query.dtype)
