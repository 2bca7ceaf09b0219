"""Attention of a block drafter in Triton: context in pieces, one program each, and the block itself as one piece more.

A program computes all rows of a block times all query heads of a KV head, at most 16 rows: one tile of tensor cores.
Pieces of a ring lie on absolute positions; those of pages are those of decode attention (`attention/pieces.py`). A
second kernel adds a row's pieces, the block's first: every row sees its own key there, so its maximum is a number.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.attention.pieces import count_pieces, piece_bounds
from onebox.kernels.common.arithmetic import dot, loop_bound, rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_groups
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.draft.reference import MAX_BLOCK
from onebox.kernels.draft.tensors import BlockContext, BlockMask
from onebox.spec.pieces import BLOCK_DOUBLINGS, piece_count

__all__ = ["block_attention", "block_attention_fused"]

_PIECE, _COMBINE = Tunable("draft_piece"), Tunable("draft_combine")
_RING_PIECE = 256
"""Tokens in a piece of a ring: 17 pieces of 4,096 tokens times 8 heads fill a GPU once."""
_TILE = 64
"""Tokens loaded at a time; a page has as many or a multiple."""
_CHUNK = 16
"""Pieces that are added at a time."""


@triton.jit
def _first_token(length, WINDOW: tl.constexpr):
    """The first token of the context that a block's first row sees."""
    return tl.maximum(length - WINDOW + 1, 0) if WINDOW > 0 else length * 0


@triton.jit
def _bounds(piece, length, WINDOW: tl.constexpr, PIECE: tl.constexpr, DOUBLINGS: tl.constexpr):
    """(first token of a piece of the context, first token after it)."""
    if WINDOW > 0:
        start = (_first_token(length, WINDOW) // PIECE + piece) * PIECE
        return start, tl.minimum(start + PIECE, length)
    else:
        start, end = piece_bounds(piece, DOUBLINGS)
        return start, tl.minimum(end, length)


@triton.jit
def _attend(query, state, keys, values, visible, scale):
    """One step of the running softmax: query [M, D], keys and values [TILE, D], visible bool [M, TILE]."""
    best, total, mixed = state
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32)) * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    fade = tl.exp2(best - base)
    shares = tl.exp2(scores - base[:, None])
    mixed = dot(rounded(shares, values.dtype), values, mixed * fade[:, None])
    return new_best, total * fade + tl.sum(shares, 1), mixed


@triton.jit(do_not_specialize=["length_ptr", "slots_ptr", "sequences_ptr", "table_ptr", "num_pieces", "table_stride"])
def block_attention_piece_kernel(
    query_ptr,  # [B * T, Q, D]
    key_ptr,  # [B * T, KV, D]
    value_ptr,  # [B * T, KV, D]
    cached_ptr,  # [N, 2, KV, tokens, D], stride of the first cached_stride
    length_ptr,  # int32 [B]
    slots_ptr,  # int32 [B]
    sequences_ptr,  # int32 [B]
    table_ptr,  # int32 [S, pages], stride table_stride
    partial_ptr,  # float32 [B * T, num_pieces + 1, Q, D]
    best_ptr,  # float32 [B * T, num_pieces + 1, Q]
    total_ptr,  # float32 [B * T, num_pieces + 1, Q]
    scale,
    num_pieces,
    table_stride,
    cached_stride,
    tokens,  # of a ring or of a page
    T: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    IS_CAUSAL: tl.constexpr,
    PIECE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,  # a block's rows, at least 16
    DEPENDENT: tl.constexpr,
):
    """Program (KV head, piece, block); the last piece is the block itself."""
    GROUP_HEADS: tl.constexpr = Q // KV
    release(DEPENDENT)
    head = tl.program_id(0)
    piece = tl.program_id(1)
    block = tl.program_id(2)
    wait(DEPENDENT)
    length = tl.load(length_ptr + block)
    start, end = _bounds(piece, length, WINDOW, PIECE, DOUBLINGS)
    is_block = piece == num_pieces
    if is_block | (start < end):
        index = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, D)
        row = index // GROUP_HEADS
        inside = index < T * GROUP_HEADS
        row_head = (block * T + row).to(tl.int64) * Q + head * GROUP_HEADS + index % GROUP_HEADS
        query = tl.load(query_ptr + row_head[:, None] * D + columns[None, :], mask=inside[:, None], other=0.0)
        best, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, D], tl.float32)
        if is_block:
            other = tl.arange(0, BLOCK_T)
            is_there = other < T
            at = ((block * T + other).to(tl.int64) * KV + head)[:, None] * D + columns[None, :]
            keys = tl.load(key_ptr + at, mask=is_there[:, None], other=0.0)
            values = tl.load(value_ptr + at, mask=is_there[:, None], other=0.0)
            visible = inside[:, None] & is_there[None, :]
            if IS_CAUSAL:
                visible = visible & (other[None, :] <= row[:, None])
            if WINDOW > 0:
                visible = visible & (tl.abs(other[None, :] - row[:, None]) < WINDOW)
            best, total, mixed = _attend(query, (best, total, mixed), keys, values, visible, scale)
        else:
            first_token = _first_token(length, WINDOW)
            table_at = table_ptr + tl.load(sequences_ptr + block).to(tl.int64) * table_stride
            ring = tl.load(slots_ptr + block).to(tl.int64) * cached_stride
            for position in range(loop_bound(start), loop_bound(end), TILE):
                token = position + tl.arange(0, TILE)
                if WINDOW > 0:
                    base = ring
                    place = token % tokens
                else:
                    base = tl.load(table_at + position // tokens).to(tl.int64) * cached_stride
                    place = token % tokens
                at = base + (head * tokens + place)[:, None] * D + columns[None, :]
                loaded = (token >= first_token) & (token < end)
                keys = tl.load(cached_ptr + at, mask=loaded[:, None], other=0.0)
                values = tl.load(cached_ptr + KV * tokens * D + at, mask=loaded[:, None], other=0.0)
                visible = inside[:, None] & loaded[None, :]
                if WINDOW > 0:
                    visible = visible & (length + row[:, None] - token[None, :] < WINDOW)
                best, total, mixed = _attend(query, (best, total, mixed), keys, values, visible, scale)
        cell = ((block * T + row).to(tl.int64) * (num_pieces + 1) + piece) * Q + head * GROUP_HEADS
        cell += index % GROUP_HEADS
        tl.store(best_ptr + cell, best, mask=inside)
        tl.store(total_ptr + cell, total, mask=inside)
        tl.store(partial_ptr + cell[:, None] * D + columns[None, :], mixed, mask=inside[:, None])


@triton.jit(do_not_specialize=["length_ptr", "num_pieces"])
def block_attention_combine_kernel(
    out_ptr,  # [B * T, Q * D]
    planes_ptr,  # int8 [B * T, 2, Q * D]; this and the next in the layout of `store_groups`
    scale_ptr,  # float32 [B * T, Q * D / 128]
    partial_ptr,
    best_ptr,
    total_ptr,
    length_ptr,  # int32 [B]
    num_pieces,
    T: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a program
    WINDOW: tl.constexpr,
    PIECE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_FUSED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, group of heads)."""
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, HEADS * D)
    head = tl.program_id(1) * HEADS + index // D
    wait(DEPENDENT)
    length = tl.load(length_ptr + tl.program_id(0) // T)
    if WINDOW > 0:
        first_piece = _first_token(length, WINDOW) // PIECE
        count = tl.where(length > 0, (length - 1) // PIECE - first_piece + 1, 0)
    else:
        count = count_pieces(length, DOUBLINGS)
    first_cell = row * (num_pieces + 1) * Q + head
    own = first_cell + num_pieces.to(tl.int64) * Q
    best = tl.load(best_ptr + own)
    total = tl.load(total_ptr + own)
    mixed = tl.load(partial_ptr + own * D + index % D)
    for first in range(0, loop_bound(count), CHUNK):
        piece = first + tl.arange(0, CHUNK)
        inside = (piece < count)[:, None]
        cell = first_cell[None, :] + piece[:, None] * Q
        bests = tl.load(best_ptr + cell, mask=inside, other=float("-inf"))
        totals = tl.load(total_ptr + cell, mask=inside, other=0.0)
        parts = tl.load(partial_ptr + cell * D + (index % D)[None, :], mask=inside, other=0.0)
        new_best = tl.maximum(best, tl.max(bests, 0))
        fade = tl.exp2(best - new_best)
        weight = tl.exp2(bests - new_best[None, :])
        total = total * fade + tl.sum(weight * totals, 0)
        mixed = mixed * fade + tl.sum(weight * parts, 0)
        best = new_best
    mixed = rounded(mixed / total, out_ptr.dtype.element_ty).to(tl.float32)
    if IS_FUSED:
        group = tl.program_id(1) * (HEADS * D // 128)
        store_groups(mixed, index, row, group, out_ptr, planes_ptr, scale_ptr, Q * D)
    else:
        at = row * (Q * D) + tl.program_id(1) * (HEADS * D) + index
        tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty))


def block_attention(query, key, value, cached, context, mask, scale):
    rows, num_heads, dim = query.shape
    out = query.new_empty(rows, num_heads * dim)
    _run(query, key, value, cached, (context, mask, scale), (out, None, None))
    return out


def block_attention_fused(query, key, value, cached, context, mask, scale):
    rows, num_heads, dim = query.shape
    out = new_rows(rows, num_heads * dim, query.dtype, query.device)
    _run(query, key, value, cached, (context, mask, scale), out)
    return FixedRows(*out, None)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: Tensor,
    how: tuple[BlockContext, BlockMask, float],
    out: tuple[Tensor, Tensor | None, Tensor | None],
) -> None:
    context, mask, scale = how
    (rows, num_heads, dim), kv_heads = query.shape, key.shape[1]
    num_blocks, tokens, window = len(context.length), cached.shape[3], mask.window or 0
    size, group_heads = rows // num_blocks, num_heads // kv_heads
    if window:
        num_pieces = (window - 2) // _RING_PIECE + 2
    else:
        num_pieces = piece_count(context.page_table.shape[1] * tokens, BLOCK_DOUBLINGS)
    partial = query.new_empty((rows, num_pieces + 1, num_heads, dim), dtype=torch.float32)
    best, total = (query.new_empty(partial.shape[:3], dtype=torch.float32) for _ in range(2))
    shape = {"T": size, "Q": num_heads, "D": dim, "WINDOW": window, "PIECE": _RING_PIECE, "DOUBLINGS": BLOCK_DOUBLINGS}
    block_attention_piece_kernel[(kv_heads, num_pieces + 1, num_blocks)](
        query,
        key,
        value,
        cached,
        context.length,
        context.slots,
        context.sequences,
        context.page_table,
        partial,
        best,
        total,
        scale * math.log2(math.e),
        num_pieces,
        context.page_table.stride(0),
        cached.stride(0),
        tokens,
        **shape,
        KV=kv_heads,
        IS_CAUSAL=mask.is_causal,
        TILE=_TILE,
        BLOCK_M=max(16, next_power_of_2(MAX_BLOCK * group_heads)),
        BLOCK_T=MAX_BLOCK,
        num_warps=4,
        num_stages=2,
        **launch_options(_PIECE, f"{num_heads}_{window}"),
    )
    heads = ceil_div(128, dim) if out[1] is not None else 1
    block_attention_combine_kernel[(rows, num_heads // heads)](
        *out,
        partial,
        best,
        total,
        context.length,
        num_pieces,
        **shape,
        HEADS=heads,
        CHUNK=_CHUNK,
        IS_FUSED=out[1] is not None,
        num_warps=4,
        **launch_options(_COMBINE, num_heads),
    )
