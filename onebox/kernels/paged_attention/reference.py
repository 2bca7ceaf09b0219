"""The plain twins of paged attention: decode the pages, then float32 attention.

Decode goes page by page, so that every product has one shape and a row's sums do not depend on how many pages others
have. Prefill goes by 64 queries that stand at a multiple of 64, so that shapes depend on positions alone.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebox.formats.kv_fp8 import decode_fp8
from onebox.formats.kv_pages import FP8_BITS, KVPages
from onebox.formats.kv_turboquant import decode_turboquant
from onebox.kernels.invariant import pair_sum
from onebox.kernels.mixer_rows.reference import attention_rows
from onebox.kernels.rows import FixedRows

__all__ = ["paged_attention", "paged_attention_prefill", "paged_attention_rows"]

_QUERIES = 64
"""Query rows that prefill takes at once."""
_TILE = 8
"""Query heads of one key head that decode takes at once, those of neighbouring rows together."""


class _Layout(NamedTuple):
    """Where the S sequences of a decode step that see something stand, and the B pages they see."""

    sequences: Tensor  # int64 [S]: their numbers in the call
    page_sequence: Tensor  # int64 [B]: whose page it is, 0..S-1
    page_place: Tensor  # int64 [B]: which of its pages
    last_page: Tensor  # int64 [S]: each sequence's last of the B
    hidden: Tensor  # bool [S, P]: tokens of the last page behind the context
    row: Tensor  # int64 [R']: the rows that see something
    row_sequence: Tensor  # int64 [R']: whose they are
    row_place: Tensor  # int64 [R']: which of its rows
    visible: Tensor  # int64 [S, rows]: how many tokens each row sees, at least 1


def paged_attention(
    query: Tensor, pages: KVPages, page_table: Tensor, context: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention`."""
    group = query.shape[1] // pages.kv_heads
    tile_rows = max(1, _TILE // group)
    layout = _layout(tuple(cu_rows.tolist()), tuple(context.tolist()), pages.page_tokens, tile_rows)
    out = torch.zeros_like(query)
    if not len(layout.row):
        return out
    keys, values = _read(pages, page_table[layout.sequences[layout.page_sequence], layout.page_place])
    last = values[layout.last_page].masked_fill(layout.hidden[:, None, :, None], 0.0)
    values[layout.last_page] = last
    scaled = query[layout.row].to(torch.float32) * scale
    rows = scaled.new_zeros(*layout.visible.shape, pages.kv_heads, group, query.shape[2])
    rows[layout.row_sequence, layout.row_place] = scaled.view(-1, *rows.shape[2:])
    tiles = zip(*(torch.split(part, tile_rows, dim=1) for part in (rows, layout.visible)), strict=True)
    mixed = torch.cat([_attend(tile, visible, keys, values, layout) for tile, visible in tiles], dim=1)
    out[layout.row] = mixed[layout.row_sequence, layout.row_place].flatten(1, 2).to(query.dtype)
    return out


@lru_cache(maxsize=8)
def _layout(edges: tuple[int, ...], context: tuple[int, ...], page_tokens: int, tile_rows: int) -> _Layout:
    """The same for every layer of a step."""
    bounds = list(zip(edges[:-1], edges[1:], context, strict=True))
    sequences = [s for s, (first, end, length) in enumerate(bounds) if end > first and length > 0]
    counts = [-(-bounds[s][2] // page_tokens) for s in sequences]
    rows, visible = [], []
    most_rows = max((bounds[s][1] - bounds[s][0] for s in sequences), default=0)
    for index, s in enumerate(sequences):
        first, end, length = bounds[s]
        seen = [length - (end - row) + 1 for row in range(first, end)]
        rows += [(row, index, row - first) for row in range(first, end) if seen[row - first] > 0]
        visible.append([max(1, count) for count in seen] + [1] * (most_rows + -most_rows % tile_rows - len(seen)))
    tokens = [bounds[s][2] - (count - 1) * page_tokens for s, count in zip(sequences, counts, strict=True)]
    whole = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    pages = torch.tensor(counts, dtype=torch.int64)
    return _Layout(
        torch.tensor(sequences, dtype=torch.int64),
        torch.arange(len(counts)).repeat_interleave(pages),
        torch.cat([torch.arange(count) for count in counts] or [pages]),
        pages.cumsum(0) - 1,
        torch.arange(page_tokens) >= torch.tensor(tokens, dtype=torch.int64)[:, None],
        whole[:, 0],
        whole[:, 1],
        whole[:, 2],
        torch.tensor(visible, dtype=torch.int64),
    )


def _attend(query: Tensor, visible: Tensor, keys: Tensor, values: Tensor, layout: _Layout) -> Tensor:
    """Mixed values [S, n, V, G, D] of query [S, n, V, G, D], scaled; row i of s sees the first visible[s, i] tokens."""
    num, rows, kv_heads, group, dim = query.shape
    num_pages, tokens = int(layout.page_place.max()) + 1, keys.shape[2]
    asked = query.permute(0, 2, 1, 3, 4).reshape(num, kv_heads, rows * group, dim)[layout.page_sequence]
    found = torch.bmm(asked.flatten(0, 1), keys.flatten(0, 1).mT)
    scores = found.new_full((num, num_pages, kv_heads, rows, group, tokens), float("-inf"))
    where = layout.page_sequence, layout.page_place
    scores[where] = found.view(-1, kv_heads, rows, group, tokens)
    places = torch.arange(num_pages * tokens).view(num_pages, 1, 1, 1, tokens)
    scores.masked_fill_(places >= visible.view(num, 1, 1, rows, 1, 1), float("-inf"))
    shares = scores.sub_(scores.amax(dim=(1, 5), keepdim=True)).exp_()
    total = pair_sum(shares.sum(-1)).unsqueeze(-1)
    parts = torch.bmm(shares[where].view(-1, rows * group, tokens), values.flatten(0, 1))
    mixed = parts.new_zeros(num, num_pages, kv_heads, rows, group, dim)
    mixed[where] = parts.view(-1, kv_heads, rows, group, dim)
    return (pair_sum(mixed) / total).transpose(1, 2)


def paged_attention_rows(
    query: Tensor,
    pages: KVPages,
    page_table: Tensor,
    context: Tensor,
    cu_rows: Tensor,
    scale: float,
    qkv_parts: Tensor,
) -> FixedRows:
    """See `onebox.kernels.paged_attention.paged_attention_rows`."""
    return attention_rows(paged_attention(query, pages, page_table, context, cu_rows, scale), qkv_parts)


def paged_attention_prefill(
    query: Tensor, pages: KVPages, page_table: Tensor, start: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention_prefill`."""
    out = torch.zeros_like(query)
    bounds = cu_rows.tolist()
    for table, begin, first, end in zip(page_table, start.tolist(), bounds[:-1], bounds[1:], strict=True):
        length = begin + end - first
        keys, values = (_line_up(part, length) for part in _read(pages, table[: -(-length // pages.page_tokens)]))
        place = begin
        while place < length:
            next_place = min(length, (place // _QUERIES + 1) * _QUERIES)
            some = slice(first + place - begin, first + next_place - begin)
            out[some] = _attend_block(query[some], place, keys, values, scale).to(query.dtype)
            place = next_place
    return out


def _line_up(part: Tensor, length: int) -> Tensor:
    """[V, L, D] from pages [B, V, P, D]: the first `length` tokens, then zeros up to a multiple of `_QUERIES`."""
    tokens = part.transpose(0, 1).flatten(1, 2)[:, :length]
    return pad(tokens, (0, 0, 0, -length % _QUERIES))


def _attend_block(query: Tensor, place: int, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Mixed values [n, Q, D] of query [n, Q, D], whose first row stands at `place` and whose last in the same block."""
    kv_heads, _, dim = keys.shape
    skipped = place % _QUERIES
    seen = place - skipped + _QUERIES
    block = pad(query.to(torch.float32) * scale, (0, 0, 0, 0, skipped, _QUERIES - skipped - len(query)))
    rows = block.view(_QUERIES, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(rows, keys[:, :seen].mT)
    later = torch.ones(_QUERIES, _QUERIES, dtype=torch.bool).triu(1)
    scores.view(kv_heads, -1, _QUERIES, seen)[..., -_QUERIES:].masked_fill_(later, float("-inf"))
    mixed = torch.bmm(scores.softmax(dim=-1), values[:, :seen])
    return mixed.view(kv_heads, -1, _QUERIES, dim).permute(2, 0, 1, 3).flatten(1, 2)[skipped : skipped + len(query)]


def _read(pages: KVPages, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded keys and values, float32 [B, V, P, D], of the pages that numbers [B] name."""
    sides = (
        (pages.format.key_bits, pages.key_codes, pages.key_scale),
        (pages.format.value_bits, pages.value_codes, pages.value_scale),
    )
    key, value = (
        _decode(bits, codes.index_select(0, numbers), None if scale is None else scale.index_select(0, numbers))
        for bits, codes, scale in sides
    )
    return key, value


def _decode(bits: int, codes: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return codes.to(torch.float32)
    if bits == FP8_BITS:
        return decode_fp8(codes.view(torch.float8_e4m3fn), scale)
    return decode_turboquant(codes, scale, bits)
