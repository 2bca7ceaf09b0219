"""The twins of a block drafter's attention."""

from itertools import pairwise

import torch
from torch import Tensor

from onebox.kernels.common.invariant import add_in_order, silu
from onebox.kernels.common.rows import FixedRows, unscaled_rows
from onebox.kernels.draft.tensors import BlockContext, BlockMask, ContextRows

__all__ = [
    "MAX_BLOCK",
    "block_attention",
    "block_attention_fused",
    "block_heads",
    "swiglu_fused",
    "write_context",
]

MAX_BLOCK = 16
"""Rows of one block."""


def write_context(
    kv_parts: Tensor,
    weights: Tensor,
    rotation: tuple[Tensor, Tensor],
    rings: Tensor,
    pages: Tensor,
    layer_places: Tensor,
    rows: ContextRows,
    eps: float,
) -> None:
    """Writes the keys, normed and rotated, and the values of R tokens in all L layers.

    kv_parts [parts, R, L * 2 * KV * D], any float dtype: for each layer its keys, then its values. weights float32
    [L, D]: zero-centred RMSNorm of each key head. rotation: cosines and sines, float32 [R, D / 2]. rings
    [slots, sliding layers, 2, KV, ring, D]: token p is at p % ring, keys at 0 and values at 1. pages
    [pages, full layers, 2, KV, P, D]. layer_places int32 [L]: i for the i-th layer of the rings, -1 - i for the i-th of
    the pages. Of a sequence's rows only the last `ring` may be in the ring; those before are not written there.
    """
    places, (_, kv_heads, page_tokens, dim) = _token_places(rows), pages.shape[2:]
    written = torch.tensor([i for i in range(kv_parts.shape[1]) if places[i] is not None], dtype=torch.int64)
    if not len(written):
        return
    kv = add_in_order(kv_parts[:, written].to(torch.float32))
    kv = kv.view(len(written), len(layer_places), 2, kv_heads, dim)
    cos, sin = (part[written, None, None] for part in rotation)
    keys = _turn(_normed(kv[:, :, 0], weights.unsqueeze(1), eps), cos, sin)
    found = [place for place in places if place is not None]
    slots, tokens, ends = (torch.tensor(part, dtype=torch.int64) for part in zip(*found, strict=True))
    ring_tokens, mapping = rings.shape[4], rows.slot_mapping[written]
    recent = (tokens >= ends - ring_tokens).nonzero().squeeze(1)
    at = slots[recent], tokens[recent] % ring_tokens
    for layer, place in enumerate(layer_places.tolist()):
        for kind, values in enumerate((keys[:, layer], kv[:, layer, 1])):
            if place >= 0:
                rings[:, place, kind].transpose(1, 2)[at] = values[recent].to(rings.dtype)
            else:
                cells = pages[:, -1 - place, kind].transpose(1, 2)
                cells[mapping // page_tokens, mapping % page_tokens] = values.to(pages.dtype)


def _token_places(rows: ContextRows) -> list[tuple[int, int, int] | None]:
    """(slot, token, tokens of the sequence) of each row; None where it is not written."""
    found: list[tuple[int, int, int] | None] = [None] * len(rows.slot_mapping)
    slots, seen, mapping = rows.slots.tolist(), rows.seen.tolist(), rows.slot_mapping.tolist()
    for sequence, (first, end) in enumerate(pairwise(rows.cu_rows.tolist())):
        for row in range(first, end):
            if mapping[row] >= 0:
                found[row] = slots[sequence], seen[sequence] - (end - row), seen[sequence]
    return found


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block_heads(
    qkv_parts: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: tuple[Tensor, Tensor],
    eps: float,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(query [R, Q, D], key [R, KV, D], value [R, KV, D]) of `dtype`; queries and keys are normed and rotated.

    qkv_parts [parts, R, (Q + 2 KV) * D], any float dtype; q_weight and k_weight float32 [D]: zero-centred RMSNorm of
    each head; rotation: cosines and sines, float32 [R, D / 2].
    """
    dim = len(q_weight)
    total = add_in_order(qkv_parts.to(torch.float32)).unflatten(1, (qkv_parts.shape[2] // dim, dim))
    query, key, value = total.split([total.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = (part.unsqueeze(1) for part in rotation)
    query, key = (_turn(_normed(x, w, eps), cos, sin) for x, w in ((query, q_weight), (key, k_weight)))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, cached: Tensor, context: BlockContext, mask: BlockMask, scale: float
) -> Tensor:
    """[R, Q * D]: attention of B blocks of R / B rows each, at most 16, to their context and to themselves.

    query [R, Q, D], key and value [R, KV, D], of one dtype. cached [slots, 2, KV, ring, D] with a window, else
    [pages, 2, KV, P, D]: one layer of the context as `write_context` writes it, of the same dtype.
    """
    rows, num_heads, dim = query.shape
    num_blocks, kv_heads = len(context.length), key.shape[1]
    size = rows // num_blocks
    out = query.new_empty(rows, num_heads * dim)
    for block, length in enumerate(context.length.tolist()):
        own = slice(block * size, (block + 1) * size)
        start = 0 if mask.window is None else max(0, length - mask.window + 1)
        before = _context_kv(cached, context, block, (start, length), is_ring=mask.window is not None)
        keys, values = (
            torch.cat([old, new[own].transpose(0, 1)], dim=1).to(torch.float32)
            for old, new in zip(before, (key, value), strict=True)
        )
        places = torch.arange(start, length + size)
        asked = torch.arange(length, length + size).unsqueeze(1)
        visible = torch.ones(size, len(places), dtype=torch.bool)
        if mask.is_causal:
            visible &= places <= asked
        if mask.window is not None:
            visible &= (places - asked).abs() < mask.window
        queries = query[own].to(torch.float32).view(size, kv_heads, -1, dim).permute(1, 2, 0, 3)
        scores = (queries @ keys.unsqueeze(1).mT * scale).masked_fill(~visible, float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ values.unsqueeze(1)
        out[own] = mixed.permute(2, 0, 1, 3).reshape(size, -1).to(query.dtype)
    return out


def _context_kv(
    cached: Tensor, context: BlockContext, block: int, span: tuple[int, int], *, is_ring: bool
) -> tuple[Tensor, Tensor]:
    """(keys, values) [KV, tokens, D] of the tokens in `span`."""
    tokens, size = torch.arange(*span), cached.shape[3]
    if is_ring:
        found = cached[int(context.slots[block])][:, :, tokens % size]
    else:
        pages = context.page_table[int(context.sequences[block])].to(torch.int64)
        found = cached.transpose(2, 3)[pages[tokens // size], :, tokens % size].permute(1, 2, 0, 3)
    return found[0], found[1]


def block_attention_fused(
    query: Tensor, key: Tensor, value: Tensor, cached: Tensor, context: BlockContext, mask: BlockMask, scale: float
) -> FixedRows:
    """`block_attention` as the rows of a linear; Q * D is a multiple of 128."""
    return unscaled_rows(block_attention(query, key, value, cached, context, mask, scale), query.dtype)


def swiglu_fused(gate_up_parts: Tensor, dtype: torch.dtype) -> FixedRows:
    """silu(gate) * up as the rows of a linear: [R, I] from float32 parts [parts, R, 2 I]; I is a multiple of 128."""
    gate, up = add_in_order(gate_up_parts).chunk(2, dim=-1)
    return unscaled_rows(silu(gate) * up, dtype)
