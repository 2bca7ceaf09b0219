"""The twins of attention."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebox.formats.kv_pages import KVPages, decode_codes, write_tokens
from onebox.kernels.common.invariant import add_in_order, pair_sum, sigmoid
from onebox.kernels.common.rows import FixedRows, unscaled_rows

__all__ = [
    "MAX_ROWS",
    "attention_gate",
    "attention_gate_fused",
    "kv_write",
    "kv_write_fused",
    "paged_attention",
    "paged_attention_fused",
    "paged_attention_prefill",
    "qk_norm_rope",
    "qk_norm_rope_fused",
    "rotary_table",
]

MAX_ROWS = 16
"""Rows of one sequence in a decode step."""
_QUERIES = 64
"""Query rows that prefill computes at once."""
_TILE = 8
"""Query heads of one KV head that decode computes at once, neighbouring rows together."""


class _Layout(NamedTuple):
    """Indices of the S sequences of a decode step that have visible tokens, and of the B pages that hold these."""

    sequences: Tensor  # int64 [S]: their index in the call
    page_sequence: Tensor  # int64 [B]: the page's sequence, 0..S-1
    page_place: Tensor  # int64 [B]: the page's index in its sequence
    last_page: Tensor  # int64 [S]: index into B of each sequence's last page
    hidden: Tensor  # bool [S, P]: tokens of the last page past the context
    row: Tensor  # int64 [R']: the rows that have visible tokens
    row_sequence: Tensor  # int64 [R']: the row's sequence, 0..S-1
    row_place: Tensor  # int64 [R']: the row's index in its sequence
    visible: Tensor  # int64 [S, rows]: number of tokens visible to each row, at least 1


def paged_attention(
    query: Tensor,
    pages: KVPages,
    page_table: Tensor,
    context: Tensor,
    cu_rows: Tensor,
    scale: float,
    max_rows: int = MAX_ROWS,  # noqa: ARG001 - decides the size of a launch
) -> Tensor:
    """Decode and verification: attention outputs [R, Q, D] of query [R, Q, D], at most `max_rows` rows per sequence.

    Sequence s has the rows cu_rows[s] .. cu_rows[s+1] - 1 (int32 [S+1]) and the pages page_table[s] (int32
    [S, max_pages], token p is in its page p // P). Its last row attends to context[s] tokens (int32 [S]), the row
    before to one fewer, and so on; the pages already hold all of them. The output is zero for a row without visible
    tokens or without a sequence. A row's bits depend on its query and its visible tokens, not on other rows, sequences
    or page numbers. D is a power of two, at least 32. Launch and workspace grow with the table's width and max_rows, at
    most 16: pass a table not much wider than the longest sequence. Its rows may be strided.
    """
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
    """Cached: the layout is the same for every layer of a step."""
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
    """Outputs [S, n, KV, G, D] of the scaled query [S, n, KV, G, D]; row i of s attends to visible[s, i] tokens."""
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


def paged_attention_fused(
    query: Tensor,
    pages: KVPages,
    page_table: Tensor,
    context: Tensor,
    cu_rows: Tensor,
    scale: float,
    qkv_parts: Tensor,
    max_rows: int = MAX_ROWS,
) -> FixedRows:
    """`attention_gate_fused` of `paged_attention`: gated, as fixed-point rows for the output projection.

    qkv_parts float32 [parts, R, N] as for `attention_gate_fused`. Q * D is a multiple of 128.
    """
    mixed = paged_attention(query, pages, page_table, context, cu_rows, scale, max_rows)
    return attention_gate_fused(mixed, qkv_parts)


def paged_attention_prefill(
    query: Tensor, pages: KVPages, page_table: Tensor, start: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """Prefill: attention outputs [T, Q, D] of query [T, Q, D]; the pages already hold the tokens' keys and values.

    Row i of sequence s (cu_rows and page_table as in `paged_attention`) is at position start[s] + i (int32 [S]) and
    attends to the tokens up to and including itself. A row's bits do not depend on where a prompt was split.
    """
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
    """[KV, L, D] from pages [B, KV, P, D]: the first `length` tokens, zero-padded to a multiple of `_QUERIES`."""
    tokens = part.transpose(0, 1).flatten(1, 2)[:, :length]
    return pad(tokens, (0, 0, 0, -length % _QUERIES))


def _attend_block(query: Tensor, place: int, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Outputs [n, Q, D] of query [n, Q, D]: the first row is at `place`, the last one in the same block."""
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
    """Decoded keys and values, float32 [B, KV, P, D], of the pages with these numbers [B]."""
    sides = (
        (pages.format.key_bits, pages.key_codes, pages.key_scale),
        (pages.format.value_bits, pages.value_codes, pages.value_scale),
    )
    key, value = (
        decode_codes(bits, codes.index_select(0, numbers), None if scale is None else scale.index_select(0, numbers))
        for bits, codes, scale in sides
    )
    return key, value


def rotary_table(
    positions: Tensor, frequencies: Tensor, mrope_section: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines times `scale`, float32 [R, F] each, of positions [3, R]: time, height, width.

    Positions are integers below 2^24 with any strides; frequencies [F] float32 come from `rotary_frequencies`.
    Frequency j multiplies the height if j % 3 == 1 and j < 3 * mrope_section[1], the width if j % 3 == 2 and
    j < 3 * mrope_section[2], else the time. An angle is one float32 product, as in the model's own code; its cosine and
    sine are exact to float32, and the same bits on every device. `scale` is YaRN's attention factor, else 1.
    """
    axis = torch.zeros(frequencies.shape[0], dtype=torch.long)
    for index in (1, 2):
        axis[index : 3 * mrope_section[index] : 3] = index
    angles = positions.to(torch.float32)[axis].T * frequencies
    # In float64: a float32 cosine's last bit depends on the device, and on a CPU on the place in the tensor.
    wide = angles.to(torch.float64)
    return wide.cos().to(torch.float32) * scale, wide.sin().to(torch.float32) * scale


def qk_norm_rope(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(query [R, Q, D], gate [R, Q, D], key [R, KV, D]), in the dtypes of q_gate and k.

    q_gate [R, Q*2*D]: for each head D columns of query, then D of its gate. k [R, KV*D]. Rows of both may have any
    stride, so they may be views of one fused projection. q_weight and k_weight [D]: zero-centred RMSNorm of each head.
    cos and sin [R, F] from `rotary_table`: the first 2F elements of a head are rotated, i together with i + F; the
    others and the gate are not.
    """
    head_dim = q_weight.shape[0]
    query, gate = q_gate.reshape(q_gate.shape[0], q_gate.shape[1] // (2 * head_dim), 2, head_dim).unbind(-2)
    key = k.reshape(k.shape[0], k.shape[1] // head_dim, head_dim)
    rotated = _norm_and_rotate(query, q_weight, cos, sin, eps), _norm_and_rotate(key, k_weight, cos, sin, eps)
    return rotated[0], gate.contiguous(), rotated[1]


def _norm_and_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Heads [R, heads, D] normed by weight [D] and rotated by cos and sin [R, rotary_dim / 2]."""
    # Contiguous, so that the sum over a head has one order, whatever tensor the head is a view of.
    x = heads.to(torch.float32).contiguous()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(torch.float32))
    half = cos.shape[-1]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(heads.dtype)


def kv_write(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Encodes key and value [R, KV, D] into the tokens at slots, int64 [R]: page * P + offset, negative to skip.

    The bytes equal those of `onebox.formats`, and a vector's bytes depend on that vector alone. Two rows of one call
    must not have the same slot. Writes the pages in place.
    """
    write_tokens(pages, key, value, slots)


def qk_norm_rope_fused(
    qkv_parts: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(query [R, Q, D], key [R, KV, D], value [R, KV, D]) of `dtype`; queries and keys as in `qk_norm_rope`.

    qkv_parts float32 [parts, R, (2Q + 2KV) D], added in order: each head's query and gate (not read), then keys, then
    values. Weights [D] are offsets from one; cos and sin float32 [R, F] from `rotary_table`.
    """
    head_dim = len(q_weight)
    kv_width = num_kv_heads * head_dim
    q_gate, k, v = torch.split(add_in_order(qkv_parts), [qkv_parts.shape[2] - 2 * kv_width, kv_width, kv_width], dim=-1)
    query, _, key = qk_norm_rope(q_gate, k, q_weight, k_weight, cos, sin, eps)
    return query.to(dtype), key.to(dtype), v.reshape(len(v), num_kv_heads, head_dim).to(dtype)


def kv_write_fused(
    qkv_parts: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dtype: torch.dtype,
    pages: KVPages,
    slots: Tensor,
) -> Tensor:
    """`qk_norm_rope_fused`, then `kv_write` of its keys and values to slots int64 [R]; returns the query [R, Q, D]."""
    query, key, value = qk_norm_rope_fused(qkv_parts, q_weight, k_weight, cos, sin, eps, pages.kv_heads, dtype)
    kv_write(pages, key, value, slots)
    return query


def attention_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Gated heads side by side: attended * sigmoid(gate), [R, Q*D] from two [R, Q, D], in the dtype of attended."""
    gated = attended.to(torch.float32) * sigmoid(gate)
    return gated.to(attended.dtype).flatten(1)


def attention_gate_fused(attended: Tensor, qkv_parts: Tensor) -> FixedRows:
    """`attention_gate` as rows [R, Q * D] in the dtype of attended: attended * sigmoid(gate).

    attended [R, Q, D]; qkv_parts float32 [parts, R, N], partial sums of the projection, added in order: a row begins
    with each head's query and gate, D columns each. Q * D is a multiple of 128.
    """
    rows, heads, head_dim = attended.shape
    q_gate = add_in_order(qkv_parts)[:, : 2 * heads * head_dim].view(rows, heads, 2, head_dim)
    return unscaled_rows(attention_gate(attended.to(torch.float32), q_gate[:, :, 1]), attended.dtype)
