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
    queries = (query.to(torch.float32) * scale).view(num_blocks, size, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(num_blocks, kv_heads, -1, dim)  # a KV head's query heads, and the rows of each
    out = query.new_empty(rows, num_heads * dim)
    for block, length in enumerate(context.length.tolist()):
        own = slice(block * size, (block + 1) * size)
        start = 0 if mask.window is None else max(0, length - mask.window + 1)
        if mask.window is None:
            stretches = [_page_stretch(cached, context, block, length)] if length else []
        else:
            stretches = _ring_stretches(cached[int(context.slots[block])], start, length)
        stretches.append(tuple(part[own].transpose(0, 1).to(torch.float32).unsqueeze(0) for part in (key, value)))
        hidden = ~_visible(mask, start, length, size)
        mixed = _attend(queries[block], stretches, hidden).view(kv_heads, -1, size, dim)
        out[own] = mixed.permute(2, 0, 1, 3).reshape(size, -1).to(query.dtype)
    return out


def _visible(mask: BlockMask, start: int, length: int, size: int) -> Tensor:
    """Which of the tokens from `start` to the block's last each of its rows sees, bool [size, tokens]."""
    places, asked = torch.arange(start, length + size), torch.arange(length, length + size).unsqueeze(1)
    visible = places <= asked if mask.is_causal else torch.ones(size, len(places), dtype=torch.bool)
    return visible if mask.window is None else visible & ((places - asked).abs() < mask.window)


def _ring_stretches(ring: Tensor, start: int, end: int) -> list[tuple[Tensor, ...]]:
    """(keys, values) [1, KV, tokens, D] of the tokens from start to end in a ring [2, KV, ring, D], without a copy."""
    size, found = ring.shape[2], list[tuple[Tensor, ...]]()
    while start < end:
        count = min(end - start, size - start % size)
        stretch = ring[:, :, start % size : start % size + count].to(torch.float32)
        found.append(tuple(part.unsqueeze(0) for part in stretch))
        start += count
    return found


def _page_stretch(cached: Tensor, context: BlockContext, block: int, length: int) -> tuple[Tensor, ...]:
    """(keys, values) [pages, KV, P, D] of the first `length` tokens; what lies behind them is zero."""
    tokens = cached.shape[3]
    pages = context.page_table[int(context.sequences[block]), : -(-length // tokens)].to(torch.int64)
    found = cached[pages].to(torch.float32)
    if length % tokens:
        found[-1, :, :, length % tokens :] = 0
    return tuple(found.unbind(1))


def _attend(query: Tensor, stretches: list[tuple[Tensor, ...]], hidden: Tensor) -> Tensor:
    """[KV, M, D] of query [KV, M, D], of which row m is the block's row m % size, over all stretches in their order.

    hidden bool [size, tokens]; a stretch of pages may be longer than its tokens.
    """
    (size, num_tokens), scores = hidden.shape, list[Tensor]()
    left = num_tokens
    for place, (keys, _) in enumerate(stretches):
        found = (query @ keys.mT).permute(1, 2, 0, 3).flatten(2)
        left -= found.shape[2] if place else 0
        scores.append(found)
    # Only the first stretch may have more than its tokens: the others have theirs exactly.
    scores[0] = scores[0][:, :, :left]
    joined = torch.cat(scores, dim=2).unflatten(1, (-1, size)).masked_fill_(hidden, float("-inf"))
    shares = torch.softmax(joined, dim=-1).flatten(1, 2)
    mixed, first = torch.zeros_like(query), 0
    for found, (_, values) in zip(scores, stretches, strict=True):
        count, capacity = found.shape[2], values.shape[0] * values.shape[2]
        own = torch.nn.functional.pad(shares[:, :, first : first + count], (0, capacity - count))
        mixed += (own.unflatten(2, (values.shape[0], -1)).permute(2, 0, 1, 3) @ values).sum(0)
        first += count
    return mixed


def block_attention_fused(
    query: Tensor, key: Tensor, value: Tensor, cached: Tensor, context: BlockContext, mask: BlockMask, scale: float
) -> FixedRows:
    """`block_attention` as the rows of a linear; Q * D is a multiple of 128."""
    return unscaled_rows(block_attention(query, key, value, cached, context, mask, scale), query.dtype)


def swiglu_fused(gate_up_parts: Tensor, dtype: torch.dtype) -> FixedRows:
    """silu(gate) * up as the rows of a linear: [R, I] from float32 parts [parts, R, 2 I]; I is a multiple of 128."""
    gate, up = add_in_order(gate_up_parts).chunk(2, dim=-1)
    return unscaled_rows(silu(gate) * up, dtype)
