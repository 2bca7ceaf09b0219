"""The running softmax over tiles of tokens in pages, shared by decode and prefill."""

import triton
import triton.language as tl

from onebox.kernels.attention.planes import load_planes, load_tables
from onebox.kernels.common.arithmetic import IS_INTERPRETED, loop_bound, rounded

__all__ = ["attend_tokens"]


@triton.jit
def _dot(a, b, total):
    """The product a @ b + total in float32. The interpreter cannot multiply bfloat16 itself."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _attend_tile(
    query_low,
    query_high,
    visible,
    best,
    total,
    mixed_low,
    mixed_high,
    position,  # position of the tile's first token, a multiple of TILE
    end,
    page,  # int64: the page of the tile's tokens
    head,
    key,  # codes, scale, levels, table of `load_tables`; so is the next
    value,
    scale,
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One step of the running softmax over TILE tokens."""
    offset = tl.arange(0, TILE)
    vectors = tl.multiple_of((page * KV + head) * P + position % P, TILE) + offset
    loaded = position + offset < end
    DTYPE: tl.constexpr = query_low.dtype
    key_low, key_high, key_factor = load_planes(key, vectors, loaded, D, KEY_BITS, DTYPE)
    scores = _dot(query_low, tl.trans(key_low), tl.zeros([query_low.shape[0], TILE], tl.float32))
    scores = _dot(query_high, tl.trans(key_high), scores)
    scores = scores * (key_factor * scale)[None, :]
    scores = tl.where((position + offset)[None, :] < visible[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row without a visible token so far
    fade = tl.exp2(best - base)
    shares = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(shares, 1)
    value_low, value_high, value_factor = load_planes(value, vectors, loaded, D, VALUE_BITS, DTYPE)
    if VALUE_BITS < 16:
        value_factor = tl.where(loaded, value_factor, 0.0)
    weights = rounded(shares * value_factor[None, :], DTYPE)  # a softmax weight is at most 1 and a factor is float16
    mixed_low = _dot(weights, value_low, mixed_low * fade[:, None])
    mixed_high = _dot(weights, value_high, mixed_high * fade[:, None])
    return new_best, total, mixed_low, mixed_high


@triton.jit
def attend_tokens(
    query_ptr,  # [rows, D], in the planes of the keys
    row,  # int64 [M]: rows of this program
    inside,  # [M]: which of them exist
    visible,  # int32 [M]: number of tokens visible to each row
    start,  # the first token, a multiple of TILE
    end,  # tokens from here on are not read
    table_ptr,  # int32: the sequence's pages
    page,  # page of the first token if already loaded, else None
    head,  # the KV head
    key,  # pointers to codes, scale, levels, lookup table; so is the next
    value,
    scale,  # scale of the scores, times log2(e)
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of the rows over the tokens from start to end.

    float32 (best [M]: the largest score, as a power of two; total [M]: the sum of softmax weights; the weighted sum
    of values, not yet divided by total, in two planes [M, D/2]). A tile's page number is loaded one tile ahead, so that
    prefetching a tile never waits for it.
    """
    M: tl.constexpr = row.shape[0]
    at = query_ptr + row[:, None] * D + tl.arange(0, D // 2)[None, :]
    query_low = tl.load(at, mask=inside[:, None], other=0.0)
    query_high = tl.load(at + D // 2, mask=inside[:, None], other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed_low = tl.zeros([M, D // 2], tl.float32)
    mixed_high = tl.zeros([M, D // 2], tl.float32)
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    key_table, value_table = load_tables(key[3], value[3], KEY_BITS, VALUE_BITS, DTYPE)
    if page is None:
        page = tl.load(table_ptr + start // P)
    for position in range(loop_bound(start), loop_bound(end), TILE):
        next_position = position + TILE
        next_page = tl.load(table_ptr + next_position // P, mask=next_position < end, other=0)
        best, total, mixed_low, mixed_high = _attend_tile(
            query_low,
            query_high,
            visible,
            best,
            total,
            mixed_low,
            mixed_high,
            position,
            end,
            page.to(tl.int64),
            head,
            (key[0], key[1], key[2], key_table),
            (value[0], value[1], value[2], value_table),
            scale,
            KV,
            P,
            D,
            KEY_BITS,
            VALUE_BITS,
            TILE,
        )
        page = next_page
    return best, total, mixed_low, mixed_high
