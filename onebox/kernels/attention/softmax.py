"""The running softmax over tiles of tokens, which decoding and prefill share. Knows pages, not who reads which."""

import triton
import triton.language as tl

from onebox.kernels.attention.planes import load_planes
from onebox.kernels.common.arithmetic import IS_INTERPRETED, rounded

__all__ = ["attend_tile"]


@triton.jit
def _dot(a, b, total):
    """The product a @ b + total in float32. The interpreter cannot multiply bfloat16 itself."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def attend_tile(
    query_low,
    query_high,
    visible,  # int32 [M]: tokens that each row sees
    best,  # float32 [M]: the running maximum, of scores in powers of two
    total,  # float32 [M]: the running sum of shares
    mixed_low,  # float32 [M, D/2]: the running values
    mixed_high,
    position,  # of the tile's first token, a multiple of TILE
    end,  # tokens from here on are not read
    page,  # int64: where the tile's tokens are
    head,
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    key_table,  # of `load_tables`
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    value_table,
    scale,  # of scores, times log2(e)
    V: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One step of the running softmax over TILE tokens."""
    offset = tl.arange(0, TILE)
    vectors = tl.multiple_of((page * V + head) * P + position % P, TILE) + offset
    loaded = position + offset < end
    DTYPE: tl.constexpr = query_low.dtype
    key_low, key_high, key_factor = load_planes(
        key_codes_ptr, key_scale_ptr, key_levels_ptr, vectors, loaded, key_table, D, KEY_BITS, DTYPE
    )
    scores = _dot(query_low, tl.trans(key_low), tl.zeros([query_low.shape[0], TILE], tl.float32))
    scores = _dot(query_high, tl.trans(key_high), scores)
    scores = scores * (key_factor * scale)[None, :]
    scores = tl.where((position + offset)[None, :] < visible[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet
    fade = tl.exp2(best - base)
    shares = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(shares, 1)
    value_low, value_high, value_factor = load_planes(
        value_codes_ptr, value_scale_ptr, value_levels_ptr, vectors, loaded, value_table, D, VALUE_BITS, DTYPE
    )
    if VALUE_BITS < 16:
        value_factor = tl.where(loaded, value_factor, 0.0)
    weights = rounded(shares * value_factor[None, :], DTYPE)  # a share is at most 1 and a factor a float16
    mixed_low = _dot(weights, value_low, mixed_low * fade[:, None])
    mixed_high = _dot(weights, value_high, mixed_high * fade[:, None])
    return new_best, total, mixed_low, mixed_high
