"""The running softmax over tiles of tokens in pages, shared by decode and prefill."""

import triton
import triton.language as tl

from onebox.kernels.attention.planes import (
    VALUE_SHIFT,
    WEIGHT_SHIFT,
    load_keys,
    load_values,
)
from onebox.kernels.common.arithmetic import dot, loop_bound, rounded

__all__ = ["attend_decoded", "attend_tokens", "begin", "finish", "operand_dtype"]


@triton.constexpr_function
def operand_dtype(query_dtype, stored_dtype, bits, is_key):
    """The dtype of keys, or of values, in products.

    Queries and codebook levels are not exact in bfloat16; float16 has three more bits, and they are far inside its
    range: queries are normed, levels below one. E4M3 is exact in both. Softmax weights times the scales of FP8 values
    are not inside float16's range, so those products are bfloat16's.
    """
    if query_dtype == tl.float32:
        return query_dtype
    if bits == 16:
        return stored_dtype
    return tl.float16 if bits < 8 or is_key else tl.bfloat16


@triton.jit
def begin(M: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr):
    """The state of `attend_tokens` before the first token."""
    best, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D // PLANES], tl.float32)
    if PLANES == 4:
        return best, total, (mixed, mixed, mixed, mixed)
    elif PLANES == 2:
        return best, total, (mixed, mixed)
    else:
        return best, total, (mixed,)


@triton.jit
def finish(mixed, factor, VALUE_BITS: tl.constexpr):
    """The planes of the weighted sum, times factor [M]."""
    if VALUE_BITS == 8:
        factor = factor * (1.0 / (VALUE_SHIFT * WEIGHT_SHIFT))
    if len(mixed) == 4:
        first, second = mixed[0] * factor[:, None], mixed[1] * factor[:, None]
        return first, second, mixed[2] * factor[:, None], mixed[3] * factor[:, None]
    elif len(mixed) == 2:
        return mixed[0] * factor[:, None], mixed[1] * factor[:, None]
    else:
        return (mixed[0] * factor[:, None],)


@triton.jit
def _mix(weights, values, mixed, fade):
    """Plane by plane, mixed * fade + weights @ values."""
    first = dot(weights, values[0], mixed[0] * fade[:, None])
    if len(mixed) == 1:
        return (first,)
    else:
        second = dot(weights, values[1], mixed[1] * fade[:, None])
        if len(mixed) == 2:
            return first, second
        else:
            third = dot(weights, values[2], mixed[2] * fade[:, None])
            return first, second, third, dot(weights, values[3], mixed[3] * fade[:, None])


@triton.jit
def _attend_tile(
    query,  # planes
    visible,
    state,
    position,  # position of the tile's first token, a multiple of TILE
    end,
    vectors,  # int64 [TILE]: where the tokens' keys and values are
    key,  # codes, scale, levels, table of `load_tables`; so is the next
    value,
    scale,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_DECODED: tl.constexpr,  # all planes one after the other: where a token is not loaded, its factor is zero
):
    """One step of the running softmax over TILE tokens."""
    best, total, mixed = state
    offset = tl.arange(0, TILE)
    if IS_DECODED:
        keys = load_keys(key, vectors, D, 16, query[0].dtype, False)
    else:
        keys = load_keys(key, vectors, D, KEY_BITS, query[0].dtype, WARPS > 0)
    scores = tl.zeros([query[0].shape[0], TILE], tl.float32)
    for plane in tl.static_range(len(query)):
        scores = dot(query[plane], tl.trans(keys[plane]), scores)
    # Scales are loaded without a mask, which would keep these few bytes from being prefetched; pages are readable.
    if key[1] is not None:
        key_factor = tl.load(key[1] + vectors).to(tl.float32)
        scores = scores * (key_factor if IS_DECODED else key_factor * scale)[None, :]
    if IS_MASKED:
        scores = tl.where((position + offset)[None, :] < visible[:, None], scores, float("-inf"))
    # Without a factor for each token, one for all is part of the exponent's multiply-add.
    rest = scale if key[1] is None else 1.0
    new_best = tl.maximum(best, tl.max(scores, 1) * rest)
    # Only with a mask can there be a row without a visible token so far.
    base = tl.where(new_best == float("-inf"), 0.0, new_best) if IS_MASKED else new_best
    fade = tl.exp2(best - base)
    shares = tl.exp2(scores * rest - base[:, None])
    total = total * fade + tl.sum(shares, 1)
    loaded = (position + offset < end) if IS_MASKED else None
    if IS_DECODED:
        values = load_values(value, vectors, None, D, 16, VALUE_DTYPE, 0)
    else:
        values = load_values(value, vectors, loaded, D, VALUE_BITS, VALUE_DTYPE, WARPS)
    if value[1] is not None:
        factor = tl.load(value[1] + vectors).to(tl.float32)
        if IS_MASKED:
            factor = tl.where(loaded, factor, 0.0)
        if VALUE_BITS == 8 and not IS_DECODED:
            factor = factor * WEIGHT_SHIFT
        shares = shares * factor[None, :]  # a softmax weight is at most 1 and a factor is float16
    return new_best, total, _mix(rounded(shares, VALUE_DTYPE), values, mixed, fade)


@triton.jit
def attend_tokens(
    query,  # planes of the rows' queries, from `load_query`
    visible,  # int32 [M]: number of tokens visible to each row
    state,  # what `begin` gave, or this function for earlier tokens
    start,  # the first token, a multiple of TILE
    end,  # tokens from here on are not read
    table_ptr,  # int32: the sequence's pages
    page,  # page of the first token if already loaded, else None
    head,  # the KV head
    key,  # pointers to codes, scale, levels; what `load_tables` gave. So is the next.
    value,
    scale,  # scale of the scores, times log2(e); positive
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,  # see `load_values`
    IS_MASKED: tl.constexpr,  # False: all tokens from start to end, whole tiles, are visible to all rows
):
    """Attention of the rows over the tokens from start to end.

    The state: float32 (best [M]: the largest score, as a power of two; total [M]: the sum of softmax weights; the
    planes of the weighted sum of values, not yet divided by total, which `finish` completes). A tile's page number is
    loaded one tile ahead, so that prefetching a tile never waits for it.
    """
    if page is None:
        page = tl.load(table_ptr + start // P, mask=start < end, other=0)
    for position in range(loop_bound(start), loop_bound(end), TILE):
        next_position = position + TILE
        next_page = tl.load(table_ptr + next_position // P, mask=next_position < end, other=0)
        first = tl.multiple_of((page.to(tl.int64) * KV + head) * P + position % P, TILE)
        state = _attend_tile(
            query,
            visible,
            state,
            position,
            end,
            first + tl.arange(0, TILE),
            key,
            value,
            scale,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            WARPS,
            IS_MASKED,
            False,
        )
        page = next_page
    return state


@triton.jit
def attend_decoded(
    query,
    visible,
    state,
    start,
    end,
    first,  # int64: the vector of token 0, if it were there
    key,  # pointers to decoded planes and factors; so is the next
    value,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """`attend_tokens` over vectors that were decoded before, one after the other: the same sums in the same order."""
    for position in range(loop_bound(start), loop_bound(end), TILE):
        state = _attend_tile(
            query,
            visible,
            state,
            position,
            end,
            tl.multiple_of(first + position, TILE) + tl.arange(0, TILE),
            key,
            value,
            1.0,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            0,
            IS_MASKED,
            True,
        )
    return state
